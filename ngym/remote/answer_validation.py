"""Validates the answers of remote APIs. Only the fields that ngym reads are checked; servers may add others.

Answers are checked on arrival, because converters and clients trust them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Required

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from ngym.schema import Json

Check = Callable[[Json], str | None]
"""Returns the problem of an answer or event, with the field, or None."""

Object = dict[str, Any]
Time = Annotated[float, Field(ge=0, le=2**53)]
"""Seconds since 1970."""
_Count = Annotated[int, Field(ge=0, le=2**53)]


class _Usage(TypedDict, total=False):
    prompt_tokens: _Count | None
    completion_tokens: _Count | None
    input_tokens: _Count | None
    output_tokens: _Count | None
    total_tokens: _Count | None
    cache_read_input_tokens: _Count | None
    cache_creation_input_tokens: _Count | None
    prompt_tokens_details: Object | None
    completion_tokens_details: Object | None
    input_tokens_details: Object | None
    output_tokens_details: Object | None


class _Function(TypedDict, total=False):
    name: str | None
    arguments: str | None


class _Call(TypedDict, total=False):
    index: int | None
    id: str | None
    function: _Function | None


class _AssistantText(TypedDict, total=False):
    content: str | None
    refusal: str | None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[_Call] | None


class _WholeFunction(TypedDict, total=False):
    name: Required[str]
    arguments: str | None


class _WholeCall(TypedDict, total=False):
    id: str | None
    function: Required[_WholeFunction]


class _AssistantMessage(_AssistantText, total=False):
    tool_calls: list[_WholeCall] | None  # type: ignore[misc]  # narrower: only chunks may have partial calls


class _Logprob(TypedDict, total=False):
    logprob: Required[float]


class _Logprobs(TypedDict, total=False):
    content: list[_Logprob] | None


class _Choice(TypedDict, total=False):
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: _Logprobs | None
    token_ids: list[int] | None


class _Whole(_Choice, total=False):
    message: Required[_AssistantMessage]


class _Part(_Choice, total=False):
    delta: _AssistantText | None


class _Head(TypedDict, total=False):
    id: str | None
    created: Time | None
    model: str | None
    usage: _Usage | None
    prompt_token_ids: list[int] | None


class _Completion(_Head, total=False):
    choices: Required[list[_Whole]]


class _Chunk(_Head, total=False):
    choices: list[_Part] | None


class _Content(TypedDict, total=False):
    type: Required[str]
    text: str
    refusal: str
    logprobs: list[Any] | None


class _Item(TypedDict, total=False):
    type: Required[str]
    id: str | None
    call_id: str
    name: str
    arguments: str
    content: list[_Content] | None
    summary: list[_Content] | None
    encrypted_content: str | None


class _Response(TypedDict, total=False):
    id: Required[str]
    created_at: Required[Time]
    status: Required[str]
    model: Required[str]
    output: Required[list[_Item]]
    usage: _Usage | None
    error: Object | None
    incomplete_details: Object | None


class _Event(TypedDict, total=False):
    type: Required[str]
    response: _Response
    item: _Item
    part: _Content
    item_id: str | None
    output_index: int
    content_index: int
    summary_index: int
    delta: str
    text: str
    refusal: str
    arguments: str


class _Block(TypedDict, total=False):
    type: Required[str]
    text: str
    thinking: str
    signature: str | None
    data: str
    id: str
    name: str
    input: Object


class _Message(TypedDict, total=False):
    id: Required[str]
    model: Required[str]
    content: Required[list[_Block]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Required[_Usage]


class _Delta(TypedDict, total=False):
    type: str
    text: str
    thinking: str
    signature: str
    partial_json: str
    stop_reason: str | None
    stop_sequence: str | None


class _MessageEvent(TypedDict, total=False):
    type: Required[str]
    message: _Message
    index: int
    content_block: _Block
    delta: _Delta
    usage: _Usage


_NEEDS = {  # what an item, a part, a block or an event of this type must have
    "message": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "output_text": ("text",),
    "reasoning_text": ("text",),
    "summary_text": ("text",),
    "refusal": ("refusal",),
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "text_delta": ("text",),
    "thinking_delta": ("thinking",),
    "signature_delta": ("signature",),
    "input_json_delta": ("partial_json",),
    "message_start": ("message",),
    "message_delta": ("delta", "usage"),
    "content_block_start": ("index", "content_block"),
    "content_block_delta": ("index", "delta"),
    "content_block_stop": ("index",),
    **{f"response.{state}": ("response",) for state in ("created", "in_progress", "completed", "incomplete", "failed")},
    **{f"response.output_item.{state}": ("item", "output_index") for state in ("added", "done")},
    **{f"response.content_part.{state}": ("part", "output_index") for state in ("added", "done")},
    **{
        f"response.{kind}.delta": ("delta", "output_index")
        for kind in ("output_text", "refusal", "function_call_arguments", "reasoning_text", "reasoning_summary_text")
    },
}
_HOLDERS = ("content", "summary", "output", "item", "part", "response", "message", "content_block", "delta")


def _check(shape: Any) -> Check:
    adapter = TypeAdapter(shape)

    def check(value: Json) -> str | None:
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        return _missing(value)

    return check


def _missing(value: Json) -> str | None:
    kind = value.get("type")
    for name in _NEEDS.get(kind, ()) if isinstance(kind, str) else ():
        if value.get(name) is None:
            return f"{name}: is missing in {kind}"
    for name in _HOLDERS:
        if name not in value:
            continue
        inner = value[name]
        for one in inner if isinstance(inner, list) else (inner,):
            if isinstance(one, dict) and (wrong := _missing(one)):
                return f"{name}.{wrong}"
    return None


chat_completion = _check(_Completion)
chat_chunk = _check(_Chunk)
response = _check(_Response)
response_event = _check(_Event)
message = _check(_Message)
message_event = _check(_MessageEvent)
