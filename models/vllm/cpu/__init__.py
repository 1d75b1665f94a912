"""Speed-ups of the engine on a CPU: bundled outputs and kernels."""
