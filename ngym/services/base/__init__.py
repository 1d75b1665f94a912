"""Shared by all services: the app, its process, request handling, deadlines and back-pressure."""
