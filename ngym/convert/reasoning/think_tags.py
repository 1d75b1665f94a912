"""Where does reasoning end and the answer begin in text with `<think>` tags? Every byte stands in exactly one of them.

Only reasoning at the very start counts; a `<think>` further on is text (code, a quotation). The first closer closes, as
in every chat template: what a nested block leaves behind is text. A closer without an opener ends reasoning that the
template opened (DeepSeek-R1, Qwen3-Thinking put `<think>` into the prompt). An opener without a closer was cut off:
all of it is reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

OPEN = "<think>"
CLOSE = "</think>"

ReasoningStyle = Literal["field", "tags"]
"""How a Chat back end says reasoning: in `reasoning_content` ("field"), or in the content, between tags ("tags")."""

_BLOCK = re.compile(r"(\s*<think>)(.*?)(</think>|\Z)", re.DOTALL)
_UNOPENED = re.compile(r"()((?:(?!<think>).)*?)(</think>)", re.DOTALL)
_WORD = re.compile(r"\S")
_TAG = re.compile(r"</?think>")


class Block(NamedTuple):
    """One block of reasoning; `opener + text + closer` are its bytes. A missing tag is ""."""

    text: str
    opener: str = OPEN
    closer: str = CLOSE


class Split(NamedTuple):
    """Reasoning blocks, and the text after them."""

    blocks: list[Block]
    text: str


class Told(NamedTuple):
    """What ThinkSplitter knows of a stream of content."""

    kind: Literal["think", "reasoning", "thought", "text"]
    text: str


def split_think(content: str) -> Split:
    """Content with think tags -> its leading reasoning and the rest; `join_think` is the exact inverse."""
    blocks: list[Block] = []
    at = 0
    found = _BLOCK.match(content) or _UNOPENED.match(content)
    while found:
        blocks.append(Block(found[2], found[1], found[3]))
        at = found.end()
        found = _BLOCK.match(content, at)
    return Split(blocks, content[at:])


def join_think(blocks: Iterable[Block], text: str) -> str:
    """Reasoning blocks and text -> content with think tags, byte for byte as it was split."""
    return "".join(block.opener + block.text + block.closer for block in blocks) + text


class ThinkSplitter:
    """`split_think` for content that comes in pieces: text in, ("think", opener), ("reasoning", text), ("thought",
    closer) and ("text", text) out.

    Reasoning that the template opened is known by its closer only: where content does not begin with a tag, nothing is
    told before a tag or the end decides what it is.
    """

    def __init__(self) -> None:
        self._state: Literal["start", "unopened", "block", "after", "text"] = "start"
        self._held = ""
        self._searched = 0

    def take(self, text: str) -> Iterator[Told]:
        """What is certain with this further piece."""
        self._held += text
        while self._held:
            state, held = self._state, self._held
            if state == "text":
                yield Told("text", self._release(len(held)))
            elif state == "block":
                yield from self._in_block()
            elif state == "unopened":
                yield from self._unopened()
            else:
                yield from self._before_block()
            if (self._state, self._held) == (state, held):
                return

    def end(self) -> Iterator[Told]:
        """What was held back; whatever comes now is text."""
        if self._held:
            yield Told("reasoning" if self._state == "block" else "text", self._release(len(self._held)))
        if self._state == "block":
            yield Told("thought", "")
        self._state = "text"

    def _release(self, length: int) -> str:
        text, self._held, self._searched = self._held[:length], self._held[length:], 0
        return text

    def _in_block(self) -> Iterator[Told]:
        end = self._held.find(CLOSE)
        known = end if end >= 0 else len(self._held) - _overhang(self._held, CLOSE)
        if known:
            yield Told("reasoning", self._release(known))
        if end >= 0:
            yield Told("thought", self._release(len(CLOSE)))
            self._state = "after"

    def _before_block(self) -> Iterator[Told]:
        word = _WORD.search(self._held, self._searched)
        start = word.start() if word else len(self._held)
        if self._held.startswith(OPEN, start):
            yield Told("think", self._release(start + len(OPEN)))
            self._state = "block"
        elif OPEN.startswith(self._held[start : start + len(OPEN)]):
            self._searched = start
        else:
            self._state = "text" if self._state == "after" else "unopened"

    def _unopened(self) -> Iterator[Told]:
        tag = _TAG.search(self._held, self._searched)
        self._searched = max(0, len(self._held) - len(CLOSE))
        if tag is None:
            return
        self._state = "text"
        if tag[0] == CLOSE:
            yield Told("think", "")
            if tag.start():
                yield Told("reasoning", self._release(tag.start()))
            yield Told("thought", self._release(len(CLOSE)))
            self._state = "after"


def _overhang(text: str, tag: str) -> int:
    """How many of the text's last characters may be the beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
