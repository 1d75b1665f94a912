"""Weights for the model servers: publishing, sharing of GPUs, and pushes."""
