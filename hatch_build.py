"""Puts what ships beside the package into the wheel; an editable installation finds it in the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Programs and data, not packages: under `ngym` they travel with it and add no import name.
# The rest of `data` are links to the data of environments, in gym_servers: a wheel would hold these files twice.
SHIPPED = ("agents", "bridges.yaml", "data/tiny_policy", "global_config.yaml", "gym_servers", "models", "nemo_gym.yaml")


class ShippedServices(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" for a wheel, "editable" for a link to this folder."""
        if version == "standard":
            build_data["force_include"] |= {name: f"ngym/_shipped/{name}" for name in SHIPPED}
