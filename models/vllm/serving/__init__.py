"""Serving: arguments and environment of vLLM, the server during loading, and Chat Completions."""
