"""The training engine: DeepSpeed, the optimizer, and the handling of failed ranks."""
