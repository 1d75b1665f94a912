"""Imports a service from its file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from ngym.config.import_path import load_file
from ngym.errors import ConfigError


def load(file: Path) -> ModuleType:
    """The service in this file.

    Raises:
        ConfigError: the file cannot be imported, or defines no service.
    """
    module = load_file(file)
    if not hasattr(module, "app") and not hasattr(module, "serve"):
        del sys.modules[module.__name__]
        raise ConfigError(
            f"{file}: defines neither `app = gym_server(...)` (or agent, model_server) nor `async def serve(context)`"
        )
    return module
