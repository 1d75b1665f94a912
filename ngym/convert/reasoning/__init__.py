"""Reasoning in text, in signed blocks, and in the pieces of a stream."""
