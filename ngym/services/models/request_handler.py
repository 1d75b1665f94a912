"""One call to a model server, from the client's request to its answer or stream.

body -> checked -> (conversation of previous_response_id) -> native request -> seen ids -> respond or stream ->
captured, stored -> the client's API

Stored answers serve `previous_response_id`. An answer refers to the one it continues, so a conversation is stored once,
however long it grows. The least recently used answer is dropped first; answers that continue a dropped one are dropped
with it.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import orjson
from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.datastructures import State
from starlette.responses import Response

from ngym.convert import FINISHED_EVENTS, finish_reason, sse, usage_from_chat
from ngym.errors import MAX_NAME, BadRequest, Boundary, NotFound, ServiceError, shorten
from ngym.net import request_context
from ngym.net.json_limits import LOOP_BYTES, by_size, trim
from ngym.rollout import ModelCall as CallTokens
from ngym.rollout import tokens_of, without_tokens
from ngym.schema import ROUTED_EXPERTS, TOKEN_FIELDS, Json
from ngym.services.base.app import JsonResponse, context_of
from ngym.services.base.middleware import Admission, EventStream, Handler, whole_stream
from ngym.services.base.options import ServiceContext
from ngym.services.base.request_bodies import json_body, off_loop, whole_body
from ngym.services.models.api_dialects import ApiDialect, Native, checked_event, whole_answer
from ngym.services.models.token_capture import Captures, ModelCall, PendingCall, Respond, Stream, take_prior_call
from ngym.telemetry import tracing

MAX_RESPONSES = 20_000
MAX_BYTES = 256 << 20
_TOOL: Json = {"description": None, "parameters": None, "strict": None}
_SCHEMA: Json = {"description": None, "strict": False}
ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
# Fields that the server handles and the back end does not see.
OF_THE_SERVER = ("stream", "stream_options", "previous_response_id")
RETRIES = "x-stainless-retry-count"  # sent by the SDKs of OpenAI and Anthropic


@dataclass(frozen=True, slots=True)
class _Stored:
    """request: the body of the call. response: the body of the answer. previous: the response that it continues."""

    request: bytes
    response: bytes
    previous: str | None


class ResponseStore:
    """The answers of one server process."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()  # least recently used first
        self._bytes = 0

    def keep(self, response_id: str, request: bytes, response: bytes, previous: str | None) -> None:
        if response_id in self._stored:
            self._drop(response_id)
        self._stored[response_id] = _Stored(request, trim(response), previous)
        self._bytes += len(request) + len(response)
        while self._bytes > self._max_bytes or len(self._stored) > self._max_responses:
            self._drop(next(iter(self._stored)))

    def response(self, response_id: str) -> bytes:
        """The answer as it was sent. NotFound if it is not stored."""
        return self._stored_response(response_id).response

    def conversation(self, response_id: str) -> list[Json]:
        """All items up to and including this answer.

        Raises:
            NotFound: it is not stored, or a response that it continues is not.
        """
        items: list[Json] = []
        for stored in reversed([*self._back(response_id)]):
            items += input_items(orjson.loads(stored.request)["input"])
            items += orjson.loads(stored.response)["output"]
        return items

    def input_items_of(self, response_id: str) -> list[Json]:
        """All input items of this answer, each with an id."""
        stored = self._stored_response(response_id)
        items = self.conversation(stored.previous) if stored.previous else []
        items += input_items(orjson.loads(stored.request)["input"])
        stem = response_id.removeprefix("resp_")
        return [{"id": f"item_{stem}_{index}", **item} for index, item in enumerate(items)]

    def forget(self, response_id: str) -> None:
        """Delete an answer. NotFound if it is not stored."""
        self._stored_response(response_id)
        self._drop(response_id)

    def _back(self, response_id: str) -> Iterator[_Stored]:
        """This answer, the one it continues, and so on."""
        at: str | None = response_id
        while at is not None:
            stored = self._stored_response(at)
            yield stored
            at = stored.previous

    def _stored_response(self, response_id: str) -> _Stored:
        if response_id not in self._stored:
            raise NotFound(
                f"there is no stored response {response_id!r}: it was requested with store: false, was deleted or "
                f"dropped (this server keeps {self._max_bytes >> 20} MiB), or came from another replica; send the whole input",
                extra={"errors": [{"field": "previous_response_id", "message": "is not stored"}]},
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def _drop(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= len(stored.request) + len(stored.response)


def input_items(value: Any) -> list[Json]:
    """A request's input as items: text is one user message."""
    if isinstance(value, list):
        return list(value)
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]


class Traffic:
    """The calls of one model server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tokens = Counter("ngym_model_tokens", "Tokens, from the usage of answers", ["way"], registry=registry)
        self.input_tokens, self.output_tokens = tokens.labels("input"), tokens.labels("output")
        self.version = Gauge(
            "ngym_policy_version", "The newest policy version that an answer was sampled with", registry=registry
        )
        self.newest = -1

    def call(self, native: Json, model: str, *, streamed: bool) -> Call:
        """A call that is about to be answered. native: the back end's request."""
        return Call(self, native, model, streamed)


class Call:
    """The span and counters of one call: used with `with`, and given the answer by `record_answer`."""

    def __init__(self, traffic: Traffic, native: Json, model: str, streamed: bool) -> None:
        self._traffic = traffic
        self._native = native
        self._model = model
        self._streamed = streamed
        self._span = tracing.OFF

    def __enter__(self) -> Self:
        span = self._span = tracing.span(f"chat {self._model}", "server").__enter__()
        if span.is_recording:
            request = self._native
            span.set("gen_ai.operation.name", "chat")
            span.set("gen_ai.provider.name", "ngym")
            span.set("gen_ai.request.model", self._model)
            span.set("gen_ai.request.stream", self._streamed)
            for name in ("temperature", "top_p"):
                span.set(f"gen_ai.request.{name}", request.get(name))
            most = request.get("max_output_tokens") or request.get("max_completion_tokens") or request.get("max_tokens")
            span.set("gen_ai.request.max_tokens", most)
            span.set_content("ngym.model.input", request.get("input") or request.get("messages"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, trace)

    def record_answer(self, answer: Json) -> None:
        """Record the answer, a Response or a Chat Completion."""
        is_response = "output" in answer
        usage = (answer.get("usage") if is_response else usage_from_chat(answer.get("usage"))) or {}
        read, written = usage.get("input_tokens") or 0, usage.get("output_tokens") or 0
        self._traffic.input_tokens.inc(read)
        self._traffic.output_tokens.inc(written)
        versions = [span[2] for span in (answer.get("ng") or {}).get("policy_version") or ()]
        if versions and max(versions) > self._traffic.newest:
            self._traffic.newest = max(versions)
            self._traffic.version.set(self._traffic.newest)
        if not self._span.is_recording:
            return
        span = self._span
        span.set("gen_ai.response.id", answer.get("id"))
        span.set("gen_ai.response.model", answer.get("model"))
        span.set("gen_ai.response.finish_reasons", [finish_reason(answer)])
        span.set("gen_ai.usage.input_tokens", read)
        span.set("gen_ai.usage.output_tokens", written)
        span.set("ngym.policy_version", max(versions, default=None))
        span.set_content("ngym.model.output", without_tokens(answer["output"]) if is_response else _messages(answer))


def _messages(answer: Json) -> list[Json]:
    messages = [choice["message"] for choice in answer["choices"]]
    return [{key: value for key, value in message.items() if key not in TOKEN_FIELDS} for message in messages]


class Writer:
    """Writes the events of one stream.

    Args:
        body, stored: as in `complete`.

    Attributes:
        has_written: whether anything was written.
        response: the Response of the last event that carried one; empty in other APIs.
    """

    def __init__(self, dialect: ApiDialect, body: Json, stored: bool) -> None:
        self.has_written = False
        self.response: Json = {}
        self._dialect = dialect
        self._body = body
        self._stored = stored
        self._number = 0

    def encode(self, events: Iterable[Json]) -> bytes:
        parts = []
        for event in events:
            if self._dialect.name == "responses":
                event["sequence_number"] = self._number
                self._number += 1
                if "response" in event:
                    self.response = event["response"]
                    complete(self.response, self._body, self._stored)
            parts.append(sse(event))
        self.has_written = self.has_written or bool(parts)
        return b"".join(parts)

    def encode_error(self, error: ServiceError) -> bytes:
        """The events that end a stream after an error."""
        if self._dialect.name != "responses":
            return sse(self._dialect.refusal(error))
        details = {"code": "server_error", "message": error.detail}
        response = {**self.response, "status": "failed", "error": details}
        return self.encode([{"type": "response.failed", "response": response}])


def complete(response: Json, body: Json, stored: bool) -> None:
    """Add to a Response the server's own fields, and repeat the request's fields as the specification requires.

    body: the request. stored: whether the Response can be asked for later.
    """
    response["previous_response_id"] = body.get("previous_response_id")
    response["store"] = stored
    if response.get("tools"):
        tools = response["tools"]
        response["tools"] = [_TOOL | tool if tool.get("type") == "function" else tool for tool in tools]
    if response.get("reasoning"):
        response["reasoning"] = {"effort": None, "summary": None} | response["reasoning"]
    if "text" in body:
        text = {"format": {"type": "text"}} | (response.get("text") or {})
        if text["format"].get("type") == "json_schema":
            text["format"] = _SCHEMA | text["format"]
        response["text"] = text


class WholeResponse:
    """Collects Responses events: the last one holds the whole response."""

    def __init__(self) -> None:
        self.answer: Json | None = None

    def take(self, event: Json) -> None:
        if event["type"] in FINISHED_EVENTS:
            self.answer = event["response"]


class WholeCompletion:
    """Joins chat chunks. Token data is next to the delta of the chunk that ends the choice."""

    def __init__(self) -> None:
        self.answer: Json | None = None
        self._text: dict[str, list[str]] = {}
        self._calls: dict[int, Json] = {}
        self._arguments: dict[int, list[str]] = {}

    def take(self, chunk: Json) -> None:
        if self.answer is not None:
            self.answer["usage"] = chunk.get("usage") or self.answer["usage"]
        for choice in chunk.get("choices") or ():
            self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self.answer = self._whole(chunk, choice)

    def _delta(self, delta: Json) -> None:
        for name in ("content", "refusal", "reasoning_content"):
            if delta.get(name):
                self._text.setdefault(name, []).append(delta[name])
        for part in delta.get("tool_calls") or ():
            index, function = part["index"], part.get("function") or {}
            call = self._calls.setdefault(index, {"id": "", "type": "function", "name": ""})
            call["id"] = part.get("id") or call["id"]
            call["name"] = function.get("name") or call["name"]
            self._arguments.setdefault(index, []).append(function.get("arguments") or "")

    def _whole(self, chunk: Json, choice: Json) -> Json:
        message: Json = {"role": "assistant", "content": None}
        message |= {name: "".join(parts) for name, parts in self._text.items()}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(self._arguments[index])},
                }
                for index, call in sorted(self._calls.items())
            ]
        message |= {name: choice[name] for name in TOKEN_FIELDS if choice.get(name) is not None}
        ended: dict[str, Any] = {"index": 0, "message": message, "finish_reason": choice["finish_reason"]}
        head: Json = {name: chunk[name] for name in ("id", "created", "model", "ng") if name in chunk}
        return {"object": "chat.completion", **head, "choices": [ended], "usage": chunk.get("usage")}


