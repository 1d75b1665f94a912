"""openai: any OpenAI-compatible endpoint, or Azure OpenAI, as a model, by Responses or Chat Completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ngym import ModelCall, ServiceContext, model_server
from ngym.convert import MaxTokensField, ReasoningStyle
from ngym.remote import RemoteOptions, Upstream, watched
from ngym.services.models.server import ModelOptions

from .access import Azure, address, headers
from .backend import Backend

Json = dict[str, Any]


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
    def _by_chat(cls, wanted: bool, info: ValidationInfo) -> bool:
        if wanted and info.data.get("api") == "responses":
            raise ValueError("token ids need Chat Completions; set api: chat")
        return wanted


@asynccontextmanager
async def backend(context: ServiceContext) -> AsyncIterator[Backend]:
    options: Options = context.options
    async with headers(options.azure, options.key) as credentials:
        endpoint = Upstream(options, options.model, credentials, address(options.base_url, options.azure))
        async with watched(endpoint, app.state.registry) as upstream:
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
