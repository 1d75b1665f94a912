"""Statistics of scored rollouts: pass@k, majority votes, and the difficulty of tasks."""
