"""vllm: the policy on vLLM's engine and chat handler, behind ngym's APIs, on a CPU or a GPU."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngym import ServiceContext
from ngym.services.base.runner import serve_app

from .options import Options
from .serving.environment import (
    check_hub,
    computes_eagerly,
    find_model,
    prepare_environment,
    vllm_imports,
    wait_for_checkpoint,
)
from .serving.loading_server import LoadingServer

SHARED_FOLDER = Path(".ngym", "pushes")  # of the project's folder, which all nodes see
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def preload() -> None:
    """Import what `serve` imports, in the process from which `ng_run --warm` forks servers."""
    prepare_environment(local=True)
    with vllm_imports({}):
        from . import engine, routes

    del engine, routes


def is_preloaded_for(options: Mapping[str, Any], root: Path) -> bool:
    """Whether a server with these options would import with the same variables, which libraries read once."""
    local = bool(options.get("model_within_s")) or (root / str(options.get("model"))).is_dir()
    alike = computes_eagerly(options.get("engine") or {}) == computes_eagerly({})
    return local and alike and not options.get("node")


async def serve(context: ServiceContext) -> None:
    """Load the model while a placeholder server answers "not ready", then serve until SIGTERM. The engine process ends with us.

    A further node of a replica computes instead, and has no routes.

    Raises:
        ConfigError: an option is wrong, or vLLM refuses the model.
        ServiceError: the engine died while serving.
    """
    options: Options = context.options
    awaited = options.model_within_s > 0
    if not awaited:
        model = find_model(options.model, context.root, context.name)
        await asyncio.to_thread(check_hub, model, context.name)
    node = options.node
    prepare_environment(local=awaited or model.local, address=node.address if node else None)
    _die_on_stop_signals()
    if node is not None and node.rank > 0:
        with vllm_imports(options.engine):
            from .engine import compute

        if awaited:
            model = await wait_for_checkpoint(options.model, context.root, context.name, options.model_within_s)
        compute(context.name, options, model)
    with LoadingServer(context.sockets, context.name) as loading_server:
        loading_server.publish_status("loading: importing vLLM")
        from ngym.weight_push.routes import PushOptions
        from ngym.weight_push.stage import stage_in

        with vllm_imports(options.engine):
            from .engine import start_engine
            from .routes import api_keys, build_application

        if awaited:
            loading_server.publish_status(f"loading: waiting for {options.model}")
            model = await wait_for_checkpoint(options.model, context.root, context.name, options.model_within_s)
        if node is not None:
            stage_in(context.root / SHARED_FOLDER)
        arguments, engine = start_engine(context.name, options, model, loading_server.publish_status)
        try:
            loading_server.publish_status("loading: preparing the routes")
            root = (context.root / options.weights_root).resolve() if options.weights_root else None
            push = PushOptions(options.push_token or context.admin_token, root, options.push_lease_s)
            application = await build_application(context, arguments, engine, push)
            loading_server.stop()
            watch = asyncio.create_task(engine.raise_when_dead())
            openers = [*api_keys(arguments), *filter(None, [options.push_token])]
            await serve_app(application, context, keys=openers)
        finally:
            engine.shutdown(timeout=0)
    watch.cancel()
    if watch.done() and not watch.cancelled():
        watch.result()


def _die_on_stop_signals() -> None:
    """Use the default signal handlers, because imports block the event loop. The child processes end with us."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
