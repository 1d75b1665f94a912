"""Validation of the fields and items of a request."""
