"""How many tokens did several calls use? The sum; what one of them does not know is unknown for all (null), never 0."""

from __future__ import annotations

from typing import Any

from ngym.schema import Json


def added(total: Json | None, usage: Json | None) -> Json | None:
    """Two calls' usage as one."""
    if total is None or usage is None:
        return None
    return {key: _added(total.get(key), usage.get(key)) for key in total.keys() | usage.keys()}


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _added(left.get(key), right.get(key)) for key in left.keys() | right.keys()}
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left + right
    return None
