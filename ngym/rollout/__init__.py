"""Parts of a rollout: token segments, tool calls, token usage, transcript."""
