"""The parts of a rollout: token segments, tool calls, token usage and its transcript."""
