"""What makes the engine faster on a CPU."""
