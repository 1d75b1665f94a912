"""Evaluation during training: on live environments, or as a loss on held-out rows."""
