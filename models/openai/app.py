"""openai: any OpenAI-compatible endpoint, or Azure OpenAI, as a model, by Responses or Chat Completions."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ngym import ModelCall, ServiceContext, model_server
from ngym.convert import (
    MaxTokensField,
    ReasoningStyle,
    ResponseStream,
    chat_request,
    extra_body,
    overflow_response,
    response_events,
    response_from_chat,
    unfinished,
)
from ngym.errors import UpstreamError
from ngym.remote import ContextOverflow, NotSupported, RemoteOptions, Upstream, answer_validation, watch_upstream
from ngym.schema import TOKEN_FIELDS
from ngym.services.models.server import ModelOptions

from .credentials import Azure, address, headers

Json = dict[str, Any]
Api = Literal["auto", "responses", "chat"]
log = logging.getLogger("ngym.models.openai")
_FOR_ENGINES = ("extra_body", "chat_template_kwargs")  # keys of metadata that are for ngym, not for the endpoint
ENDS = frozenset({"response.completed", "response.incomplete"})
_CUT_OFF = frozenset({"max_tokens", "max_output_tokens"})  # names of other APIs for `length`, which gateways pass on
_BROKEN_OFF = frozenset({"abort", "error"})  # of vLLM, SGLang and gateways
_OURS = frozenset({*TOKEN_FIELDS, "ng"})  # fields of items that only ngym's servers use


class Backend:
    """An endpoint and the API in use; with `api: auto` the first answer decides."""

    def __init__(self, options: Options, upstream: Upstream) -> None:
        self._options = options
        self._upstream = upstream
        self._model = (options.azure and options.azure.deployment) or options.model
        self._api: Api = "chat" if options.token_ids else options.api

    async def respond(self, params: Json) -> Json:
        """The endpoint's Response to validated create params.

        Raises:
            ServiceError: as `Upstream.post`; BadRequest also for what Chat Completions cannot express.
        """
        try:
            if self._api != "chat":
                try:
                    return self._settle_api("responses", await self._responses(params))
                except NotSupported:
                    if self._api == "responses":
                        raise
            return self._settle_api("chat", await self._chat(params))
        except ContextOverflow:
            return self._overflow_response(params)

    async def stream(self, params: Json) -> AsyncGenerator[Json, None]:
        """The events of the endpoint's Response, as they arrive. Raises as `respond`, and as `Upstream.stream`."""
        try:
            if self._api != "chat":
                try:
                    async with aclosing(self._responses_events(params)) as events:
                        async for event in events:
                            yield self._settle_api("responses", event)
                    return
                except NotSupported:
                    if self._api == "responses":
                        raise
            async with aclosing(self._chat_events(params)) as events:
                async for event in events:
                    yield self._settle_api("chat", event)
        except ContextOverflow:
            for event in response_events(self._overflow_response(params)):
                yield event

    def _settle_api(self, api: Api, answer: Json) -> Json:
        """Fix the API after a first answer; a failed call decides nothing."""
        if self._api == "auto":
            self._api = api
            if api == "chat":
                log.info("%s has no Responses API: using Chat Completions", self._options.base_url)
        return answer

    async def _responses(self, params: Json) -> Json:
        response = await self._upstream.post("/responses", self._responses_request(params))
        if not isinstance(response.get("output"), list):
            raise UpstreamError(f"{self._options.base_url}/responses answered without an output", failure="model_error")
        self._check("/responses", answer_validation.response(response))
        self._raise_failed(response)
        return response

    async def _responses_events(self, params: Json) -> AsyncGenerator[Json, None]:
        body = self._responses_request(params) | {"stream": True}
        last = None
        async with aclosing(self._upstream.stream("/responses", body)) as events:
            async for event in events:
                self._check("/responses", answer_validation.response_event(event))
                last = event["type"]
                if last == "response.failed" or last in ENDS:
                    self._raise_failed(event["response"])
                if last in ENDS and event["response"].get("status") == "incomplete":
                    event["type"] = "response.incomplete"  # vLLM calls it completed
                yield event
        if last not in ENDS:
            detail = f"{self._options.base_url}/responses ended without its last event"
            raise UpstreamError(detail, failure="model_error", retryable=True)

    def _responses_request(self, params: Json) -> Json:
        body = self._options.extra_body | extra_body(params) | params | {"model": self._model}
        body.pop("thinking", None)  # Anthropic's
        if isinstance(params["input"], list):
            body["input"] = [{k: v for k, v in item.items() if k not in _OURS} for item in params["input"]]
        if "metadata" in params:
            body["metadata"] = {k: v for k, v in params["metadata"].items() if k not in _FOR_ENGINES}
        return body

    def _raise_failed(self, response: Json) -> None:
        if (problem := unfinished(response)) is not None:
            detail = f"{self._options.base_url}: the response cannot be used: it has {problem}"
            raise UpstreamError(detail, failure="model_error")

    async def _chat(self, params: Json) -> Json:
        request = self._chat_request(params)
        completion = await self._upstream.post("/chat/completions", request)
        style = self._options.reasoning
        self._check("/chat/completions", answer_validation.chat_completion(completion))
        self._normalize_finish_reasons(completion)
        _mark_cut_off(completion, request)
        response = response_from_chat(completion, params, style=style)
        if self._options.token_ids and TOKEN_FIELDS[0] not in response["output"][-1]:
            raise self._missing_tokens_error()
        return response

    async def _chat_events(self, params: Json) -> AsyncGenerator[Json, None]:
        options = self._options
        body = self._chat_request(params) | {"stream": True, "stream_options": {"include_usage": True}}
        converter = ResponseStream(params, style=options.reasoning)
        async with aclosing(self._upstream.stream("/chat/completions", body)) as chunks:
            async for chunk in chunks:
                self._check("/chat/completions", answer_validation.chat_chunk(chunk))
                self._normalize_finish_reasons(chunk)
                for event in converter.take(chunk):
                    yield event
        for event in converter.end():
            if options.token_ids and event["type"] in ENDS and TOKEN_FIELDS[0] not in event["response"]["output"][-1]:
                raise self._missing_tokens_error()
            yield event

    def _chat_request(self, params: Json) -> Json:
        options = self._options
        translated = chat_request(params, style=options.reasoning, max_tokens_field=options.max_tokens_field)
        body = options.extra_body | translated | {"model": self._model}
        if options.token_ids:
            body |= {"return_token_ids": True, "logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
        return body

    def _check(self, path: str, wrong: str | None) -> None:
        if wrong is not None:
            what = "Response" if path == "/responses" else "Chat Completion"
            detail = f"{self._options.base_url}{path} answered with an invalid {what}: {wrong}"
            raise UpstreamError(detail, failure="model_error")

    def _normalize_finish_reasons(self, answer: Json) -> None:
        """Give each finish_reason OpenAI's name.

        Raises:
            UpstreamError: the endpoint ended the answer for a failure of its own.
        """
        for choice in answer.get("choices") or ():
            finish = (choice.get("finish_reason") or "").lower()
            if finish in _CUT_OFF:
                choice["finish_reason"] = "length"
            elif finish in _BROKEN_OFF:
                detail = f"{self._options.base_url} broke the answer off: its finish_reason is {finish!r}"
                raise UpstreamError(detail, failure="model_error", retryable=True)

    def _missing_tokens_error(self) -> UpstreamError:
        detail = (
            f"{self._options.base_url} returned no token ids: it does not support return_token_ids; "
            "set token_ids: false"
        )
        return UpstreamError(detail, failure="model_error")

    def _overflow_response(self, params: Json) -> Json:
        return overflow_response(params, response_id=f"resp_{secrets.token_hex(12)}", model=self._options.model)


def _mark_cut_off(completion: Json, request: Json) -> None:
    """Set the finish_reason `length` where vLLM's server says `tool_calls` for a cut-off text that parses as a call, and
    where a server says nothing.

    The answer then has as many tokens as the limit allows. A call that ends exactly at the limit looks the same.
    """
    limits = [request[name] for name in ("max_completion_tokens", "max_tokens") if request.get(name) is not None]
    sampled = (completion.get("usage") or {}).get("completion_tokens")
    for choice in completion["choices"]:
        if (
            choice.get("finish_reason") in ("tool_calls", None)
            and limits
            and sampled is not None
            and sampled >= min(limits)
        ):
            choice["finish_reason"] = "length"


class Options(RemoteOptions, ModelOptions):
    model: str
    base_url: str = Field(default="https://api.openai.com/v1", pattern="^https?://")
    api_key_env: str | None = Field(
        default="OPENAI_API_KEY",
        validate_default=True,
        description="The environment variable with the key (never the key itself); null if the endpoint needs none.",
    )
    api: Literal["auto", "responses", "chat"] = Field(
        default="auto", description="auto tries Responses first, and uses Chat Completions after a 404 or 405."
    )
    azure: Azure | None = None
    extra_body: dict[str, Any] = Field(
        default={}, description="Sent with every request; the request's own fields take precedence."
    )
    max_tokens_field: MaxTokensField = Field(
        default="max_completion_tokens",
        description="Its name in the endpoint's Chat Completions; older ones: max_tokens.",
    )
    reasoning: ReasoningStyle = Field(
        default="field",
        description="Where Chat Completions have reasoning: reasoning_content, or <think> tags in the text.",
    )
    token_ids: bool = Field(
        default=False,
        description="Request token ids and logprobs (supported by vLLM's Chat Completions) and pass them on.",
    )

    @field_validator("token_ids")
    @classmethod
    def _by_chat(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("api") == "responses":
            raise ValueError("token ids need Chat Completions; set api: chat")
        return value


@asynccontextmanager
async def backend(context: ServiceContext) -> AsyncIterator[Backend]:
    options: Options = context.options
    async with headers(options.azure, options.key) as credentials:
        endpoint = Upstream(options, context.name, options.model, credentials, address(options.base_url, options.azure))
        async with watch_upstream(endpoint, app) as upstream:
            yield Backend(options, upstream)


async def respond(request: Json, call: ModelCall) -> Json:
    backend: Backend = call.state
    return await backend.respond(request)


async def stream(request: Json, call: ModelCall) -> AsyncIterator[Json]:
    backend: Backend = call.state
    async with aclosing(backend.stream(request)) as events:
        async for event in events:
            yield event


app = model_server(respond=respond, stream=stream, options=Options, lifespan=backend)
