"""Which tools did the model ask for, and with what? Read from a response's function_call items, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson


class Call(NamedTuple):
    """One function_call item. arguments is None where the model wrote no JSON object."""

    name: str
    arguments: dict[str, Any] | None
    call_id: str | None = None


def calls_in(response: Mapping[str, Any]) -> list[Call]:
    """Every function_call item of a Responses-API response."""
    items = response.get("output") or []
    return [
        Call(str(item.get("name")), _arguments(item.get("arguments")), item.get("call_id"))
        for item in items
        if item.get("type") == "function_call"
    ]


def _arguments(text: Any) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return None
    return value if isinstance(value, dict) else None
