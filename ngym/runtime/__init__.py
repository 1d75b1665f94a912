"""The runtime of a process: event loop, signals, competing tasks, and its region of the terminal."""
