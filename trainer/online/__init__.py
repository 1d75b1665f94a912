"""Live rollouts: their tasks, services, groups and batches."""
