"""A program of scripts/ without a suffix, as a module."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

import pytest
from paths import ROOT


def script_module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; it is in sys.modules until the end of the test."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    loaded = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, loaded)
    loader.exec_module(loaded)
    return loaded
