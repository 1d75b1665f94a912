"""Shared by all commands: exit codes, options, help, completion, and walks through several commands."""
