"""An output item in which something is still being said, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ngym.convert.chat.chat_to_items import output_text
from ngym.convert.stream.finished_stream import empty_part
from ngym.schema import Json

Told = Iterator[tuple[str, Json]]
"""Events without their number: type and members."""


class OpenItem:
    """The item, its place in the output, and the events of what is said in it, each a (type, members) pair.

    `item` is the very dict that stands in the output; what was said so far is in it after `settle`.
    """

    def __init__(self, item: Json, place: int) -> None:
        self.item = item
        self.place = place
        self._at = {"item_id": item["id"], "output_index": place}
        self._said: list[str] = []

    def part(self, kind: str) -> Told:
        """A part begins."""
        part = _PARTS[kind]()
        self.item["content"].append(part)
        yield "response.content_part.added", {**self._here(), "part": empty_part(part)}

    def more(self, kind: str, text: str, logprobs: list[Json] | None = None) -> Told:
        """More of the part, or of the arguments of a call."""
        if kind == "arguments":
            self._said.append(text)
            yield "response.function_call_arguments.delta", {**self._at, "delta": text}
            return
        if self.item["content"][-1]["type"] != kind:
            yield from self._part_done()
            yield from self.part(kind)
        self._said.append(text)
        more = {"logprobs": logprobs} if kind == "output_text" else {}
        yield f"response.{kind}.delta", {**self._here(), "delta": text, **more}

    def settle(self) -> None:
        """What was said becomes part of the item."""
        if self.item["type"] == "function_call":
            self.item["arguments"] = "".join(self._said)
        elif self.item.get("content"):
            part = self.item["content"][-1]
            part[_field(part)] = "".join(self._said)

    def done(self) -> Told:
        """The item is over."""
        if self.item["type"] == "function_call":
            self.settle()
            told = {"name": self.item["name"], "arguments": self.item["arguments"]}
            yield "response.function_call_arguments.done", {**self._at, **told}
        elif self.item["content"]:
            yield from self._part_done()
        yield "response.output_item.done", {"output_index": self.place, "item": self.item}

    def _part_done(self) -> Told:
        self.settle()
        self._said = []
        part = self.item["content"][-1]
        told = {_field(part): part[_field(part)]}
        if part["type"] == "output_text":
            told["logprobs"] = part["logprobs"]
        yield f"response.{part['type']}.done", {**self._here(), **told}
        yield "response.content_part.done", {**self._here(), "part": part}

    def _here(self) -> Json:
        return {**self._at, "content_index": len(self.item["content"]) - 1}


_PARTS: dict[str, Any] = {
    "output_text": lambda: output_text(""),
    "reasoning_text": lambda: {"type": "reasoning_text", "text": ""},
    "refusal": lambda: {"type": "refusal", "refusal": ""},
}


def _field(part: Json) -> str:
    return "refusal" if part["type"] == "refusal" else "text"
