"""Do two calls mean the same? Compared by the tool's JSON Schema: types, optional defaults, sets, a tolerance for floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ngym.grading.number_match import close

RELATIVE_TOLERANCE = 1e-6
Schema = Mapping[str, Any]


class Matched(NamedTuple):
    """Of the made calls: how many are expected ones, and how many name an expected tool with other arguments."""

    exact: int
    named: int


def matched(made: list[tuple[str, Any]], expected: list[tuple[str, Any]], schemas: Mapping[str, Schema]) -> Matched:
    """Each expected call is matched once; the order is free. Exact matches are taken before those by name."""
    left, rest = list(expected), []
    for name, arguments in made:
        hit = next((e for e in left if e[0] == name and same(arguments, e[1], schemas[name])), None)
        left.remove(hit) if hit else rest.append(name)
    exact = len(made) - len(rest)
    names = [name for name, _ in left]
    for name in rest:
        if name in names:
            names.remove(name)
    return Matched(exact, len(left) - len(names))


def is_schema(value: Any) -> bool:
    """Whether `same` can compare by it."""
    if not isinstance(value, dict):
        return False
    members, required = value.get("properties", {}), value.get("required", [])
    if not (isinstance(members, dict) and isinstance(required, list)):
        return False
    inner = [*members.values(), *([value["items"]] if "items" in value else [])]
    return all(isinstance(name, str) for name in required) and all(map(is_schema, inner))


def same(made: Any, expected: Any, schema: Schema) -> bool:
    """Whether a value that the model wrote means the expected one.

    Text differs neither in case nor in spacing; an enum's value is what it is. 5 and 5.0 are one integer, "5" is none.
    """
    if "enum" in schema:
        return type(made) is type(expected) and bool(made == expected)
    match expected:
        case dict():
            return isinstance(made, dict) and _same_object(made, expected, schema)
        case list():
            return isinstance(made, list) and _same_array(made, expected, schema)
        case bool() | None:
            return made is expected
        case int() | float():
            return not isinstance(made, bool) and isinstance(made, int | float) and _same_number(made, expected)
        case str():
            return isinstance(made, str) and _plain(made) == _plain(expected)
    return False


def _same_object(made: dict[str, Any], expected: dict[str, Any], schema: Schema) -> bool:
    """An optional member that is left out stands for its default, or for null."""
    members: Mapping[str, Schema] = schema.get("properties", {})
    required = schema.get("required", ())
    if made.keys() - members.keys() - expected.keys() or any(name not in made for name in required):
        return False
    names = members.keys() | expected.keys()  # an object of free form declares no members
    return all(_same_member(name, made, expected, members.get(name, {})) for name in names)


def _same_member(name: str, made: dict[str, Any], expected: dict[str, Any], schema: Schema) -> bool:
    default = schema.get("default")
    return same(made.get(name, default), expected.get(name, default), schema)


def _same_array(made: list[Any], expected: list[Any], schema: Schema) -> bool:
    items: Schema = schema.get("items", {})
    if len(made) != len(expected):
        return False
    if not schema.get("uniqueItems"):
        return all(same(one, other, items) for one, other in zip(made, expected, strict=True))
    left = list(expected)
    for one in made:
        hit = next((index for index, other in enumerate(left) if same(one, other, items)), None)
        if hit is None:
            return False
        del left[hit]
    return True


def _same_number(made: float, expected: float) -> bool:
    if isinstance(expected, int):
        return made == expected
    return close(expected, made, RELATIVE_TOLERANCE)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
