"""The commands that make, score and convert rollout files."""
