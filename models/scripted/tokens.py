"""Token ids without a tokenizer: one per byte. 0xFF begins a message and 0xFE ends it; neither occurs in UTF-8.

A continued conversation begins with exactly the ids of the earlier call; all other items are rendered from their text.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import orjson

from ngym import BadRequest
from ngym.convert import content_text
from ngym.services.models.server import SeenCall

from .rules import Answer

BEGIN = b"\xff"
END = b"\xfe"


def render(request: dict[str, Any], seen: SeenCall | None = None) -> bytes:
    """The prompt of a request, up to the beginning of the model's answer."""
    items = request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    parts = [_system(request)] if seen is None else [_continued(seen)]
    for role, run in groupby(items if seen is None else items[seen.place + 1 :], _role):
        if role == "assistant":  # all items of a turn form one message
            parts.append(_message(role, map(_said, run)))
        else:
            parts += [_message(role, [_said(item)]) for item in run]
    return b"".join(parts) + BEGIN + b"assistant\n"


def shortened(said: Answer, limit: int | None) -> tuple[Answer, bytes, bool]:
    """The part of an answer within `limit` tokens, its ids, and whether it was cut.

    Text is cut between characters; reasoning and calls are kept whole or dropped, and nothing follows a cut.
    """
    whole = _spoken(said) + END
    if limit is None or len(whole) <= limit:
        return said, whole, False
    left = Answer(said.reasoning, "", []) if len(_thought(said.reasoning)) <= limit else Answer("", "", [])
    if left.reasoning == said.reasoning:
        room = limit - len(_thought(left.reasoning))
        left = left._replace(text=said.text.encode()[:room].decode(errors="ignore"))
    if left.text == said.text:
        for call in said.calls:
            longer = left._replace(calls=[*left.calls, call])
            if len(_spoken(longer)) > limit:
                break
            left = longer
    return left, _spoken(left), True


def logprob(token: int) -> float:
    """The logprob of a sampled id: deterministic and exact in binary."""
    return -(token % 8 + 1) / 16


def _spoken(said: Answer) -> bytes:
    return b"".join((_thought(said.reasoning), said.text.encode(), *(_call(*call) for call in said.calls)))


def _continued(seen: SeenCall) -> bytes:
    """All ids up to the end of an answer."""
    try:
        ids = bytes(seen.prompt_token_ids) + bytes(seen.generation_token_ids)
    except ValueError:
        raise BadRequest("the input has token ids that are not from this model: its ids are 0 to 255") from None
    return ids if ids.endswith(END) else ids + END


def _system(request: dict[str, Any]) -> bytes:
    tools = request.get("tools")
    parts = [(request.get("instructions") or "").encode(), orjson.dumps(tools) if tools else b""]
    return _message("system", parts) if any(parts) else b""


def _message(role: str, parts: Iterable[bytes]) -> bytes:
    return BEGIN + role.encode() + b"\n" + b"".join(parts) + END


def _role(item: dict[str, Any]) -> str:
    match item.get("type") or "message":
        case "message":
            return str(item["role"])
        case "function_call_output":
            return "tool"
        case _:
            return "assistant"


def _said(item: dict[str, Any]) -> bytes:
    match item.get("type") or "message":
        case "reasoning":
            return _thought(content_text(item.get("content")))
        case "function_call":
            return _call(item["name"], item["arguments"])
        case "function_call_output":
            return content_text(item["output"]).encode()
        case _:
            return content_text(item.get("content")).encode()


def _thought(text: str) -> bytes:
    return f"<think>{text}</think>".encode() if text else b""


def _call(name: str, arguments: str) -> bytes:
    return f"<tool_call>{name} {arguments}</tool_call>".encode()
