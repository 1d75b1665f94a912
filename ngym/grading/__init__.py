"""Tools for verifiers: answer extraction, comparison of text and numbers, rewards, and LLM judges."""
