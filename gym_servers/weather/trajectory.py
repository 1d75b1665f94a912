"""What did the tool really say? Read from the outputs in the trajectory, which the agent wrote, not the model."""

import json
from collections.abc import Iterator
from typing import Any


def place(city: str) -> str:
    """`Paris, France` and `paris` are one place."""
    return city.partition(",")[0].strip().casefold()


def reported(response: dict[str, Any], city: str) -> str | None:
    """The last word of the last weather description that `get_weather` gave for this city; None if it gave none."""
    items = response.get("output") or []
    outputs = {
        str(item.get("call_id")): item.get("output") for item in items if item.get("type") == "function_call_output"
    }
    word = None
    for call_id in _calls_for(items, place(city)):
        description = _field(outputs.get(call_id), "weather_description")
        if description:
            word = description.rstrip(" .").rpartition(" ")[2].casefold()
    return word


def _calls_for(items: list[dict[str, Any]], wanted: str) -> Iterator[str]:
    for item in items:
        is_call = item.get("type") == "function_call" and item.get("name") == "get_weather"
        if is_call and place(_field(item.get("arguments"), "city")) == wanted:
            yield str(item.get("call_id"))


def _field(text: Any, name: str) -> str:
    """A string member of a JSON object that stands in a string; "" where there is none."""
    try:
        value = json.loads(text)[name]
    except (TypeError, ValueError, KeyError, IndexError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
