"""New weights for the engine: pushes of whole weights and adapters, their checks, transfer and sleep."""
