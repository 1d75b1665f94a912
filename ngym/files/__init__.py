"""Files of rows: JSON Lines, the append-only row log, and file locks."""
