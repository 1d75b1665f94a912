"""Checkpoints: written atomically, kept, and resumed from."""
