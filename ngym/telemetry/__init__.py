"""Traces and logs, and the removal of secrets from both."""
