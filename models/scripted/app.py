"""scripted: a model with scripted answers, for tests, benchmarks and first steps.

A reply's conditions: `match` (a regular expression, searched in the last user message), `contains` (a substring of it),
`turn` (1 for the first call of a conversation, 2 after one assistant turn, ...). It has `text`, `tool_calls`, or both.
In its strings `{user}` is the last user message, `{tool_output}` the last tool output, `{turn}` the turn, and `{1}` or
`{name}` a group of `match`; other braces stay unchanged. Arguments written as an object become JSON; a string is sent
unchanged after the replacements, even if it is not JSON.

A continued conversation begins with exactly the ids of the earlier call; all other items are rendered from their text.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ngym import BadRequest, ModelCall, ServiceContext, model_server
from ngym.convert import (
    content_text,
    last_user_text,
    message_item,
    new_response,
    output_text,
    overflow_response,
    response_events,
)
from ngym.files import jsonl
from ngym.net.json_limits import by_size
from ngym.services.base.options import InputFile
from ngym.services.models.server import ModelOptions, PriorCall

_PLACE = re.compile(r"\{(\w+)\}")
_ASSISTANT = frozenset({"reasoning", "function_call"})
BEGIN = b"\xff"
END = b"\xfe"
_WORD = re.compile(r"\s*\S+\s*\Z|\s*\S+|\s+")
LOGPROBS = [-(token % 8 + 1) / 16 for token in range(256)]  # of sampled ids, which are bytes; exact in binary
CONTEXT = 1_000_000  # tokens, if token ids are on: each is a Python object


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
    def _check_content(self) -> Reply:
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
    return tuple(Reply.model_validate(line.row) for line in jsonl.check_lines(file, _problem))


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
        values = _placeholder_values(reply, now)
        if values is not None:
            break
    else:
        raise LookupError("no reply matches")
    calls = [(_fill(call.name, values), _arguments(call.arguments, values)) for call in reply.tool_calls]
    return Answer(_fill(reply.reasoning, values), _fill(reply.text, values), calls)


def _placeholder_values(reply: Reply, now: Situation) -> dict[str, str] | None:
    """The values of the reply's placeholders, or None if a condition does not hold."""
    if reply.turn not in (None, now.turn) or (reply.contains is not None and reply.contains not in now.user):
        return None
    values = {"user": now.user, "tool_output": now.tool_output, "turn": str(now.turn)}
    if reply.match is None:
        return values
    match = reply.match.search(now.user)
    if match is None:
        return None
    groups = {str(index): group or "" for index, group in enumerate((match[0], *match.groups()))}
    return values | groups | {name: group or "" for name, group in match.groupdict().items()}


def _fill(text: str, values: dict[str, str]) -> str:
    """Replace placeholders once; inserted values are not expanded again."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), text) if "{" in text else text


def _arguments(arguments: Any, values: dict[str, str]) -> str:
    if isinstance(arguments, str):
        return _fill(arguments, values)
    return orjson.dumps(_fill_all(arguments, values)).decode()


def _fill_all(value: Any, values: dict[str, str]) -> Any:
    match value:
        case str():
            return _fill(value, values)
        case dict():
            return {key: _fill_all(inner, values) for key, inner in value.items()}
        case list():
            return [_fill_all(inner, values) for inner in value]
        case _:
            return value


def _problem(row: dict[str, Any]) -> str | None:
    try:
        Reply.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'reply'}: {first['msg']}"
    return None


def render(request: dict[str, Any], seen: PriorCall | None = None) -> bytes:
    """The prompt of a request, up to the beginning of the model's answer."""
    items = request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    parts = [_system(request)] if seen is None else [_prior_ids(seen)]
    for role, run in groupby(items if seen is None else items[seen.place + 1 :], _role):
        if role == "assistant":  # all items of a turn form one message
            parts.append(_message(role, map(_item_bytes, run)))
        else:
            parts += [_message(role, [_item_bytes(item)]) for item in run]
    return b"".join(parts) + BEGIN + b"assistant\n"


def shorten(answer: Answer, limit: int | None) -> tuple[Answer, bytes, bool]:
    """The part of an answer within `limit` tokens, its ids, and whether it was cut.

    Text is cut between characters; reasoning and calls are kept whole or dropped, and nothing follows a cut. If nothing
    is kept, the ids are those of the part that was sampled: no ids would mean a conversation that does not fit.
    """
    whole = _answer_bytes(answer) + END
    if limit is None or len(whole) <= limit:
        return answer, whole, False
    cut = Answer(answer.reasoning, "", []) if len(_thought(answer.reasoning)) <= limit else Answer("", "", [])
    if cut.reasoning == answer.reasoning:
        remaining = limit - len(_thought(cut.reasoning))
        cut = cut._replace(text=answer.text.encode()[:remaining].decode(errors="ignore"))
    if cut.text == answer.text:
        for call in answer.calls:
            longer = cut._replace(calls=[*cut.calls, call])
            if len(_answer_bytes(longer)) > limit:
                break
            cut = longer
    return cut, _answer_bytes(cut) or whole[:limit], True


