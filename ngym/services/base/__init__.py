"""What every service has: its app, process, request handling, deadlines and back-pressure."""
