"""sglang: an SGLang server as the policy, by its native API: token ids, logprobs, weights from disk, sleep and wake."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ngym import ModelCall, ServiceContext, model_server
from ngym.convert import chat_chunks, chat_from_response, overflow_response
from ngym.dialogue import Dialogue, Template, turn_ends
from ngym.errors import ConfigError
from ngym.remote import ContextOverflow, RemoteOptions, Upstream, watched
from ngym.services.models.server import ModelOptions

from .engine import CAN, Engine, Weights, add_weights

Json = dict[str, Any]


class Options(RemoteOptions, ModelOptions):
    model: str = Field(default="model", description="The model's name in answers.")
    base_url: str = Field(default="http://127.0.0.1:30000", pattern="^https?://")
    tokenizer: str | None = Field(
        default=None,
        description="A folder (relative to the config file) or a name on the hub; default: the server's model_path.",
    )
    context: int | None = Field(default=None, ge=1, description="In tokens; default: the server's.")
    push_token: str | None = Field(
        default=None, min_length=16, description="Opens the weight routes; default: ng_run's own, in .ngym/head.json."
    )


@dataclass(frozen=True)
class Backend:
    dialogue: Dialogue
    weights: Weights
    model: str

    def nothing(self) -> Json:
        """An empty answer, for a conversation that does not fit the context."""
        return chat_from_response(overflow_response({}, response_id="resp_none", model=self.model))


@asynccontextmanager
async def backend(context: ServiceContext) -> AsyncIterator[Backend]:
    options: Options = context.options

    async def headers() -> dict[str, str]:
        return {"authorization": f"Bearer {options.key}"} if options.key else {}

    async with watched(Upstream(options, options.model, headers), app.state.registry) as upstream:
        engine = Engine(upstream, options.base_url.rstrip("/"))
        await engine.ask()
        tokenizer = _tokenizer(options.tokenizer, engine.model_path, context)
        limit = options.context or engine.context
        if limit is None:
            raise ConfigError(
                f"service {context.name!r}: {options.base_url} does not report its context length; set context: N"
            )
        template = Template(tokenizer, turn_ends(tokenizer, None))
        weights = Weights(engine, options.push_token or context.admin_token)
        yield Backend(Dialogue(template, engine.generate, options.model, limit, CAN), weights, options.model)


def _tokenizer(given: str | None, of_server: str | None, context: ServiceContext) -> Any:
    """The Hugging Face tokenizer. Raises ConfigError if it cannot be loaded or has no chat template."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("models/sglang needs transformers: pip install transformers") from None
    folder = context.root / given if given else None
    name = str(folder) if folder and folder.is_dir() else given or of_server
    if name is None:
        raise ConfigError(f"service {context.name!r}: the server does not report its model_path; set tokenizer: NAME")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())[:300]
        raise ConfigError(f"service {context.name!r}: tokenizer {name!r} cannot be loaded: {told}") from None
    if tokenizer.chat_template is None:
        raise ConfigError(f"service {context.name!r}: tokenizer {name!r} has no chat template")
    return tokenizer


async def respond(request: Json, call: ModelCall) -> Json:
    backend: Backend = call.state
    try:
        return await backend.dialogue.completion(request, call.seen)
    except ContextOverflow:
        return backend.nothing()


async def stream(request: Json, call: ModelCall) -> AsyncIterator[Json]:
    backend: Backend = call.state
    try:
        async with aclosing(backend.dialogue.chunks(request, call.seen)) as chunks:
            async for chunk in chunks:
                yield chunk
    except ContextOverflow:
        for chunk in chat_chunks(backend.nothing(), include_usage=True):
            yield chunk


async def count_tokens(request: Json, call: ModelCall) -> int:
    backend: Backend = call.state
    return await backend.dialogue.count(request)


app = model_server(
    respond=respond, stream=stream, count_tokens=count_tokens, api="chat", options=Options, lifespan=backend
)
add_weights(app)
