"""The application: the three APIs of every model server over this engine, and the routes of a policy.

vLLM's own application is not built, so its control routes (sleep, LoRA, profiler, collective RPC ...) do not exist.
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
from ngym.net.json_limits import CALL_BYTES, ROW_BYTES
from ngym.services.base.app import OBJECT, STRING, JsonResponse, add_route, object_of

from .engine import Engine
from .options import PushOptions
from .serving.chat import ChatHandler, turn_ends
from .serving.loading_server import Keys
from .serving.token_routes import GENERATED, TOKENIZED, TokenRoutes
from .weights.push_routes import BODIES, FILES, WeightPush
from .weights.staging import Adapter, beside


async def build_application(
    context: ServiceContext, arguments: Namespace, engine: Engine, push: PushOptions
) -> FastAPI:
    """The application over this engine. Raises ConfigError if the model generates no text or a parser does not fit."""
    await engine.update_weight_version("0")
    ours = engine.checkpoint_shapes()
    matrices = beside(engine.adapted_layers, ours or {})
    if matrices:
        engine.adapter = await Adapter.of(engine, matrices)
    vllms = State()
    try:
        await init_app_state(engine, vllms, arguments, await engine.get_supported_tasks())
    except (OSError, TypeError, ValueError) as error:  # for example, the tokenizer lacks tokens of the parser
        raise ConfigError(f"service {context.name!r}: {' '.join(str(error).split())[:600]}") from error
    if vllms.openai_serving_chat is None:
        raise ConfigError(
            f"service {context.name!r}: model {context.options.model!r}: vLLM cannot generate text with it"
        )
    chat = ChatHandler(vllms.openai_serving_chat, turn_ends(engine))
    app = model_server(
        respond=chat.respond, stream=chat.stream, count_tokens=chat.count, api="chat", options=type(context.options)
    )
    served = context.options.model_copy(update={"model": vllms.openai_serving_models.model_name()})
    app.state.context = replace(context, options=served)
    tokens = TokenRoutes(vllms)
    for path, handler, summary, answer in (
        ("/tokenize", tokens.tokenize, "The token ids of a text or a conversation", TOKENIZED),
        ("/detokenize", tokens.detokenize, "The text of token ids", object_of({"prompt": STRING})),
        ("/inference/v1/generate", tokens.generate, "Sample from a prompt of token ids", GENERATED),
    ):
        add_route(app, "POST", path, handler, summary=summary, body=OBJECT, answer=answer, most_bytes=ROW_BYTES)
    _add_a_policys(app, engine, WeightPush(engine, ours, matrices, push))
    if keys := api_keys(arguments):
        app.add_middleware(Keys, keys=[*keys, *filter(None, [context.run_token])], service=context.name)
    gc.collect()
    gc.freeze()  # these objects stay alive: the collector need not scan them again
    return app


def api_keys(arguments: Namespace) -> list[str]:
    """The keys in the engine's options, as for `vllm serve`. Without any, the server is open to all clients."""
    return [key for key in (arguments.api_key or [envs.VLLM_API_KEY]) if key]


def _add_a_policys(app: FastAPI, engine: Engine, push: WeightPush) -> None:
    async def ready(request: Request) -> Response:
        if engine.errored or engine.broken:
            raise NotReady(engine.broken or "vLLM's engine process died")
        if engine.asleep:
            raise NotReady("asleep: its GPU memory is released for a trainer; POST /weights/wake ends that")
        return JsonResponse({"status": "ready"})

    if get_prometheus_registry() is REGISTRY:  # then vLLM's metrics include those of the process
        app.state.registry.unregister(app.state.process_metrics)

    async def metrics(request: Request) -> Response:
        both = generate_latest(app.state.registry) + generate_latest(get_prometheus_registry())
        return Response(both, media_type=CONTENT_TYPE_LATEST)

    add_route(app, "GET", "/ready", ready, summary="Readiness")
    add_route(app, "GET", "/metrics", metrics, summary="Prometheus metrics, ours and vLLM's", answers=["text/plain"])
    for method, path, handler, summary in push.routes:
        most_bytes = None if path == FILES else CALL_BYTES  # a file is bounded by the announced size
        asked = BODIES.get(path) if method == "POST" else None
        body = asked.model_json_schema() if asked else None
        add_route(app, method, path, handler, summary=summary, body=body, most_bytes=most_bytes, finishes=True)
