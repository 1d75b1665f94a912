"""What of a model's text is reasoning, what is said, what is a tool call? Told piece by piece.

Reasoning stands between `<think>` and `</think>` at the very start, or begins without the opener where the template has
written it. A tool call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen and many others); one
that is no such JSON, or has no end, is text. White space around calls is nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ngym.dialogue.text import held_back

THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"


class Piece(NamedTuple):
    """More reasoning or text; or a whole call, whose arguments are `text`."""

    kind: Literal["reasoning", "text", "call"]
    text: str
    name: str = ""


class Spoken:
    """One answer.

    Args:
        in_thought: the template has opened a thought.
        tools: whether calls are looked for.
    """

    def __init__(self, *, in_thought: bool, tools: bool) -> None:
        self._state: Literal["start", "thought", "text", "call"] = "thought" if in_thought else "start"
        self._tools = tools
        self._held = ""
        self._said = False
        self._called = False

    def take(self, text: str) -> Iterator[Piece]:
        """What is certain with this further text."""
        self._held += text
        while self._held:
            state, held = self._state, self._held
            yield from getattr(self, f"_{state}")()
            if (self._state, self._held) == (state, held):
                return

    def end(self) -> Iterator[Piece]:
        """What was held back; a call without its end is text."""
        text, self._held = self._held, ""
        if self._state == "call":
            text = CALL + text
        if text.strip() or (text and (self._state == "thought" or (self._said and not self._called))):
            yield Piece("reasoning" if self._state == "thought" else "text", text)

    def _start(self) -> Iterator[Piece]:
        stripped = self._held.lstrip()
        if stripped.startswith(THINK):
            self._held, self._state = stripped[len(THINK) :], "thought"
        elif not THINK.startswith(stripped):
            self._state = "text"
        yield from ()

    def _thought(self) -> Iterator[Piece]:
        text, closer, rest = self._held.partition(THOUGHT)
        if closer:
            self._held, self._state = rest, "text"
        else:
            keep = held_back(self._held, (THOUGHT,))
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if text:
            yield Piece("reasoning", text)

    def _text(self) -> Iterator[Piece]:
        before, opener, rest = self._held.partition(CALL) if self._tools else (self._held, "", "")
        if opener:
            self._held, self._state = rest, "call"
            text = before.rstrip()
        else:
            keep = held_back(self._held, (CALL,)) if self._tools else 0
            text = self._held[: len(self._held) - keep]
            if self._tools or not self._said:
                text = text.rstrip()  # what follows decides whether the space was between things
            self._held = self._held[len(text) :]
        if text:
            self._said = True
            yield Piece("text", text)

    def _call(self) -> Iterator[Piece]:
        written, closer, rest = self._held.partition(CALLED)
        if not closer:
            return
        self._held, self._state, self._called = rest, "text", True
        yield _read(written)


def _read(written: str) -> Piece:
    """What stands between the tags, as a call; as text where it is none."""
    try:
        call = json.loads(written)
    except ValueError:
        call = None
    match call:
        case {"name": str(name), "arguments": dict(arguments)} if name:
            return Piece("call", json.dumps(arguments, ensure_ascii=False), name)
    return Piece("text", CALL + written + CALLED)
