"""Turns a tool's JSON Schema into a Python signature and a Google-style docstring, from which libraries read tools.

`transformers.utils.get_json_schema` turns these back into almost the same schema. What type hints cannot express
(bounds, patterns, fields of nested objects) goes into the parameter's description.
"""

from __future__ import annotations

import json
import re
from inspect import Parameter
from types import GenericAlias
from typing import Any, Literal, Union

from ngym.errors import UsageError
from ngym.schema import Json

BASIC: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
SAID_BY_HINTS = frozenset({"type", "description", "title", "enum", "items", "anyOf", "additionalProperties"})


def parameters_of(tool: Json) -> list[Parameter]:
    """One keyword parameter for each property; those that are not required have a default.

    Raises:
        UsageError: a property's name is not a Python identifier.
    """
    schema = _schema(tool)
    return [_parameter(name, field, name in schema["required"], tool) for name, field in schema["properties"].items()]


def docstring_of(tool: Json) -> str:
    """The description, and an `Args:` section with a line for each property."""
    lines = [_one_line(tool.get("description") or tool["name"])]
    described = [f"    {name}: {_described(name, field)}" for name, field in _schema(tool)["properties"].items()]
    return "\n".join([*lines, "", "Args:", *described] if described else lines)


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^()]*\))?:\s*(.*)")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's description, and the description of each parameter of its Google-style `Args:`.

    The description has no `Args:`, `Returns:` and `Raises:` sections: those are for readers of the code.

    Args:
        text: without the common indentation (`inspect.getdoc`).
    """
    described: dict[str, str] = {}
    kept: list[str] = []
    section, name, indent = "", "", None
    for line in text.splitlines():
        begun = _SECTION.match(line)
        if begun:
            section, name, indent = begun[1], "", None
        elif line.strip() and not line.startswith((" ", "\t")):
            section = ""
        if section in ("Args", "Arguments", "Parameters") and not begun and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            argument = _ARGUMENT.match(line.strip()) if depth <= indent else None
            if argument:
                name = argument[1]
                described[name] = argument[2]
            elif name:
                described[name] = f"{described[name]} {line.strip()}".strip()
        elif section in ("", "Example", "Examples", "Note", "Notes"):
            kept.append(line)
    return "\n".join(kept).strip(), described


def _schema(tool: Json) -> Json:
    schema = tool.get("parameters") or {}
    properties = {
        name: _inlined(field, schema.get("$defs") or {}) for name, field in schema.get("properties", {}).items()
    }
    return {"properties": properties, "required": schema.get("required") or ()}


def _parameter(name: str, field: Json, required: bool, tool: Json) -> Parameter:
    default = Parameter.empty if required else field.get("default")
    try:
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=_hint(field))
    except ValueError:
        raise UsageError(f"tool {tool['name']}: its parameter {name!r} cannot be one of a Python function") from None


def _hint(schema: Json) -> Any:
    match schema:
        case {"enum": [*values]}:
            return Literal[tuple(values)]
        case {"anyOf": [*choices]}:
            return Union[tuple(map(_hint, choices))]  # noqa: UP007 - the choices are known only now
        case {"type": [*kinds]}:
            return Union[tuple(_hint({**schema, "type": kind}) for kind in kinds)]  # noqa: UP007
        case {"type": "array", "items": dict(items)}:
            return GenericAlias(list, (_hint(items),))
        case {"type": "array"}:
            return list
        case {"type": "object", "additionalProperties": dict(values)}:
            return GenericAlias(dict, (str, _hint(values)))
        case {"type": "object"}:
            return dict
        case {"type": str(kind)}:
            return BASIC.get(kind, Any)
    return Any


def _described(name: str, field: Json) -> str:
    """The description with what type hints cannot express: plain limits as text, nested schemas as JSON Schema."""
    parts = [part for part in (field, field.get("items"), *field.get("anyOf", ())) if isinstance(part, dict)]
    text = _one_line(next((part["description"] for part in parts if part.get("description")), name.replace("_", " ")))
    if not all(map(_is_said, _inside(field))) or "properties" in field:
        return f"{text} JSON Schema: {json.dumps({key: value for key, value in field.items() if key != 'description'})}"
    limits = {key: value for key, value in field.items() if key not in SAID_BY_HINTS and value not in (None, "")}
    # The full stop matters: transformers reads "(choices: ...)" at the end as an enum.
    return f"{text} ({', '.join(f'{key}: {value}' for key, value in limits.items())})." if limits else text


def _is_said(schema: Json) -> bool:
    """Whether type hints express the whole schema."""
    return schema.keys() <= SAID_BY_HINTS and all(map(_is_said, _inside(schema)))


def _inside(schema: Json) -> list[Json]:
    """The schemas of its items, values and choices."""
    inside = [schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", ())]
    return [part for part in inside if isinstance(part, dict)]


def _inlined(schema: Any, definitions: Json, seen: tuple[str, ...] = ()) -> Any:
    """The schema without `$ref`; a recursive one stays, because it cannot be expanded."""
    if isinstance(schema, list):
        return [_inlined(part, definitions, seen) for part in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in definitions and name not in seen:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inlined(definitions[name], definitions, (*seen, name)), **beside}
    return {key: _inlined(value, definitions, seen) for key, value in schema.items()}


def _one_line(text: str) -> str:
    """The text without line breaks, which would begin a section or another argument."""
    return " ".join(text.split())
