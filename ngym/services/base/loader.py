"""Imports a service or an algorithm from its file under a private name, without changing sys.path."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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


def load_file(file: Path) -> ModuleType:
    """The module in this file, imported once. Relative imports of an `app.py` find the files next to it.

    Raises:
        ConfigError: the file cannot be imported.
    """
    file = file.resolve()
    name = f"_ngym_{file.parent.name if file.name == 'app.py' else file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = [str(file.parent)] if file.name == "app.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportError):
            raise ConfigError(f"{file}: {error}; install its dependencies (its README names the extra)") from error
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
        raise
    return module
