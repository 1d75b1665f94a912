"""Agent servers: rollouts, their tool loop, and the pace at which they start."""
