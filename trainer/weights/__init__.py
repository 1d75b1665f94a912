"""Weights to the servers that sample: publishing, shared memory, and pushes."""
