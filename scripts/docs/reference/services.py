"""The shipped services as modules, so that their options and descriptions can be read; none is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ngym.schema import Kind
from ngym.services.base.app import load
from ngym.services.base.options import ServiceOptions

from .specimen import ROOT

FOLDERS: dict[Kind, str] = {"gym_server": "gym_servers", "agent": "agents", "model": "models"}
# Large packages, and those that only a service's own Python has: reading a service's options needs none.
ELSEWHERE = (
    "agents",
    "gymnasium",
    "langchain_core",
    "langchain_openai",
    "langgraph",
    "openai",
    "openenv",
    "reasoning_gym",
    "verifiers",
)


class Shipped(NamedTuple):
    """app: what a stanza calls it."""

    app: str
    options: type[ServiceOptions]
    description: str


def shipped(kind: Kind) -> list[Shipped]:
    """The services of a kind, by name."""
    with _stood_in(ELSEWHERE):
        return [_read(file) for file in sorted((ROOT / FOLDERS[kind]).glob("*/app.py"))]


def _read(file: Path) -> Shipped:
    module = load(file)
    options = module.Options if hasattr(module, "serve") else module.app.state.options_model
    said = " ".join((module.__doc__ or "").split()).partition(": ")[2]
    said = said[:1].upper() + said[1:]
    return Shipped(f"{file.parent.parent.name}/{file.parent.name}", options, said)


class _Name(type):
    """Whatever is done with a name of a package that is not there at import time."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls


class _Module(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (Exception,), {})


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _stood_in(names: Sequence[str]) -> Iterator[None]:
    """Imports of these packages give names without anything behind them."""
    finder = _StandIns(names)
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(kept)
