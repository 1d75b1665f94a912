"""Losses, advantages and their corrections: pure functions of tensors and numbers."""
