"""The output formats, and the check of their rows.

`datasets.load_dataset("json")` takes the types of columns from the first 10 MB; a key or a tool that first appears
later breaks it. So one row of each shape is written first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import orjson

from ngym.export.conversation import Conversation, Unsayable
from ngym.export.tally import Row
from ngym.schema import Json

SPEAKERS = {"system": "system", "user": "human"}


class Shapes:
    """Assigns numbers to shapes, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(_shape(value), len(self._numbers))


def leaders_first(rows: Iterable[Row]) -> Iterator[Row]:
    """The first row of each shape, then the others; both in their order."""
    seen: set[tuple[int, ...]] = set()
    others: list[Row] = []
    for row in rows:
        shapes = tuple(candidate.shape for candidate in row.candidates)
        if shapes in seen:
            others.append(row)
        else:
            seen.add(shapes)
            yield row
    yield from others


def _shape(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(sorted((key, _shape(below)) for key, below in value.items()))
    if isinstance(value, list):
        types = set(map(type, value))
        if types & {dict, list}:
            return frozenset(map(_shape, value))
        return frozenset(kind.__name__ for kind in types)  # fast path for thousands of token ids
    return type(value).__name__


def demonstration(said: Conversation) -> Json:
    return {"messages": said.prompt + said.completion} | _tools(said)


def preference(chosen: Conversation, rejected: Conversation, margin: float) -> Json:
    """margin: the difference of the rewards."""
    sides = {"prompt": chosen.prompt, "chosen": chosen.completion, "rejected": rejected.completion}
    return sides | _tools(chosen) | {"margin": margin}


def kto(said: Conversation, label: bool) -> Json:
    return {"prompt": said.prompt, "completion": said.completion, "label": label} | _tools(said)


def sharegpt(said: Conversation) -> Json:
    """A row as LLaMA-Factory documents it: human and gpt alternate, and so do function_call and observation; parallel
    calls, and their results, are one JSON list; reasoning is between think tags; the tools are a JSON string.

    Raises:
        Unsayable: text next to a tool call, arguments that are not an object, or content that is not text.
    """
    turns: list[Json] = []
    results: list[str] = []
    for message in said.prompt + said.completion:
        if not isinstance(message["content"], str):
            raise Unsayable(f"a {message['role']} message has more than text, which ShareGPT cannot represent")
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        turns += _observation(results)
        results = []
        turns.append(_turn(message))
    turns += _observation(results)
    return {"conversations": turns} | ({"tools": _text(said.tools)} if said.tools else {})


def check_prompt(said: Conversation) -> None:
    """Raise Unsayable for a prompt that is not valid without its completion, as pairs and KTO need."""
    role = said.prompt[-1]["role"]
    if role == "system":
        raise Unsayable("the prompt ends with a system message; it must end with a message of a user or a tool")


def _tools(said: Conversation) -> Json:
    # not []: some templates (Llama 3) announce tools for it
    return {"tools": said.tools} if said.tools else {}


def _turn(message: Json) -> Json:
    if message["role"] != "assistant":
        return {"from": SPEAKERS[message["role"]], "value": message["content"]}
    thought = message.get("reasoning_content", "").strip("\n")
    before = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    if "tool_calls" not in message:
        return {"from": "gpt", "value": before + message["content"]}
    if message["content"].strip():
        raise Unsayable("text next to a tool call, which ShareGPT cannot represent")
    functions = [call["function"] for call in message["tool_calls"]]
    if not all(isinstance(function["arguments"], dict) for function in functions):
        raise Unsayable("a call whose arguments are not a JSON object, which ShareGPT cannot represent")
    return {"from": "function_call", "value": before + _text(functions[0] if len(functions) == 1 else functions)}


def _observation(results: list[str]) -> list[Json]:
    if not results:
        return []
    return [{"from": "observation", "value": results[0] if len(results) == 1 else _text(results)}]


def _text(value: Json | list[Json] | list[str]) -> str:
    return orjson.dumps(value).decode()
