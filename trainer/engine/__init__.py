"""The training engine: DeepSpeed, the optimizer, and the ranks with their failures."""
