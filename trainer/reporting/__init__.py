"""Reports of a run: metrics, their display, and the sinks that receive them."""
