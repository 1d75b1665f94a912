"""Starts every service of a config, waits until each is ready, restarts what dies, and stops everything together.

Import from the modules: `supervisor` is the entry point, and `zygote` is imported by a process that must stay small.
"""
