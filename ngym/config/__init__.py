"""Configuration: `global_config.yaml`, environment cards, and the files that ship with ngym."""
