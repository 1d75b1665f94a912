"""anthropic: Anthropic's Messages API as a model. Reasoning keeps its signature and is sent back with it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from pydantic import Field

from ngym import ModelCall, ServiceContext, model_server
from ngym.convert import (
    MessageChunks,
    chat_chunks,
    chat_from_message,
    chat_from_response,
    messages_api_request,
    overflow_response,
)
from ngym.errors import UpstreamError
from ngym.remote import ContextOverflow, RemoteOptions, Upstream, answer_validation, watch_upstream
from ngym.services.models.server import ModelOptions

Json = dict[str, Any]
PATH = "/v1/messages"


class Options(RemoteOptions, ModelOptions):
    model: str
    base_url: str = Field(default="https://api.anthropic.com", pattern="^https?://")
    api_key_env: str | None = Field(
        default="ANTHROPIC_API_KEY",
        validate_default=True,
        description="The environment variable with the key (never the key itself); null if the endpoint needs none.",
    )
    version: str = Field(default="2023-06-01", description="The header anthropic-version.")
    beta: tuple[str, ...] = Field(default=(), description="The header anthropic-beta.")
    max_tokens: int = Field(default=8192, ge=1, description="For requests without a limit; Anthropic requires one.")
    extra_body: dict[str, Any] = Field(
        default={},
        description="Sent with every request, such as thinking: {type: adaptive}; the request's own fields win.",
    )


class Backend:
    """Answers Chat Completions requests by calls to Anthropic's Messages API."""

    def __init__(self, options: Options, upstream: Upstream) -> None:
        self._options = options
        self._upstream = upstream

    async def respond(self, request: Json) -> Json:
        """A Chat Completion. Raises as `Upstream.post`, and BadRequest for what the Messages API cannot express."""
        try:
            message = await self._upstream.post(PATH, self._body(request))
        except ContextOverflow:
            return self._empty_completion()
        self._check(answer_validation.message(message))
        return chat_from_message(message)

    async def stream(self, request: Json) -> AsyncGenerator[Json, None]:
        """Chat chunks as Anthropic's events arrive. Raises as `respond`, and as `Upstream.stream`."""
        converter, last = MessageChunks(), None
        try:
            async with aclosing(self._upstream.stream(PATH, self._body(request) | {"stream": True})) as events:
                async for event in events:
                    self._check(answer_validation.message_event(event))
                    last = event["type"]
                    for chunk in self._chunks(converter, event):
                        yield chunk
        except ContextOverflow:
            for chunk in chat_chunks(self._empty_completion(), include_usage=True):
                yield chunk
            return
        if last != "message_stop":
            url = f"{self._options.base_url}{PATH}"
            raise UpstreamError(f"{url} ended without message_stop", failure="model_error", retryable=True)

    def _body(self, request: Json) -> Json:
        body = messages_api_request(request, max_tokens=self._options.max_tokens)
        return self._options.extra_body | body | {"model": self._options.model}

    def _chunks(self, converter: MessageChunks, event: Json) -> list[Json]:
        try:
            return list(converter.take(event))
        except (AttributeError, KeyError, TypeError):  # events in an invalid order
            self._check(f"{event['type']} in the wrong place")
            raise

    def _check(self, wrong: str | None) -> None:
        if wrong is not None:
            url = f"{self._options.base_url}{PATH}"
            raise UpstreamError(f"{url} answered with an invalid message: {wrong}", failure="model_error")

    def _empty_completion(self) -> Json:
        """An empty answer, for a conversation that does not fit the context."""
        response_id = f"resp_{secrets.token_hex(12)}"
        return chat_from_response(overflow_response({}, response_id=response_id, model=self._options.model))


@asynccontextmanager
async def backend(context: ServiceContext) -> AsyncIterator[Backend]:
    options: Options = context.options
    default_headers = {"anthropic-version": options.version} | (
        {"anthropic-beta": ",".join(options.beta)} if options.beta else {}
    )
    default_headers |= {"x-api-key": options.key} if options.key else {}

    async def headers() -> dict[str, str]:
        return default_headers

    async with watch_upstream(Upstream(options, context.name, options.model, headers), app) as upstream:
        yield Backend(options, upstream)


async def respond(request: Json, call: ModelCall) -> Json:
    backend: Backend = call.state
    return await backend.respond(request)


async def stream(request: Json, call: ModelCall) -> AsyncIterator[Json]:
    backend: Backend = call.state
    async with aclosing(backend.stream(request)) as chunks:
        async for chunk in chunks:
            yield chunk


app = model_server(respond=respond, stream=stream, api="chat", options=Options, lifespan=backend)
