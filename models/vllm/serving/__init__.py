"""Serving: from the options to the answer of a request, and who answers while the model loads."""