Whole = WholeResponse | WholeCompletion
WHOLE: dict[str, Callable[[], Whole]] = {"responses": WholeResponse, "chat": WholeCompletion}

CountTokens = Callable[[Json, ModelCall], Awaitable[int]]


class BackEnd(NamedTuple):
    """The author's functions, and the native API that they speak."""

    respond: Respond
    stream: Stream | None
    native: Native


class ActiveCall(NamedTuple):
    """A call in progress.

    body: as the client sent it, checked. native: the back end's request. stored: the body's bytes, if the answer is to
    be stored. record: the metrics and span of this call.
    """

    body: Json
    native: Json
    call: ModelCall
    record: Call
    question: PendingCall | None
    stored: bytes | None


class RequestHandler:
    """Handles the calls of one model server."""

    def __init__(
        self, state: State, captures: Captures, store: ResponseStore, admission: Admission, back_end: BackEnd
    ) -> None:
        self._state = state
        self._captures = captures
        self._store = store
        self._admission = admission
        self._back_end = back_end
        self._traffic = Traffic(state.registry)

    def handler(self, dialect: ApiDialect) -> Handler:
        """The handler of calls in this API."""

        async def handle(request: Request) -> Response:
            with Refusals(dialect.refusal):
                body_json, raw = await json_body(request), await whole_body(request)
                body = await by_size(len(raw), dialect.check, body_json)
                began = 0.0 if self._admission.is_open else await self._admission.enter()
                try:
                    active = await by_size(
                        len(raw), self._active_call, request, dialect, body, raw, rollout_of(request)
                    )
                    response = await (self._streamed if body.get("stream") else self._whole)(dialect, active)
                except BaseException:
                    self._admission.leave(began)
                    raise
            if isinstance(response, EventStream):
                response.when_over = partial(self._admission.leave, began)
            else:
                self._admission.leave(began)
            return response

        return handle

    def counter(self, dialect: ApiDialect, count: CountTokens) -> Handler:
        """The handler that counts a prompt's tokens: the body is that of a call, without its `max_tokens`."""

        async def handle(request: Request) -> Response:
            with Refusals(dialect.refusal):
                body_json = await json_body(request)
                body = await off_loop(request, dialect.check, {"max_tokens": 1, **body_json})
                active = await off_loop(
                    request, self._active_call, request, dialect, body, await request.body(), rollout_of(request)
                )
                with Boundary("model_error", "the model failed", places=True):
                    return JsonResponse({"input_tokens": await count(active.native, active.call)})

        return handle

    def _active_call(
        self, request: Request, dialect: ApiDialect, body: Json, raw: bytes, rollout_id: str | None
    ) -> ActiveCall:
        context = context_of(request)
        model = _model_name(body, context)
        whole = body
        if not body.keys().isdisjoint(OF_THE_SERVER):
            whole = {name: value for name, value in body.items() if name not in OF_THE_SERVER}
        previous = body.get("previous_response_id")
        if previous is not None:
            whole["input"] = self._store.conversation(previous) + input_items(whole["input"])
        native = dialect.request(whole, context.options.reasoning_style)
        prior_call = take_prior_call(native["messages"] if "messages" in native else native["input"])
        question = None
        if "rollout_id" in request.path_params:
            repeated = request.headers.get(RETRIES, "0") != "0"
            question = self._captures.ask(str(rollout_id), native, repeated=repeated)
            prior_call = prior_call or question.seen
        call = ModelCall(context.options, self._state.model_state, rollout_id, request.headers, prior_call, len(raw))
        stored = raw if dialect.name == "responses" and body.get("store", True) else None
        record = self._traffic.call(native, model, streamed=bool(body.get("stream")))
        return ActiveCall(body, native, call, record, question, stored)

    async def _respond(self, active: ActiveCall) -> Json:
        with active.record, Boundary("model_error", "the model failed", places=True):
            given = await self._back_end.respond(active.native, active.call)
            answer = whole_answer(given, self._back_end.native, active.native, active.call.options.model)
            self._keep(active, answer)
        return answer

    async def _whole(self, dialect: ApiDialect, active: ActiveCall) -> Response:
        native, size = await self._respond(active), active.call.size
        answer = await by_size(size, dialect.answer, native, active.body, active.call.options.reasoning_style)
        if dialect.name == "responses":
            complete(answer, active.body, active.stored is not None)
        response = await by_size(size, JsonResponse, answer)
        if active.stored is not None:
            self._store.keep(answer["id"], active.stored, bytes(response.body), active.body.get("previous_response_id"))
        return response

    async def _streamed(self, dialect: ApiDialect, active: ActiveCall) -> Response:
        style = active.call.options.reasoning_style
        if self._back_end.stream is None:
            writer = Writer(dialect, active.body, active.stored is not None)
            written = writer.encode(dialect.events(await self._respond(active), active.body, style))
            self._store_streamed(active, writer)
            return whole_stream(written + dialect.done)
        parts = self._parts(dialect, active, self._back_end.stream(active.native, active.call))
        # An error before the first event becomes an answer with its own status, as without a stream.
        return EventStream(await anext(parts), parts)

    async def _parts(
        self, dialect: ApiDialect, active: ActiveCall, events: AsyncIterator[Json]
    ) -> AsyncGenerator[bytes, None]:
        """The stream as it is sent. Its end is held back until the native answer is stored: a client's next call may
        come as soon as the client has seen the end.
        """
        options = active.call.options
        converter = dialect.converter(active.body, options.model, options.reasoning_style)
        whole = WHOLE[self._back_end.native]()
        writer = Writer(dialect, active.body, active.stored is not None)
        last_parts: list[bytes] = []
        try:
            with active.record, Boundary("model_error", "the model failed", places=True):
                async for given in events:
                    event = checked_event(given, self._back_end.native, active.native, options.model)
                    whole.take(event)
                    written = writer.encode(converter.take(_without_experts(event, active)))
                    if whole.answer is not None:
                        last_parts.append(written)
                    elif written:
                        yield written
                    if active.call.size > LOOP_BYTES:  # its events may be as large
                        await asyncio.sleep(0)
                if whole.answer is not None:
                    self._keep(active, whole.answer)
                last_parts.append(writer.encode(converter.end()))
                self._store_streamed(active, writer)
        except ServiceError as error:
            if not writer.has_written:
                raise
            last_parts = [writer.encode_error(error)]
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()
        yield b"".join(last_parts) + dialect.done

    def _store_streamed(self, active: ActiveCall, writer: Writer) -> None:
        response = writer.response
        if active.stored is not None and response.get("status") in ("completed", "incomplete"):
            previous = active.body.get("previous_response_id")
            self._store.keep(response["id"], active.stored, orjson.dumps(response), previous)

    def _keep(self, active: ActiveCall, answer: Json) -> None:
        active.record.record_answer(answer)
        if active.question is None:
            return
        tokens = _tokens(answer)
        if tokens is not None:
            usage = answer.get("usage")
            native_usage = usage if self._back_end.native == "responses" else usage_from_chat(usage)
            self._captures.keep(active.question, answer, tokens, native_usage)
            answer.update(_without_experts(answer, active))


