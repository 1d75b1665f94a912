"""Reads the tool calls of a response: its function_call items, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson


class Call(NamedTuple):
    """One function_call item. arguments: None if the model did not write a JSON object."""

    name: str
    arguments: dict[str, Any] | None
    call_id: str | None = None


def calls_in(response: Mapping[str, Any]) -> list[Call]:
    """Every function_call item of a Responses-API response, except those of a cut-off last turn, which are not run."""
    items = response.get("output") or []
    if response.get("status") == "incomplete":
        items = items[: _last_turn(items)]
    return [
        Call(str(item.get("name")), _arguments(item.get("arguments")), item.get("call_id"))
        for item in items
        if item.get("type") == "function_call"
    ]


def _last_turn(items: Sequence[Mapping[str, Any]]) -> int:
    """The index where the model's last turn begins: after the last item of a tool or a user."""
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
