"""Connections: authentication, TLS, connection and JSON limits, retries, and the choice of a replica."""
