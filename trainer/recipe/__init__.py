"""The recipe: its typed options, and the checks of their combinations."""
