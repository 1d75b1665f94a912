"""Where does reasoning end and the answer begin in text with `<think>` tags? Every byte stands in exactly one of them.

Only reasoning at the very start counts; a `<think>` further on is text (code, a quotation). The first closer closes, as
in every chat template: what a nested block leaves behind is text. A closer without an opener ends reasoning that the
template opened (DeepSeek-R1, Qwen3-Thinking put `<think>` into the prompt). An opener without a closer was cut off:
all of it is reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

OPEN = "<think>"
CLOSE = "</think>"

ReasoningStyle = Literal["field", "tags"]
"""How a Chat back end says reasoning: in `reasoning_content` ("field"), or in the content, between tags ("tags")."""

_BLOCK = re.compile(r"(\s*<think>)(.*?)(</think>|\Z)", re.DOTALL)
_UNOPENED = re.compile(r"()((?:(?!<think>).)*?)(</think>)", re.DOTALL)


class Block(NamedTuple):
    """One block of reasoning; `opener + text + closer` are its bytes. A missing tag is ""."""

    text: str
    opener: str = OPEN
    closer: str = CLOSE


class Split(NamedTuple):
    """Reasoning blocks, and the text after them."""

    blocks: list[Block]
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
