"""Rules of scripted replies: the first reply whose conditions all hold is used, with its placeholders filled in.

A reply's conditions: `match` (a regular expression, searched in the last user message), `contains` (a substring of it),
`turn` (1 for the first call of a conversation, 2 after one assistant turn, ...). It has `text`, `tool_calls`, or both.
In its strings `{user}` is the last user message, `{tool_output}` the last tool output, `{turn}` the turn, and `{1}` or
`{name}` a group of `match`; other braces stay unchanged. Arguments written as an object become JSON; a string is sent
unchanged after the replacements, even if it is not JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ngym.convert import content_text, last_user_text
from ngym.files import jsonl

_PLACE = re.compile(r"\{(\w+)\}")
_ASSISTANT = frozenset({"reasoning", "function_call"})


class ToolCall(BaseModel):
    """A call that a reply makes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(min_length=1, description="Name of the tool.")
    arguments: dict[str, Any] | str = Field(default={}, description="An object, or a string that is sent unchanged.")


class Reply(BaseModel):
    """Conditions, and the reply if they hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    match: re.Pattern[str] | None = Field(
        default=None, description="A regular expression, searched in the last user message."
    )
    contains: str | None = Field(default=None, description="A part of the last user message.")
    turn: int | None = Field(default=None, ge=1, description="1 for the first call of a conversation.")
    reasoning: str = Field(default="", description="Reasoning of the answer.")
    text: str = Field(default="", description="Text of the answer.")
    tool_calls: tuple[ToolCall, ...] = Field(default=(), description="Tool calls of the answer.")

    @model_validator(mode="after")
    def _says_something(self) -> Reply:
        if not self.model_fields_set & {"text", "tool_calls"}:
            raise ValueError("a reply needs text or tool_calls")
        return self


class Situation(NamedTuple):
    """The state of a conversation, as far as conditions and placeholders need it."""

    user: str
    tool_output: str
    turn: int


class Answer(NamedTuple):
    """The content of an answer. Each call is a name and its arguments as a string."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]


def read_replies(file: Path) -> tuple[Reply, ...]:
    """The replies of a JSONL file; a UsageError names every bad line."""
    return tuple(Reply.model_validate(line.row) for line in jsonl.checked(file, _problem))


def situation(items: str | list[dict[str, Any]]) -> Situation:
    """The conversation's last user text, last tool output, and the number of the next turn."""
    if isinstance(items, str):
        return Situation(items, "", 1)
    outputs = (item["output"] for item in reversed(items) if item.get("type") == "function_call_output")
    turns, before = 0, False
    for item in items:
        assistant = item.get("type") in _ASSISTANT or item.get("role") == "assistant"
        turns += assistant and not before
        before = assistant
    return Situation(last_user_text(items), content_text(next(outputs, "")), turns + 1)


def answer(replies: Sequence[Reply], now: Situation) -> Answer:
    """The answer of the first matching reply. The last of `replies` must always match."""
    for reply in replies:
        values = _fits(reply, now)
        if values is not None:
            break
    else:
        raise LookupError("no reply matches")
    calls = [(call.name, _arguments(call.arguments, values)) for call in reply.tool_calls]
    return Answer(_filled(reply.reasoning, values), _filled(reply.text, values), calls)


def _fits(reply: Reply, now: Situation) -> dict[str, str] | None:
    """The values of the reply's placeholders, or None if a condition does not hold."""
    if reply.turn not in (None, now.turn) or (reply.contains is not None and reply.contains not in now.user):
        return None
    values = {"user": now.user, "tool_output": now.tool_output, "turn": str(now.turn)}
    if reply.match is None:
        return values
    found = reply.match.search(now.user)
    if found is None:
        return None
    groups = {str(index): group or "" for index, group in enumerate((found[0], *found.groups()))}
    return values | groups | {name: group or "" for name, group in found.groupdict().items()}


def _filled(text: str, values: dict[str, str]) -> str:
    """Replace placeholders once; inserted values are not expanded again."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), text) if "{" in text else text


def _arguments(arguments: Any, values: dict[str, str]) -> str:
    if isinstance(arguments, str):
        return _filled(arguments, values)
    return orjson.dumps(_filled_in(arguments, values)).decode()


def _filled_in(value: Any, values: dict[str, str]) -> Any:
    match value:
        case str():
            return _filled(value, values)
        case dict():
            return {key: _filled_in(inner, values) for key, inner in value.items()}
        case list():
            return [_filled_in(inner, values) for inner in value]
        case _:
            return value


def _problem(row: dict[str, Any]) -> str | None:
    try:
        Reply.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'reply'}: {first['msg']}"
    return None
