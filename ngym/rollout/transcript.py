"""Formats a rollout as readable text: messages, tool calls, tool outputs and the reward."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from ngym.schema import Json

LABEL_WIDTH = 11


def transcript(row: Json, width: int = 100) -> str:
    """An output row (wire.md, section 3) as lines of at most `width` characters. Control characters are escaped."""
    lines = [headline(row)]
    for label, text in turns(row):
        wrapped = [
            part
            for line in printable(text).splitlines() or [""]
            for part in textwrap.wrap(line, width - LABEL_WIDTH - 2) or [""]
        ]
        lines += [f"  {label if i == 0 else '':<{LABEL_WIDTH}}{part}" for i, part in enumerate(wrapped)]
    return "\n".join(lines)


def headline(row: Json) -> str:
    """The task, the rollout, its reward and its stop reason, in one line."""
    trace = row.get("ng") or {}
    reward = row.get("reward")
    parts = [
        f"task {row.get('_ng_task_index', '?')}, rollout {row.get('_ng_rollout_index', '?')}",
        "not scored" if reward is None else f"reward {reward:g}",
    ]
    if trace.get("stop_reason") not in (None, "answer"):
        parts.append(f"stopped: {trace['stop_reason']}")
    if "expected_answer" in row:
        parts.append(f"expected {row['expected_answer']}")
    return printable(" | ".join(parts))


def turns(row: Json) -> Iterator[tuple[str, str]]:
    """Pairs of speaker (`user`, `assistant`, `reasoning`, `tool` ...) and unchanged text, the prompt first."""
    prompt = (row.get("responses_create_params") or {}).get("input")
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    for item in items + list((row.get("response") or {}).get("output") or []):
        yield from _turn(item)


def _turn(item: Json) -> Iterator[tuple[str, str]]:
    kind = item.get("type", "message")
    if kind == "function_call":
        yield "assistant", f"-> {item.get('name')}({item.get('arguments')})"
    elif kind == "function_call_output":
        yield "tool", f"<- {_text(item.get('output'))}"
    elif kind == "reasoning":
        yield "reasoning", "\n".join(_text([part]) for part in item.get("summary") or item.get("content") or [])
    elif kind == "message":
        yield item.get("role", "assistant"), _text(item.get("content"))
    else:
        yield kind, ""


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or f"[{part.get('type')}]" for part in content or [] if isinstance(part, dict))


def printable(text: str) -> str:
    """Escape control characters: model text is untrusted, and an escape sequence must not reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
