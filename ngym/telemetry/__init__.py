"""Traces and logs, and the redaction of secrets."""
