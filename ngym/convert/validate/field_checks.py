"""What a field's value must be, said once: a check takes the value and says what is wrong with it, or None."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ngym.convert.validate.item_checks import shown
from ngym.did_you_mean import did_you_mean

Check = Callable[[Any], str | None]
"""A field's value -> what is wrong with it, or None. Null is the same as leaving the field out, always."""


def of_type(kind: type | tuple[type, ...], name: str) -> Check:
    def check(value: Any) -> str | None:
        return None if isinstance(value, kind) else f"must be {name}"

    return check


def number(low: float, high: float, *, whole: bool = False) -> Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if right and low <= value <= high:
            return None
        return f"must be {'a whole number' if whole else 'a number'} from {low:g} to {high:g}, not {shown(value)}"

    return check


def one_of(*choices: Any) -> Check:
    def check(value: Any) -> str | None:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return None
        return f"must be {' or '.join(map(repr, choices))}, not {shown(value)}"

    return check


def object_of(**checks: Check) -> Check:
    """An object with these members, each of which may be left out."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "must be an object"
        for name, inner in value.items():
            if name not in checks:
                return f"has no member {shown(name)}{did_you_mean(str(name), checks)}"
            wrong = None if inner is None else checks[name](inner)
            if wrong:
                return f"{name} {wrong}"
        return None

    return check


def list_of(choices: Iterable[str]) -> Check:
    """A list of some of these strings."""
    known = frozenset(choices)

    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return "must be a list"
        for entry in value:
            if not isinstance(entry, str) or entry not in known:
                hint = did_you_mean(entry, known) if isinstance(entry, str) else ""
                return f"{shown(entry)} is not known{hint}"
        return None

    return check


TEXT = of_type(str, "a string")
FLAG = of_type(bool, "true or false")
OBJECT = of_type(dict, "an object")
LIST = of_type(list, "a list")
COUNT = number(1, 2**31, whole=True)


def strings(value: Any) -> str | None:
    """A string or a list of them."""
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        return None
    return "must be a string or a list of strings"


def metadata(value: Any) -> str | None:
    """Words under names."""
    if isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values()):
        return None
    return "must be an object whose values are strings"


def tool_choice(value: Any) -> str | None:
    """A mode, or an object that names a tool."""
    if value in ("none", "auto", "required") or (isinstance(value, dict) and isinstance(value.get("type"), str)):
        return None
    return f"must be 'none', 'auto', 'required' or an object that names a tool, not {shown(value)}"


_SCHEMA = {"name": TEXT, "schema": OBJECT, "strict": FLAG, "description": TEXT}


def text_format(value: Any) -> str | None:
    """`text.format` of a Responses request."""
    match value:
        case {"type": "text" | "json_object"}:
            return None
        case {"type": "json_schema", "name": str(), "schema": dict()}:
            return object_of(type=TEXT, **_SCHEMA)(value)
        case {"type": "json_schema"}:
            return "must have its name and schema"
    return "must have the type text, json_schema or json_object"


def response_format(value: Any) -> str | None:
    """`response_format` of a Chat request."""
    match value:
        case {"type": "text" | "json_object"}:
            return None
        case {"type": "json_schema", "json_schema": {"name": str()} as schema}:
            wrong = object_of(**_SCHEMA)(schema)
            return f"json_schema {wrong}" if wrong else None
        case {"type": "json_schema"}:
            return "json_schema must have its name and schema"
    return "must have the type text, json_schema or json_object"
