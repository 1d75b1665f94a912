"""The keys of a pydantic model, from its own types, defaults and descriptions."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ngym.config.import_path import Choice

from .markup import code, table, words

NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    Path: "path",
    type(None): "`null`",
}
NAMES |= {Any: "anything", dict: "object", list: "list", bytes: "bytes", re.Pattern: "regular expression"}
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
REQUIRED = "**required**"


@dataclass(frozen=True)
class Key:
    """One key. name: dotted, with the names of its parents."""

    name: str
    type: str
    default: str
    what: str


def keys_table(keys: Sequence[Key]) -> str:
    return table(
        ("Key", "Type", "Default", ""), [(code(key.name), key.type, key.default, words(key.what)) for key in keys]
    )


def docstring_summary(model: type) -> str:
    """The part of a model's docstring that is not about its fields."""
    return _split(model)[0]


def keys(model: type[BaseModel], prefix: str = "", without: Mapping[str, Any] | None = None) -> Iterator[Key]:
    """Every key of a model, those of the models inside it too. without: name -> default, of keys that are listed elsewhere."""
    described = descriptions(model)
    for name, field in model.model_fields.items():
        if without is not None and name in without and without[name] == default_of(field):
            continue
        inside = _inner(field.annotation)
        what = (
            field.description or described.get(name, "") or (docstring_summary(inside[0]) if len(inside) == 1 else "")
        )
        nested = field.default is not None and len(inside) == 1 and not _many(field.annotation)
        if not nested:
            yield Key(f"{prefix}{name}", type_name(field), default_of(field), what)
        dots = "[]." if _many(field.annotation) else "."
        for each in inside:
            if len(inside) == 1:
                yield from keys(each, f"{prefix}{name}{dots}")
            else:
                yield from _variant(each, f"{prefix}{name}{dots}")


def _variant(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    """The keys of each of several possible models; the first word of each says which."""
    tag = next((get_args(f.annotation) for f in model.model_fields.values() if get_origin(f.annotation) is Literal), ())
    for key in keys(model, prefix):
        of = " or ".join(map(str, tag))
        yield Key(key.name, key.type, key.default, f"({of}) {key.what}".strip() if of else key.what)


def type_name(field: FieldInfo) -> str:
    """In words, with its bounds."""
    return _named(field.annotation, field.metadata)


def _named(kind: Any, marks: Sequence[Any] = ()) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _named(inner[0], [*_flat(inner[1:]), *marks])
    if any(type(mark).__name__ == "_Reference" for mark in marks):
        return "name of a service"
    if choice := next((mark for mark in marks if isinstance(mark, Choice)), None):
        return " or ".join([*map(code, choice.names), "an import path"])
    if origin is Literal:
        return " or ".join(code(_yaml(value)) for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_named(each, marks if each is not type(None) else ()) for each in inner))
    if origin in (list, tuple, set, frozenset, Sequence) or kind in (list, tuple):
        fixed = origin is tuple and Ellipsis not in inner
        of = [_named(each) for each in inner if each is not Ellipsis]
        return f"list: {', '.join(of)}" if fixed else f"list of {of[0]}" if of else "list"
    if origin in (dict, Mapping):
        return f"object: {_named(inner[0])} to {_named(inner[1])}"
    if origin is re.Pattern:
        return "regular expression"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "object"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(code(str(each.value)) for each in kind)
    return NAMES.get(kind, getattr(kind, "__name__", str(kind))) + _bounds(marks)


def _flat(marks: Sequence[Any]) -> list[Any]:
    return [each for mark in marks for each in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]


def _bounds(marks: Sequence[Any]) -> str:
    found = [f"{SIGNS[type(m)]} {_bound(m)}" for m in marks if type(m) in SIGNS]
    found += [f"at least {m.min_length} long" for m in marks if isinstance(m, MinLen) and m.min_length > 1]
    found += [f"at most {m.max_length} long" for m in marks if isinstance(m, MaxLen)]
    return f" {', '.join(found)}" if found else ""


def _bound(mark: Ge | Gt | Le | Lt) -> str:
    value = float(getattr(mark, type(mark).__name__.lower()))
    return f"{int(value):,}" if value.is_integer() else f"{value:g}"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    value = field.default_factory() if field.default_factory is not None else field.default  # type: ignore[call-arg]
    return "" if value is PydanticUndefined or isinstance(value, BaseModel) else code(_yaml(value))


def _yaml(value: Any) -> str:
    """As one writes it in a config."""
    if isinstance(value, Path | re.Pattern):
        return str(value)
    if (
        isinstance(value, str)
        and value
        and not re.search(r"[:#{}\[\],&*?|<>=!%@\\]|^\s|\s$|^(true|false|null|\d)", value)
    ):
        return value
    if isinstance(value, float) and value not in (0.0,) and (abs(value) < 1e-3 or abs(value) >= 1e15):
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple | set | frozenset) else value, default=str)


def _inner(kind: Any) -> list[type[BaseModel]]:
    """The models in a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [found for each in get_args(kind) for found in _inner(each)]


def _many(kind: Any) -> bool:
    """Whether it is a list or a map."""
    parts = [kind, *get_args(kind)] if get_origin(kind) in (Union, types.UnionType, Annotated) else [kind]
    return any(get_origin(part) in (list, tuple, Sequence, dict, Mapping) for part in parts)


def _split(model: type) -> tuple[str, dict[str, str]]:
    """A docstring as what it says of the whole, and of each field (`name: words.` or `one, other: words.`)."""
    text = " ".join((model.__dict__.get("__doc__") or "").split())
    fields = getattr(model, "model_fields", None) or getattr(model, "__annotations__", {})
    names = "|".join(sorted(fields, key=len, reverse=True))
    if not text or not names:
        return text, {}
    parts = re.split(rf"(?:^|(?<=[.;)]) )((?:{names})(?:, (?:{names}))*): ", text)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return parts[0].strip(), {name: _sentence(what) for listed, what in pairs for name in listed.split(", ")}


def descriptions(model: type) -> dict[str, str]:
    """The descriptions of a record's fields: in docstrings, in comments beside them, its own and its ancestors'."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if kind.__module__.split(".")[0] in ("builtins", "pydantic", "typing"):
            continue
        described = {name: field.description for name, field in getattr(kind, "model_fields", {}).items()}
        found |= {name: text for name, text in described.items() if text}
        found |= _beside(kind) | _split(kind)[1]
    return found


@cache  # a record is asked for with every other one that has it
def _beside(model: type) -> dict[str, str]:
    """The comments that end the lines of its fields."""
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):
        return {}
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    fields = [
        node
        for node in getattr(body, "body", ())
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    remarks = {}
    for node in fields:
        last = (node.end_lineno or node.lineno) - 1
        comment = lines[last].encode()[node.end_col_offset or 0 :].decode().strip()
        if comment.startswith("# ") and not comment.startswith("# type:"):
            remarks[node.target.id] = _sentence(comment[2:])
    return remarks


def _sentence(text: str) -> str:
    """With a capital at its beginning, unless that is a symbol or a name."""
    text = text.strip()
    first = re.match(r"[a-z]+(?=[ ,;:.])", text)
    return text[0].upper() + text[1:] if first and len(first[0]) > 1 else text
