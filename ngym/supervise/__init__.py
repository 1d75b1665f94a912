"""Start every service of a config, wait until each is ready, restart what dies, stop everything together.

Import from the modules: `supervisor` is the way in, and `zygote` is imported by a process that must stay small.
"""
