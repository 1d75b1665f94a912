"""Sweeps: a grid of recipes, a process for each run, and a table of the results."""
