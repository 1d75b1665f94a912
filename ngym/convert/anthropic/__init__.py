"""Anthropic's Messages API, for clients and as a back end."""
