"""Chat Completions to Responses items, and back."""