def _answer_bytes(answer: Answer) -> bytes:
    return b"".join((_thought(answer.reasoning), answer.text.encode(), *(_call(*call) for call in answer.calls)))


def _prior_ids(call: PriorCall) -> bytes:
    """All ids up to the end of an answer."""
    try:
        ids = bytes(call.prompt_token_ids) + bytes(call.generation_token_ids)
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


def _item_bytes(item: dict[str, Any]) -> bytes:
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


ECHO = Reply(text="{user}")


class Options(ModelOptions):
    model: str = "scripted"
    replies: tuple[Reply, ...] = Field(default=(), description="Tried in order, before those of the file.")
    file: InputFile | None = Field(
        default=None, description="JSONL, one reply per line; relative to the config's folder."
    )
    latency_s: float = Field(default=0, ge=0, le=3600, description="Delay before the first word.")
    word_latency_s: float = Field(default=0, ge=0, le=60, description="Delay of each word.")
    tokens: bool = Field(default=False, description="Send token ids (one per byte) and logprobs.")


@asynccontextmanager
async def replies(context: ServiceContext) -> AsyncIterator[tuple[Reply, ...]]:
    """All replies, with the echo as the last, so that one always matches."""
    options: Options = context.options
    read = read_replies(options.file) if options.file else ()
    yield (*options.replies, *read, ECHO)


async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    """The first matching reply, cut to `max_output_tokens`. Usage counts one token per byte."""
    options: Options = call.options
    response = await by_size(call.size, _response, request, call)
    thinking_s = options.latency_s
    if options.word_latency_s:
        thinking_s += options.word_latency_s * sum(1 for event in response_events(response) for _ in _words(event))
    if thinking_s:
        await asyncio.sleep(thinking_s)
    return response


async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
    """The same reply, word by word."""
    options: Options = call.options
    for event in response_events(await by_size(call.size, _response, request, call)):
        sent = False
        for word in _words(event):
            await asyncio.sleep(options.word_latency_s)
            yield {**event, "delta": word}
            sent = True
        if not sent:
            yield event
        if event["type"] == "response.in_progress" and options.latency_s:
            await asyncio.sleep(options.latency_s)


async def count_tokens(request: dict[str, Any], call: ModelCall) -> int:
    """One per byte, as in the usage."""
    return len(render(request, call.seen))


def _words(event: dict[str, Any]) -> Iterator[str]:
    """The words of an event's text, each with the spaces before it."""
    for word in _WORD.finditer(event.get("delta", "")):
        yield word[0]


def _response(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    options: Options = call.options
    reply = answer(call.state, situation(request["input"]))
    prompt = render(request, call.seen)
    if options.tokens and len(prompt) > CONTEXT:
        return overflow_response(request, response_id=f"resp_{secrets.token_hex(12)}", model=options.model)
    reply, sampled, cut = shorten(reply, request.get("max_output_tokens"))
    stem = secrets.token_hex(12)
    output = _items(reply, stem)
    if options.tokens:
        logprobs = [LOGPROBS[token] for token in sampled]
        output[-1] |= {"prompt_token_ids": list(prompt), "generation_token_ids": list(sampled)}
        output[-1]["generation_log_probs"] = logprobs
    response = new_response(
        request,
        output,
        response_id=f"resp_{stem}",
        model=options.model,
        usage=_usage(len(prompt), len(sampled)),
        incomplete="max_output_tokens" if cut else None,
    )
    return {**response, "ng": {"policy_version": [[0, len(sampled), 0]]}} if options.tokens else response


def _items(answer: Answer, stem: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        text = {"type": "reasoning_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{stem}", "summary": [], "content": [text]})
    if answer.text or not answer.calls:
        items.append(message_item([output_text(answer.text)], f"msg_{stem}"))
    for index, (name, arguments) in enumerate(answer.calls):
        ids = {"id": f"fc_{stem}_{index}", "call_id": f"call_{stem}_{index}"}
        items.append({"type": "function_call", **ids, "name": name, "arguments": arguments, "status": "completed"})
    return items


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


app = model_server(respond=respond, stream=stream, count_tokens=count_tokens, options=Options, lifespan=replies)
