"""Parses error bodies of external servers: message, code, and context overflow."""

from __future__ import annotations

import re
from typing import NamedTuple

_OVERFLOW = re.compile(
    r"context[ _](length|window|size)|maximum (model|input) length|max_model_len|(prompt|input) is too long"
    r"|max_(completion_)?tokens.{0,40}(too large|greater|exceed)",
    re.IGNORECASE,
)


class Words(NamedTuple):
    """An error's message, in one line, and its code or type."""

    message: str
    code: str | None


def words(body: object) -> Words:
    """An error body's message and code, in any of the shapes that servers use."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        inner = inner if isinstance(inner, dict) else {"message": inner}
        text = inner.get("message") or inner.get("detail") or "no reason given"
        code = inner.get("code") or inner.get("type")
        return Words(_line(str(text)), str(code) if code else None)
    return Words(_line(str(body or "no reason given")), None)


def is_context_overflow(status: int, code: str | None, message: str) -> bool:
    """Whether a back end's error says that the input and the requested output do not fit its context."""
    if status not in (400, 413, 422):
        return False
    return code == "context_length_exceeded" or bool(_OVERFLOW.search(message))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
