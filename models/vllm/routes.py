"""The application: the three APIs of every model server over this engine, and a policy's own routes.

vLLM's own application is not built, so its control routes (sleep, LoRA, profiler, collective RPC, raw tokens ...) are
reachable by nobody.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from dataclasses import replace

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.v1.metrics.prometheus import get_prometheus_registry

from ngym import ServiceContext, model_server
from ngym.errors import ConfigError, NotReady
from ngym.services.base.app import JsonResponse, add_route
from ngym.services.base.dispatch import CALL_BYTES

from .engine import Engine
from .options import PushOptions
from .serving.chat import Chat
from .serving.loading_server import Keys
from .serving.tokens import turn_ends
from .weights.adapter import Adapter, beside
from .weights.push_routes import FILES, WeightPush


async def build_application(
    context: ServiceContext, arguments: Namespace, engine: Engine, push: PushOptions
) -> FastAPI:
    """The application over this engine. ConfigError for a model that generates no text, or with other parsers than these."""
    await engine.update_weight_version("0")
    ours = engine.checkpoint_shapes()
    matrices = beside(engine.adapted_layers, ours or {})
    if matrices:
        engine.adapter = await Adapter.of(engine, matrices)
    vllms = State()
    try:
        await init_app_state(engine, vllms, arguments, await engine.get_supported_tasks())
    except (OSError, TypeError, ValueError) as error:  # such as a parser whose words the tokenizer does not know
        raise ConfigError(f"service {context.name!r}: {' '.join(str(error).split())[:600]}") from error
    if vllms.openai_serving_chat is None:
        raise ConfigError(f"service {context.name!r}: model {context.options.model!r}: vLLM generates no text with it")
    chat = Chat(vllms.openai_serving_chat, turn_ends(engine))
    app = model_server(respond=chat.respond, stream=chat.stream, api="chat", options=type(context.options))
    served = context.options.model_copy(update={"model": vllms.openai_serving_models.model_name()})
    app.state.context = replace(context, options=served)
    _add_a_policys(app, engine, WeightPush(engine, ours, matrices, push))
    if keys := api_keys(arguments):
        app.add_middleware(Keys, keys=[*keys, *filter(None, [context.run_token])], service=context.name)
    gc.collect()
    gc.freeze()  # all that was made until now stays: to look through it again and again takes time
    return app


def api_keys(arguments: Namespace) -> list[str]:
    """Those that the engine's options name, as `vllm serve` has them; none: whoever reaches the server may use it."""
    return [key for key in (arguments.api_key or [envs.VLLM_API_KEY]) if key]


def _add_a_policys(app: FastAPI, engine: Engine, push: WeightPush) -> None:
    async def ready(request: Request) -> Response:
        if engine.errored or engine.broken:
            raise NotReady(engine.broken or "vLLM's engine process died")
        if engine.asleep:
            raise NotReady("asleep: its GPU memory is lent to a trainer; POST /weights/wake ends that")
        return JsonResponse({"status": "ready"})

    if get_prometheus_registry() is REGISTRY:  # which tells of the process as well
        app.state.registry.unregister(app.state.process_metrics)

    async def metrics(request: Request) -> Response:
        both = generate_latest(app.state.registry) + generate_latest(get_prometheus_registry())
        return Response(both, media_type=CONTENT_TYPE_LATEST)

    add_route(app, "GET", "/ready", ready, summary="Readiness")
    add_route(app, "GET", "/metrics", metrics, summary="Prometheus metrics, ours and vLLM's", answers=["text/plain"])
    for method, path, handler, summary in push.routes:
        most_bytes = None if path == FILES else CALL_BYTES  # a file is bounded by what was announced
        add_route(app, method, path, handler, summary=summary, most_bytes=most_bytes, finishes=True)
