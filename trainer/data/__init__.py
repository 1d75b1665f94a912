"""Rows of files and of rollouts as training samples and batches."""
