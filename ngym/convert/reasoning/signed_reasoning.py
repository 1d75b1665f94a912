"""Reasoning that its model signed, or redacted: `thinking_blocks` on a Chat message, `encrypted_content` on an item.

A model that signs its reasoning (Anthropic's) refuses it without the signature, so it is kept and sent back. On a Chat
message the blocks stand beside `reasoning_content`, which has their text for everybody else.
"""

from __future__ import annotations

from collections.abc import Iterable

from ngym.schema import Json

BETWEEN = "\n\n"
"""What stands between two pieces of reasoning where an API has one text for all of it."""


def thinking(text: str, signature: str | None = None) -> Json:
    """A thinking block; the reasoning of most models is not signed."""
    return {"type": "thinking", "thinking": text, "signature": signature or ""}


def is_signed(block: Json) -> bool:
    """Whether its model wants this block back."""
    return block["type"] == "redacted_thinking" or bool(block.get("signature"))


def own_block(block: Json) -> Json:
    """A block without what only others know."""
    names = ("type", "data") if block["type"] == "redacted_thinking" else ("type", "thinking", "signature")
    return {name: block.get(name) or "" for name in names}


def thinking_text(blocks: Iterable[Json]) -> str:
    """The text of thinking blocks, for readers that know no signatures."""
    return BETWEEN.join(block["thinking"] for block in blocks if block.get("thinking"))


def reasoning_from_block(block: Json, item_id: str) -> Json:
    """A thinking block -> a reasoning item; the signature, or what was redacted, is its `encrypted_content`."""
    item: Json = {"type": "reasoning", "id": item_id, "summary": [], "content": []}
    if block["type"] == "redacted_thinking":
        return item | {"encrypted_content": block["data"]}
    item["content"] = [{"type": "reasoning_text", "text": block["thinking"]}]
    if block.get("signature"):
        item["encrypted_content"] = block["signature"]
    return item | ({"ng": block["ng"]} if "ng" in block else {})


def block_from_reasoning(item: Json) -> Json:
    """A reasoning item -> its thinking block; what has only an `encrypted_content` is redacted."""
    parts = item.get("content") or item.get("summary") or ()
    if not parts and item.get("encrypted_content"):
        return {"type": "redacted_thinking", "data": item["encrypted_content"]}
    block = thinking("".join(part["text"] for part in parts), item.get("encrypted_content"))
    return block | ({"ng": item["ng"]} if "ng" in item else {})
