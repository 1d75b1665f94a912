"""Is this the conversation of before, and how much longer is it? A digest of what was said up to the end of each turn.

Compared are role, text, and each call's id, name and arguments. Arguments count as JSON, whatever their spaces: many
clients read them and write them anew. Reasoning does not count: many clients drop it. What an assistant says in one run,
in as many items or messages as it may be, is one turn.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from ngym.schema import Json
from ngym.services.models.client_token_ids import is_the_models

TEXTS = frozenset({"text", "input_text", "output_text"})


class Turn(NamedTuple):
    """The end of a turn.

    digest: of everything up to it.
    place: the index of its last item or message; -1 for what stands before all of them.
    """

    digest: bytes
    place: int


class Said(NamedTuple):
    """The turns of a request; `unfinished` is what the assistant said in the last one, if that is the assistant's."""

    turns: list[Turn]
    unfinished: list[Any]


def said(request: Json) -> Said:
    """What a native request, chat or Responses, says so far."""
    items = request["messages"] if "messages" in request else request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    turns = [Turn(_digest(b"", [request.get("instructions"), request.get("tools")]), -1)]
    run: list[Any] = []
    for index, item in enumerate(items):
        if is_the_models(item):
            run += _spoken(item)
            if index + 1 < len(items) and is_the_models(items[index + 1]):
                continue
            turns.append(Turn(_digest(turns[-1].digest, _merged(run)), index))
            if index + 1 < len(items):
                run = []
        else:
            turns.append(Turn(_digest(turns[-1].digest, _given(item)), index))
    return Said(turns, run)


def answered(before: Said, answer: Json) -> bytes:
    """The digest of a conversation with its native answer, a Response or a Chat Completion."""
    items = answer["output"] if "output" in answer else [answer["choices"][0]["message"]]
    spoken = [part for item in items for part in _spoken(item)]
    last = before.turns[-2 if before.unfinished else -1]
    return _digest(last.digest, _merged(before.unfinished + spoken))


def _digest(before: bytes, turn: list[Any]) -> bytes:
    return blake2b(before + orjson.dumps(turn, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _given(item: Json) -> list[Any]:
    if item.get("type") == "function_call_output":
        return ["tool", item["call_id"], _content(item["output"])]
    role = item["role"]
    return ["system" if role == "developer" else role, item.get("tool_call_id"), _content(item.get("content"))]


def _spoken(item: Json) -> list[Any]:
    """Texts, and calls as lists."""
    match item.get("type") or "message":
        case "reasoning":
            return []
        case "function_call":
            return [[item["call_id"], item["name"], _arguments(item["arguments"])]]
    calls = [
        [call["id"], call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in item.get("tool_calls") or ()
    ]
    content = _content(item.get("content"))
    refusal = [item["refusal"]] if item.get("refusal") else []
    return [*(content if isinstance(content, list) else [content]), *refusal, *calls]


def _merged(run: list[Any]) -> list[Any]:
    texts = [part for part in run if isinstance(part, str)]
    return ["assistant", "".join(texts), *(part for part in run if not isinstance(part, str))]


def _content(content: Any) -> Any:
    """Text as one string; with anything else in it, the list of its texts and parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part) for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _part(part: Json) -> Any:
    if part["type"] in TEXTS:
        return part["text"]
    return part["refusal"] if part["type"] == "refusal" else part


def _arguments(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
