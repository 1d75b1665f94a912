"""transformers: a Hugging Face model in this process, one answer at a time: for tests, laptops and debugging."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ngym import ModelCall, ServiceContext, model_server
from ngym.config.service_config import model_problem
from ngym.dialogue import Dialogue, Template, turn_ends
from ngym.errors import ConfigError
from ngym.services.models.server import ModelOptions

Json = dict[str, Any]


class Options(ModelOptions):
    model: str = Field(description="A Hugging Face folder (relative to the config file), or a name on the hub.")
    served_name: str | None = Field(
        default=None, description="The model's name in answers; default: the service's name."
    )
    device: str = Field(default="cpu", description="As torch names it.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Of the weights.")
    threads: int = Field(
        default=1, ge=1, description="torch's threads on a CPU; more than 1 make a tiny model much slower."
    )
    context: int | None = Field(default=None, ge=1, description="In tokens; default: the model's own.")
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model.")


@asynccontextmanager
async def dialogue(context: ServiceContext) -> AsyncIterator[Dialogue]:
    """Load the model, before the service is ready. Raises ConfigError if it cannot be loaded."""
    options: Options = context.options
    folder = _find(options.model, context.root, context.name)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from .engine import Engine  # torch and transformers take seconds to import

    try:
        engine = await asyncio.to_thread(Engine, folder, options)
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())[:300]
        raise ConfigError(f"service {context.name!r}: model {options.model!r} cannot be loaded: {told}") from None
    template = Template(engine.tokenizer, turn_ends(engine.tokenizer, engine.ends))
    served = options.served_name or context.name
    app.state.context = replace(context, options=options.model_copy(update={"model": served}))
    try:
        yield Dialogue(template, engine.generate, served, engine.context)
    finally:
        engine.close()


def _find(name: str, root: Path, service: str) -> str:
    if problem := model_problem(name, root):
        raise ConfigError(f"service {service!r}: model {name!r}: {problem}")
    folder = (root / name).resolve()
    return str(folder) if folder.is_dir() else name


async def respond(request: Json, call: ModelCall) -> Json:
    dialogue: Dialogue = call.state
    return await dialogue.completion(request, call.seen)


async def stream(request: Json, call: ModelCall) -> AsyncIterator[Json]:
    dialogue: Dialogue = call.state
    async with aclosing(dialogue.chunks(request, call.seen)) as chunks:
        async for chunk in chunks:
            yield chunk


async def count_tokens(request: Json, call: ModelCall) -> int:
    dialogue: Dialogue = call.state
    return await dialogue.count(request)


app = model_server(
    respond=respond, stream=stream, count_tokens=count_tokens, api="chat", options=Options, lifespan=dialogue
)
