"""Values as Markdown: tables, code, and escaped words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_CODE = re.compile(r"(`[^`]*`)")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown already. Empty without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines, ""]) if lines else ""


def code(text: str) -> str:
    """A span of code that is valid in a table."""
    shown = text.replace("\n", " ").replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def words(text: str) -> str:
    """Plain text of a docstring or description, in one line; what is in backticks stays code."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts).replace("|", "\\|")


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([*_\[\]{}$])", r"\\\1", text)


def fence(language: str, text: str) -> str:
    """A block of code, whatever is in it."""
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{ticks}{language}\n{text.strip(chr(10))}\n{ticks}\n"


def json_text(value: Any, width: int = 110) -> str:
    """JSON, on one line where it fits, else a member a line."""
    return _json(value, width, 0)


def _json(value: Any, width: int, depth: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + depth <= width or not isinstance(value, dict | list) or not value:
        return flat
    inner = " " * (depth + 2)
    if isinstance(value, dict):
        members = [f"{inner}{json.dumps(key)}: {_json(each, width, depth + 2)}" for key, each in value.items()]
        return "{\n" + ",\n".join(members) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(inner + _json(each, width, depth + 2) for each in value) + "\n" + " " * depth + "]"


def shortened(value: Any, most: int = 6, characters: int = 160) -> Any:
    """The same with long lists of numbers and long texts cut, each cut shown as "..."."""
    if isinstance(value, dict):
        return {key: shortened(each, most, characters) for key, each in value.items()}
    if isinstance(value, list):
        long = len(value) > most and all(isinstance(each, int | float) for each in value)
        return [shortened(each, most, characters) for each in (value[:most] if long else value)] + (["..."] * long)
    if isinstance(value, str) and len(value) > characters:
        return value[:characters] + "..."
    return value
