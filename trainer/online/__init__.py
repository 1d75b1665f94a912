"""Live rollouts: their tasks, services and groups, and the batches made of them."""
