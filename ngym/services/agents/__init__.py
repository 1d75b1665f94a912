"""Agent servers: rollouts, their tool loop, and the order and rate in which they start."""
