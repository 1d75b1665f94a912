"""Files of rows: JSON Lines, the row log of a collection, and file locks."""
