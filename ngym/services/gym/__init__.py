"""Gym servers: tools, sessions, verification, steps and MCP."""
