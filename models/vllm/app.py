"""models/vllm: the policy: vLLM's engine and chat handler behind our own APIs, on a CPU or a GPU."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ngym import ServiceContext
from ngym.services.base.runner import serve_app
from ngym.services.models.server import ModelOptions

from .doorkeeper import Doorkeeper
from .environment import find_model, prepare_environment, written

if TYPE_CHECKING:
    from .pushed import PushOptions

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Options(ModelOptions):
    model: str = Field(description="A Hugging Face folder (relative to the config file), or a name on the hub.")
    model_within_s: float = Field(
        default=0, ge=0, description="The folder may still be written for so long; it must come whole, by a rename."
    )
    served_name: str | None = Field(default=None, description="What requests call it; default: the service's name.")
    tool_call_parser: str | None = Field(
        default="auto", description="vLLM's, such as hermes; auto: that of the model's family; null: no tools."
    )
    reasoning_parser: str | None = Field(
        default="auto", description="vLLM's, such as qwen3; auto: that of the model's family; null: none."
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="Any argument of `vllm serve`, by its name there.")
    kv_cache_mb: int = Field(default=64, ge=1, description="CPU only: the KV cache; all of it is used at once.")
    threads: int = Field(default=1, ge=1, description="CPU only: more help a large model, and ruin a tiny one.")
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=512,
        description="Adapters of up to this rank can be pushed (transport lora); null: none.",
    )
    push_token: str | None = Field(
        default=None, min_length=16, description="Opens the weight push; default: ng_run's own, in .ngym/head.json."
    )
    push_lease_s: float = Field(default=60.0, gt=0, description="A pusher that is silent for so long is given up.")
    weights_root: Path | None = Field(
        default=None, description="A folder (relative to the config file) that a push may name files in; null: none."
    )


async def serve(context: ServiceContext) -> None:
    """Load the model while a doorkeeper answers "not ready", then serve until SIGTERM; the engine ends with us.

    Raises:
        ConfigError: an option is wrong, or vLLM refuses the model.
        ServiceError: the engine died while serving.
    """
    options: Options = context.options
    awaited = options.model_within_s > 0
    if not awaited:
        model = find_model(options.model, context.root, context.name)
    prepare_environment(options.threads, local=awaited or model.local)
    _die_at_once_when_told()
    with Doorkeeper(context.sockets, context.name) as doorkeeper:
        doorkeeper.say("loading: importing vLLM")
        from .engine import start_engine
        from .routes import api_keys, build_application

        if awaited:
            doorkeeper.say(f"loading: waiting for {options.model}")
            model = await written(options.model, context.root, context.name, options.model_within_s)
        arguments, engine = start_engine(context.name, options, model, doorkeeper.say)
        try:
            doorkeeper.say("loading: preparing the routes")
            application = await build_application(context, arguments, engine, _push_options(context))
            doorkeeper.leave()
            watch = asyncio.create_task(engine.raise_when_dead())
            openers = [*api_keys(arguments), *filter(None, [options.push_token])]
            await serve_app(application, context, keys=openers)
        finally:
            engine.shutdown(timeout=0)
    watch.cancel()
    if watch.done() and not watch.cancelled():
        watch.result()


def _push_options(context: ServiceContext) -> PushOptions:
    from .pushed import PushOptions

    options: Options = context.options
    root = (context.root / options.weights_root).resolve() if options.weights_root else None
    return PushOptions(options.push_token or context.admin_token, root, options.push_lease_s, options.lora_rank)


def _die_at_once_when_told() -> None:
    """While imports block the event loop nobody else would act on a signal; the engine and the doorkeeper follow us."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
