"""Translates three client APIs to and from the two native APIs that a back end may speak.

|            | native `responses`        | native `chat`        |
|------------|---------------------------|----------------------|
| Responses  | unchanged                 | through ngym.convert |
| Chat       | through ngym.convert      | unchanged            |
| Messages   | by way of Chat            | through ngym.convert |
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from ngym.convert import (
    ENDED_EARLY,
    FINISHED_EVENTS,
    SSE_DONE,
    ChunkStream,
    MessagesStream,
    ReasoningStyle,
    ResponseStream,
    chat_chunks,
    chat_from_messages_api,
    chat_from_response,
    chat_request,
    check_chat_request,
    check_create_params,
    check_messages_request,
    create_params,
    create_params_from_messages_api,
    messages_api_from_chat,
    new_response,
    output_text,
    refuse_token_ids,
    response_events,
    response_from_chat,
    with_token_ids,
)
from ngym.errors import ServiceError, openai_refusal, shorten
from ngym.schema import Json

Native = Literal["responses", "chat"]
ClientName = Literal["responses", "chat", "messages"]
WHOLE_FIELDS: dict[Native, tuple[str, ...]] = {
    "responses": ("id", "object", "created_at", "model", "status"),
    "chat": ("id", "object", "created", "model"),
}
LAST_EVENTS = FINISHED_EVENTS | {"response.failed", "error"}
SHOWN_CHARS = 200


def whole_answer(answer: Any, native: Native, request: Json, model: str) -> Json:
    """What `respond` returned, with the fields that every client expects.

    model: the name that it gets if neither it nor the request has one.

    Raises:
        ServiceError: it is not a Response or Chat Completion.
    """
    problem = (_response_problem if native == "responses" else _completion_problem)(answer)
    if problem is not None:
        raise ServiceError(f"the model's answer {problem}: {shorten(repr(answer), SHOWN_CHARS)}", failure="model_error")
    whole: Json = {**answer, "output": _with_parts(answer["output"])} if native == "responses" else answer
    missing = [name for name in WHOLE_FIELDS[native] if whole.get(name) is None]
    if not missing:
        return whole
    stem, model = secrets.token_hex(12), request.get("model") or model
    if native == "responses":
        usage = whole.get("usage")
        added = new_response(request, whole["output"], response_id=f"resp_{stem}", model=model, usage=usage)
    else:
        added = {"id": f"chatcmpl-{stem}", "object": "chat.completion", "created": int(time.time()), "model": model}
    return added | whole | {name: added[name] for name in missing}


def checked_event(event: Any, native: Native, request: Json, model: str) -> Json:
    """What `stream` yielded; the response of the last event is completed as by `whole_answer`.

    Raises:
        ServiceError: it is not an event of Responses or a chunk of Chat Completions.
    """
    is_object = isinstance(event, dict)
    if not is_object or (native == "responses" and not isinstance(event.get("type"), str)):
        expected = "an event with its `type`" if native == "responses" else "a chunk"
        detail = f"the model's stream yielded {shorten(repr(event), SHOWN_CHARS)}, which is not {expected}"
        raise ServiceError(detail, failure="model_error")
    checked: Json = event
    if checked.get("type") in FINISHED_EVENTS:
        checked["response"] = whole_answer(checked.get("response"), native, request, model)
    return checked


def _response_problem(answer: Any) -> str | None:
    """What is wrong with a Response; None if it can be used."""
    items = answer.get("output") if isinstance(answer, dict) else None
    if not isinstance(items, list):
        return "is not a Response with `output`, a list of items"
    for index, item in enumerate(items):
        match item:
            case {"type": "message", "content": [*parts]} if all(isinstance(part, dict) for part in parts):
                continue
            case {"type": "message", "content": str()}:
                continue
            case {"type": "message"}:
                return f"has a message whose content is neither a text nor a list of parts, output[{index}]"
            case {"type": "function_call", "name": str(), "arguments": str(), "call_id": str()}:
                continue
            case {"type": "function_call"}:
                return f"has a function_call without the texts name, arguments and call_id, output[{index}]"
            case {"type": str()}:
                continue
        return f"has an item without a type, output[{index}]"
    return _field_problem(answer)


def _with_parts(items: list[Json]) -> list[Json]:
    """Items of a Response; a text as a message's content becomes its one part."""
    return [
        {**item, "content": [output_text(item["content"])]}
        if item["type"] == "message" and isinstance(item["content"], str)
        else item
        for item in items
    ]


def _completion_problem(answer: Any) -> str | None:
    match answer:
        case {"choices": [{"message": dict()}, *_]}:
            return _field_problem(answer)
    return "is not a Chat Completion with `choices`, each with a `message`"


def _field_problem(answer: Json) -> str | None:
    if not isinstance(answer.get("usage") or {}, dict):
        return "has a usage that is not an object"
    wrong = next((name for name in ("id", "model") if not isinstance(answer.get(name) or "", str)), None)
    return wrong and f"has another {wrong} than a text"


class Converter(Protocol):
    """Converts a native stream to the client's, event by event."""

    def take(self, event: Json) -> Iterator[Json]: ...
    def end(self) -> Iterator[Json]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiDialect:
    """One client API in front of one native API. `body` is a checked request, as the client sent it.

    check: a request's JSON -> body, without nulls; BadRequest says what is wrong.
    request: (body without the streaming fields, style) -> native request.
    answer: (native answer, body, style) -> the client's answer.
    events: (native answer, body, style) -> the client's stream, built from a finished answer.
    converter: (body, model, style) -> the converter of the native stream.
    done: the bytes that end the stream after its last event.
    refusal: an error in the form of this API: members of the problem document.
    """

    name: ClientName
    title: str
    path: str
    check: Callable[[Json], Json]
    request: Callable[[Json, ReasoningStyle], Json]
    answer: Callable[[Json, Json, ReasoningStyle], Json]
    events: Callable[[Json, Json, ReasoningStyle], Iterable[Json]]
    converter: Callable[[Json, str, ReasoningStyle], Converter]
    done: bytes
    refusal: Callable[[ServiceError], Json]


