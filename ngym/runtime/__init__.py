"""Runtime of a process: event loop, signals, the live region of the terminal, and imports of heavy libraries."""
