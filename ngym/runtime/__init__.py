"""Runtime of a process: event loop, signals and the live region of the terminal."""
