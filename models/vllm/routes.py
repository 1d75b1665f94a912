"""The application: the three APIs of every model server over this engine, the routes of a policy, and those for token ids.

vLLM's own application is not built, so its control routes (sleep, LoRA, profiler, collective RPC ...) do not exist.

vLLM's own handlers answer /tokenize, /detokenize and /inference/v1/generate (ids in, ids and logprobs out). The last one
always returns the logprobs of the sampled tokens, and `ng.policy_version` as in the other APIs. It refuses what would
make the server fetch something (`content_parts`) or read from another engine (`kv_transfer_params`), and streams.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.prometheus import get_prometheus_registry

from ngym import ServiceContext, model_server
from ngym.convert.request_validation import (
    COUNT,
    FLAG,
    LIST,
    NUMBER_OF,
    OBJECT,
    SAMPLING,
    TEXT,
    Check,
    known_fields,
    number,
    object_of,
    one_of,
)
from ngym.errors import BadRequest, ConfigError, NotReady, ServiceError, openai_refusal
from ngym.net.json_limits import ROW_BYTES
from ngym.schema import Json
from ngym.services.base.app import OBJECT as OBJECT_SCHEMA
from ngym.services.base.app import STRING, JsonResponse, add_route
from ngym.services.base.app import object_of as schema_of
from ngym.services.base.request_bodies import json_body, off_loop
from ngym.services.models.request_handler import Refusals
from ngym.weight_push.routes import Adapters, PushOptions, Route, WeightPush

from .engine import Engine
from .serving.chat import CUT_OFF, ChatHandler, Tokens, recorded, refusal, turn_ends
from .serving.loading_server import Keys
from .serving.media import register_media_connector
from .weights.adapter import Adapter, adapted_matrices
from .weights.transfer import Transfer


async def build_application(
    context: ServiceContext, arguments: Namespace, engine: Engine, push: PushOptions
) -> FastAPI:
    """The application over this engine. Raises ConfigError if the model generates no text or a parser does not fit."""
    register_media_connector()
    await engine.update_weight_version("0")
    ours = engine.checkpoint_shapes()
    matrices = adapted_matrices(engine.adapted_layers, ours or {})
    if matrices:
        engine.adapter = await Adapter.of(engine, matrices)
    vllm_state = State()
    try:
        await init_app_state(engine, vllm_state, arguments, await engine.get_supported_tasks())
    except (OSError, TypeError, ValueError) as error:  # for example, the tokenizer lacks tokens of the parser
        raise ConfigError(f"service {context.name!r}: {' '.join(str(error).split())[:600]}") from error
    if vllm_state.openai_serving_chat is None:
        raise ConfigError(
            f"service {context.name!r}: model {context.options.model!r}: vLLM cannot generate text with it"
        )
    chat = ChatHandler(vllm_state.openai_serving_chat, turn_ends(engine))
    app = model_server(
        respond=chat.respond, stream=chat.stream, count_tokens=chat.count, api="chat", options=type(context.options)
    )
    served = context.options.model_copy(update={"model": vllm_state.openai_serving_models.model_name()})
    app.state.context = replace(context, options=served)
    tokens = TokenRoutes(vllm_state)
    for path, handler, summary, answer in (
        ("/tokenize", tokens.tokenize, "The token ids of a text or a conversation", TOKENIZED),
        ("/detokenize", tokens.detokenize, "The text of token ids", schema_of({"prompt": STRING})),
        ("/inference/v1/generate", tokens.generate, "Sample from a prompt of token ids", GENERATED),
    ):
        add_route(app, "POST", path, handler, summary=summary, body=OBJECT_SCHEMA, answer=answer, most_bytes=ROW_BYTES)
    transfer = Transfer(engine, push.lease_s)
    adapters = Adapters(engine, context.options.lora_rank, matrices) if matrices else None
    weight_push = WeightPush(engine, ours, push, adapters=adapters, transfer=transfer, around=while_alive)
    _add_policy_routes(app, engine, weight_push)
    if keys := api_keys(arguments):
        app.add_middleware(Keys, keys=[*keys, *filter(None, [context.run_token])], service=context.name)
    gc.collect()
    gc.freeze()  # these objects stay alive: the collector need not scan them again
    return app


def api_keys(arguments: Namespace) -> list[str]:
    """The keys in the engine's options, as for `vllm serve`. Without any, the server is open to all clients."""
    return [key for key in (arguments.api_key or [envs.VLLM_API_KEY]) if key]


def _add_policy_routes(app: FastAPI, engine: Engine, push: WeightPush) -> None:
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
    push.add_to(app)


def while_alive(route: Route) -> Route:
    """The route, but a dead engine is a retryable error, because the server restarts with its engine."""

    async def guarded(request: Request) -> Response:
        try:
            return await route(request)
        except EngineDeadError:
            raise NotReady("vLLM's engine process died; the server restarts") from None

    return guarded