def api_dialects(native: Native) -> tuple[ApiDialect, ApiDialect, ApiDialect]:
    """The three client APIs of a server whose back end speaks `native`."""
    return _OF_RESPONSES if native == "responses" else _OF_CHAT


class _Passthrough:
    """Passes the native stream through unchanged, and fails if its end is missing."""

    def __init__(self) -> None:
        self._is_whole = False

    def take(self, event: Json) -> Iterator[Json]:
        self._is_whole = self._is_whole or event["type"] in LAST_EVENTS
        yield event

    def end(self) -> Iterator[Json]:
        return _end_of(self._is_whole)


class _Chunks:
    """Passes native chunks through, with or without usage as the client asked, and with a separate last chunk. Fails if
    the end is missing.
    """

    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._is_whole = False

    def take(self, chunk: Json) -> Iterator[Json]:
        usage = chunk.pop("usage", None)
        choices = chunk.get("choices") or ()
        self._is_whole = self._is_whole or "error" in chunk or any(each.get("finish_reason") for each in choices)
        if choices or "error" in chunk:
            yield chunk
        if usage is not None and self._include_usage:
            yield {**{k: v for k, v in chunk.items() if k != "ng"}, "choices": [], "usage": usage}

    def end(self) -> Iterator[Json]:
        return _end_of(self._is_whole)


def _end_of(is_whole: bool) -> Iterator[Json]:
    if not is_whole:
        raise ServiceError(ENDED_EARLY, failure="model_error", retryable=True)
    return iter(())


class _Chained:
    """Chains two converters."""

    def __init__(self, first: Converter, second: Converter) -> None:
        self._first = first
        self._second = second

    def take(self, event: Json) -> Iterator[Json]:
        for between in self._first.take(event):
            yield from self._second.take(between)

    def end(self) -> Iterator[Json]:
        for between in self._first.end():
            yield from self._second.take(between)
        yield from self._second.end()


def _include_usage(request: Json) -> bool:
    return bool((request.get("stream_options") or {}).get("include_usage"))


def _without_token_ids(request: Json) -> bool:
    """Whether the chunks end with usage; a request for token ids in vLLM's form is refused."""
    refuse_token_ids(request)
    return _include_usage(request)


def _convert_events(converter: Converter, events: Iterable[Json]) -> Iterator[Json]:
    for event in events:
        yield from converter.take(event)
    yield from converter.end()


_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def anthropic_refusal(error: ServiceError) -> Json:
    """An error for Anthropic's clients, which expect `type: error` in place of the problem document's own type."""
    kind = _ANTHROPIC_ERRORS.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.detail}}


_responses = partial(
    ApiDialect,
    name="responses",
    title="OpenAI Responses",
    path="/v1/responses",
    check=check_create_params,
    done=SSE_DONE,
    refusal=openai_refusal,
)
_chat = partial(
    ApiDialect,
    name="chat",
    title="OpenAI Chat Completions",
    path="/v1/chat/completions",
    check=check_chat_request,
    done=SSE_DONE,
    refusal=openai_refusal,
)
_messages = partial(
    ApiDialect,
    name="messages",
    title="Anthropic Messages",
    path="/v1/messages",
    check=check_messages_request,
    done=b"",
    refusal=anthropic_refusal,
)

_OF_RESPONSES = (
    _responses(
        request=lambda body, style: body,
        answer=lambda response, body, style: response,
        events=lambda response, body, style: response_events(response),
        converter=lambda body, model, style: _Passthrough(),
    ),
    _chat(
        request=lambda body, style: create_params(body),
        answer=lambda response, body, style: with_token_ids(chat_from_response(response), body),
        events=lambda response, body, style: chat_chunks(
            chat_from_response(response), include_usage=_without_token_ids(body)
        ),
        converter=lambda body, model, style: ChunkStream(model, _without_token_ids(body)),
    ),
    _messages(
        request=lambda body, style: create_params_from_messages_api(body),
        answer=lambda response, body, style: messages_api_from_chat(chat_from_response(response), body),
        events=lambda response, body, style: _convert_events(
            MessagesStream(response["model"]), chat_chunks(chat_from_response(response), include_usage=True)
        ),
        converter=lambda body, model, style: _Chained(ChunkStream(model, True), MessagesStream(model)),
    ),
)
_OF_CHAT = (
    _responses(
        request=lambda body, style: chat_request(body, style=style, tokens=True),
        answer=lambda completion, body, style: response_from_chat(completion, body, style=style),
        events=lambda completion, body, style: response_events(response_from_chat(completion, body, style=style)),
        converter=lambda body, model, style: ResponseStream(body, f"resp_{secrets.token_hex(12)}", None, style),
    ),
    _chat(
        request=lambda body, style: body,
        answer=lambda completion, body, style: completion,
        events=lambda completion, body, style: chat_chunks(completion, include_usage=_include_usage(body)),
        converter=lambda body, model, style: _Chunks(_include_usage(body)),
    ),
    _messages(
        request=lambda body, style: chat_from_messages_api(body),
        answer=lambda completion, body, style: messages_api_from_chat(completion, body),
        events=lambda completion, body, style: _convert_events(
            MessagesStream(completion["model"], style), chat_chunks(completion, include_usage=True)
        ),
        converter=lambda body, model, style: MessagesStream(model, style),
    ),
)
