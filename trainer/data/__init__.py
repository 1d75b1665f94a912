"""Training samples and batches from rows of files and from rollouts."""