# Token ids

LOGPROBS = number(0, 20, whole=True)
# Without those that a chat handler applies.
_NOT_OF_TOKENS = ("beam_width", "chat_template_kwargs", "length_penalty", "priority")
_PARAMS: dict[str, Check] = {
    **{name: check for name, check in SAMPLING.items() if name not in _NOT_OF_TOKENS},
    **NUMBER_OF,
    "detokenize": FLAG,
    "logprobs": LOGPROBS,
    "max_tokens": COUNT,
    "n": one_of(1),
    "prompt_logprobs": LOGPROBS,
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
}
_GENERATE: dict[str, Check] = {
    "cache_salt": TEXT,
    "model": TEXT,
    "output_mode": one_of("tokens", "text"),
    "priority": number(-(2**31), 2**31, whole=True),
    "request_id": TEXT,
    "return_token_ids": FLAG,
    "sampling_params": object_of(**_PARAMS),
    "stream": one_of(False),
    "token_ids": LIST,
}
_TOKENIZE: dict[str, Check] = {
    "add_generation_prompt": FLAG,
    "add_special_tokens": FLAG,
    "chat_template_kwargs": OBJECT,
    "continue_final_message": FLAG,
    "messages": LIST,
    "model": TEXT,
    "prompt": TEXT,
    "return_token_strs": FLAG,
    "tools": LIST,
}
_DETOKENIZE: dict[str, Check] = {"model": TEXT, "tokens": LIST}
_INTEGER: Json = {"type": "integer"}
TOKENIZED = schema_of({"tokens": {"type": "array", "items": _INTEGER}, "count": _INTEGER, "max_model_len": _INTEGER})
GENERATED = schema_of({"choices": {"type": "array", "items": OBJECT_SCHEMA}, "ng": OBJECT_SCHEMA})


class TokenRoutes:
    """The handlers of the routes. state: vLLM's, after init_app_state."""

    def __init__(self, state: State) -> None:
        self._tokenization = state.serving_tokenization
        self._generation = state.serving_tokens
        self._models = state.openai_serving_models

    async def generate(self, request: Request) -> Response:
        """Sampled ids and logprobs for a prompt of ids."""
        with Refusals(openai_refusal):
            body = await self._body(request, _GENERATE)
            body.pop("request_id", None)  # a client must not choose the engine's key of the request
            given = {name: value for name, value in body.get("sampling_params", {}).items() if value is not None}
            body["sampling_params"] = {"logprobs": 0} | given
            parameters = await off_loop(request, _parse, GenerateRequest, body)
            tokens = Tokens()
            recorded.set(tokens)
            answer = await _as_json(self._generation.serve_tokens(parameters))
            if tokens.aborted:
                raise NotReady(CUT_OFF)
            trace = replace(tokens, experts=None).trace  # vLLM's choice has them
            return await off_loop(request, JsonResponse, answer | trace)

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text (`prompt`), or of a conversation as the chat template renders it (`messages`)."""
        with Refusals(openai_refusal):
            body = await self._body(request, _TOKENIZE)
            if ("prompt" in body) == ("messages" in body):
                raise BadRequest("send either 'prompt' or 'messages'")
            kind = TokenizeCompletionRequest if "prompt" in body else TokenizeChatRequest
            parameters = await off_loop(request, _parse, kind, body)
            return JsonResponse(await _as_json(self._tokenization.create_tokenize(parameters, request)))

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        with Refusals(openai_refusal):
            body = await self._body(request, _DETOKENIZE)
            parameters = await off_loop(request, _parse, DetokenizeRequest, body)
            return JsonResponse(await _as_json(self._tokenization.create_detokenize(parameters, request)))

    async def _body(self, request: Request, checks: dict[str, Check]) -> Json:
        body = known_fields(await json_body(request), checks, {})
        if body.get("model") not in self._models.lora_requests:
            body["model"] = self._models.model_name()  # as in chat: any other name means the policy
        return body


def _parse(kind: type[BaseModel], body: Json) -> Any:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        wrong = [f"field {'.'.join(map(str, one['loc']))!r}: {one['msg']}" for one in error.errors()]
        raise BadRequest("; ".join(wrong[:3])) from None
    except (VLLMValidationError, ValueError) as error:
        raise BadRequest(" ".join(str(error).split())[:600]) from None


async def _as_json(answering: Awaitable[Any]) -> Json:
    """The answer as JSON. Raises vLLM's error as ours."""
    try:
        answer = await answering
    except ServiceError:
        raise
    except Exception as error:  # vLLM's own table says whose fault it is
        raise refusal(create_error_response(error).error) from error
    if isinstance(answer, ErrorResponse):
        raise refusal(answer.error)
    document: Json = answer.model_dump(mode="json", exclude_none=True)
    return document
