"""Which tools did the model ask for, and with what? Read from a response's function_call items, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson


class Call(NamedTuple):
    """One function_call item. arguments is None where the model wrote no JSON object."""

    name: str
    arguments: dict[str, Any] | None
    call_id: str | None = None


def calls_in(response: Mapping[str, Any]) -> list[Call]:
    """Every function_call item of a Responses-API response, but those of a last turn that was cut off: nobody runs them."""
    items = response.get("output") or []
    if response.get("status") == "incomplete":
        items = items[: _last_turn(items)]
    return [
        Call(str(item.get("name")), _arguments(item.get("arguments")), item.get("call_id"))
        for item in items
        if item.get("type") == "function_call"
    ]


def _last_turn(items: Sequence[Mapping[str, Any]]) -> int:
    """Where the model's last turn begins: after the last thing that a tool or a user said."""
    for place in range(len(items), 0, -1):
        item = items[place - 1]
        if item.get("type") == "function_call_output" or item.get("role") not in (None, "assistant"):
            return place
    return 0


def _arguments(text: Any) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return None
    return value if isinstance(value, dict) else None
