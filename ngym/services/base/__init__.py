"""What every service shares: its app, process, request handling, deadlines and back-pressure."""
