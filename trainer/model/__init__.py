"""The network, and its outputs for the trained tokens."""
