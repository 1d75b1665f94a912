"""Tools for verifiers: answer extraction, comparison of texts and numbers, rewards, and LLM judges."""
