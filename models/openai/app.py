"""openai: any OpenAI-compatible endpoint, or Azure OpenAI, as a model; by Responses where it can, else by Chat."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ngym import ModelCall, ServiceContext, model_server
from ngym.convert import MaxTokensField, ReasoningStyle
from ngym.services.model import ModelOptions

from .backend import Backend
from .upstream import Upstream, make_client


class Azure(BaseModel):
    """What Azure OpenAI wants beside the endpoint, which is `base_url`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    api_version: str = Field(description="Such as 2025-04-01-preview.")
    deployment: str | None = Field(default=None, description="The deployment's name, where it is not the model's.")


class Options(ModelOptions):
    model: str
    base_url: str = Field(default="https://api.openai.com/v1", pattern="^https?://")
    api_key_env: str | None = Field(
        default="OPENAI_API_KEY",
        validate_default=True,
        description="The environment variable that holds the key (never the key itself); null where none is asked for.",
    )
    api: Literal["auto", "responses", "chat"] = Field(
        default="auto", description="auto asks for Responses first, and stays with Chat Completions after a 404 or 405."
    )
    azure: Azure | None = None
    timeout_s: float = Field(default=600, gt=0, description="For one answer, retries included.")
    max_concurrency: int = Field(
        default=256, ge=1, le=1000, description="Requests in flight; more wait for their turn."
    )
    max_retries: int = Field(default=4, ge=0, le=20, description="After 429, 5xx and broken connections.")
    extra_body: dict[str, Any] = Field(default={}, description="Sent with every request; the request's own fields win.")
    max_tokens_field: MaxTokensField = Field(
        default="max_completion_tokens",
        description="What the endpoint's Chat Completions call it; older ones: max_tokens.",
    )
    reasoning: ReasoningStyle = Field(
        default="field",
        description="Where Chat Completions hold reasoning: reasoning_content, or <think> tags in the text.",
    )
    token_ids: bool = Field(
        default=False, description="Ask for token ids and logprobs (vLLM's Chat Completions know how) and pass them on."
    )

    @field_validator("api_key_env")
    @classmethod
    def _is_set(cls, name: str | None) -> str | None:
        if name and not os.environ.get(name):
            raise ValueError(
                f"the environment variable {name} is not set; export it, or write null if no key is asked for"
            )
        return name

    @field_validator("token_ids")
    @classmethod
    def _by_chat(cls, wanted: bool, info: ValidationInfo) -> bool:
        if wanted and info.data.get("api") == "responses":
            raise ValueError("token ids come by Chat Completions only; write api: chat")
        return wanted


@asynccontextmanager
async def backend(context: ServiceContext) -> AsyncIterator[Backend]:
    options: Options = context.options
    async with make_client(options, os.environ.get(options.api_key_env or "")) as client:
        yield Backend(options, Upstream(options, client))


async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    answer: dict[str, Any] = await call.state.respond(request)
    return answer


app = model_server(respond=respond, options=Options, lifespan=backend)