def _without_experts(native: Json, active: ActiveCall) -> Json:
    """A native answer, chunk or event without the experts, if the call is captured: the segments have them, and they are
    larger than the answer.
    """
    if active.question is None:
        return native
    if "response" in native:
        return native | {"response": _without_experts(native["response"], active)}
    if ROUTED_EXPERTS not in (native.get("ng") or ()):
        return native
    return native | {"ng": {name: value for name, value in native["ng"].items() if name != ROUTED_EXPERTS}}


def rollout_of(request: Request) -> str | None:
    """The rollout of a call, from its path or its headers. Every further hop gets the id too."""
    here = request_context.current.get()
    in_path = request.path_params.get("rollout_id")
    if in_path is None:
        return here.rollout_id
    if not ROLLOUT_ID.fullmatch(in_path):
        raise BadRequest(
            "the rollout id in the path must be 1 to 200 of A-Z a-z 0-9 . _ : - and begin with one of A-Z a-z 0-9"
        )
    request_context.current.set(here._replace(rollout_id=in_path))
    return str(in_path)


class Refusals:
    """`with Refusals(members):` adds the error in the form of the client's API to a problem document. A wrong request is a
    400, as in both APIs.
    """

    __slots__ = ("_members",)

    def __init__(self, members: Callable[[ServiceError], Json]) -> None:
        self._members = members

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ServiceError):
            error.status = 400 if error.status == BadRequest.status else error.status
            error.extra = {**error.extra, **self._members(error)}


def _model_name(body: Json, context: ServiceContext) -> str:
    """The model that the request names, or the served one.

    Raises:
        NotFound: it is another model, and the stanza has `any_model_name: false`.
    """
    options = context.options
    name = str(body.get("model") or options.model)
    if not options.any_model_name and name not in (options.model, context.name):
        wrong = [{"field": "model", "message": "another model is served here"}]
        detail = f"there is no model {shorten(name, MAX_NAME)!r} here, only {options.model!r}; any_model_name: true accepts every name"
        raise NotFound(detail, extra={"errors": wrong, "code": "model_not_found"})
    return name


def _tokens(answer: Json) -> CallTokens | None:
    """The answer's token data; empty for a conversation that did not fit."""
    if finish_reason(answer) == "context":
        return CallTokens([], [], [], [])
    if "output" in answer:
        return tokens_of(answer)
    return tokens_of({"output": [answer["choices"][0]["message"]], "ng": answer.get("ng")})
