"""model_server(): a model behind the APIs of OpenAI and Anthropic; the author writes `respond`, and optionally
`stream`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from ngym.convert import ReasoningStyle
from ngym.errors import BadRequest, ConfigError, NotFound, openai_refusal
from ngym.net.json_limits import ROW_BYTES
from ngym.schema import Json
from ngym.services.base.app import (
    OBJECT,
    STRING,
    JsonResponse,
    add_route,
    check_async,
    check_settings,
    context_of,
    object_of,
    service_app,
)
from ngym.services.base.middleware import MEDIA_TYPE, Admission
from ngym.services.base.options import ServiceContext, ServiceOptions
from ngym.services.models.api_dialects import Native, api_dialects
from ngym.services.models.request_handler import (
    ROLLOUT_ID,
    BackEnd,
    CountTokens,
    Refusals,
    RequestHandler,
    ResponseStore,
    rollout_of,
)
from ngym.services.models.token_capture import Captures, ModelCall, PriorCall, Respond, Stream

__all__ = [
    "ROLLOUT_ID",
    "ModelCall",
    "ModelLifespan",
    "ModelOptions",
    "Native",
    "PriorCall",
    "Respond",
    "Stream",
    "TrainableModelOptions",
    "model_server",
]  # fmt: skip

LIMIT = re.compile("[1-9][0-9]?|100")


class ModelOptions(ServiceOptions):
    """The options of every model server. Derive from it."""

    model: str = Field(default="model", description="The model's name in /v1/models.")
    any_model_name: bool = Field(
        default=True,
        description="Also answer requests that name another model. false: these get a 404, as from OpenAI and vLLM.",
    )
    captured_tokens: int = Field(
        default=100_000_000,
        ge=0,
        description="Limit of token ids kept for calls under /rollouts/{id}: 4 bytes each, 8 more for a sampled one.",
    )

    max_in_flight: int | None = Field(default=None, ge=1, description="Concurrent calls; more wait. null: no limit.")
    max_waiting: int = Field(default=4096, ge=0, description="Calls that may wait; further ones get 429.")

    @property
    def reasoning_style(self) -> ReasoningStyle:
        """The way in which a back end that speaks Chat Completions expresses reasoning."""
        return "field"


class TrainableModelOptions(ModelOptions):
    """The options of a model server that loads a checkpoint, whose weights a trainer replaces (`ngym/weight_push`)."""

    model_within_s: float = Field(
        default=0, ge=0, description="How long to wait for the folder, which must appear complete, by a rename."
    )
    push_token: str | None = Field(
        default=None,
        min_length=16,
        description="The token of weight pushes; default: ng_run's own, in .ngym/head.json.",
    )
    push_lease_s: float = Field(default=60.0, gt=0, description="A push ends when the pusher is silent for this long.")
    weights_root: Path | None = Field(
        default=None, description="A folder (relative to the config file) from which a push may name files; null: none."
    )


ModelLifespan = Callable[[ServiceContext], AbstractAsyncContextManager[Any]]


def model_server(
    *,
    respond: Respond,
    stream: Stream | None = None,
    count_tokens: CountTokens | None = None,
    api: Native = "responses",
    options: type[ModelOptions] = ModelOptions,
    lifespan: ModelLifespan | None = None,
) -> FastAPI:
    """A model as an application: `/v1/responses`, `/v1/chat/completions`, `/v1/messages`, `/v1/models`, also under
    `/rollouts/{id}`.

    Calls in any API are translated to the back end's native API and back. Token data is on the last
    item of a Response (or on the message of a Chat Completion) and its `ng.policy_version`. Calls under
    `/rollouts/{id}` whose answers have token data are captured: `GET /rollouts/{id}/segments`.

    Args:
        respond: `async (request, call)` -> a Response, or with `api="chat"` a Chat Completion; fields other than
            `output` or `choices` are added where they are missing. `request` is a checked request without nulls, without
            `stream` and without the token fields that a client sent back; those are in `call.seen`. A ServiceError
            becomes the answer. It is cancelled when the client hangs up.
        stream: `async generator (request, call)` of Responses events (they need no numbers; the last one is
            response.completed, incomplete or failed), or of chat chunks (token data next to the delta of the chunk with
            the finish_reason, usage with it or after it). Without it a stream is built from the finished answer.
        count_tokens: `async (request, call)` -> the number of tokens of the prompt; serves Anthropic's
            `/v1/messages/count_tokens`. `request` is as for `respond`.
        api: the back end's native API.
        options: the record of the stanza's own keys; derives from ModelOptions.
        lifespan: `async with lifespan(context) as state` around serving; calls find what it yields in `call.state`.

    Raises:
        SignatureError: a function is not async, or cannot be called with these arguments.
    """
    check_settings("model_server", options, ModelOptions, lifespan=lifespan)
    if api not in get_args(Native):
        raise ConfigError(f"model_server(api={api!r}): give {' or '.join(map(repr, get_args(Native)))}")
    check_async(respond, "respond(request, call)")
    if stream is not None:
        check_async(stream, "stream(request, call)", yields=True)
    if count_tokens is not None:
        check_async(count_tokens, "count_tokens(request, call)")

    @asynccontextmanager
    async def running(context: ServiceContext) -> AsyncIterator[None]:
        captures.begin(context.options.captured_tokens, at_new_address=context.at_new_address)
        admission.begin(context.options.max_in_flight, context.options.max_waiting)
        if lifespan is None:
            yield
            return
        async with lifespan(context) as state:
            app.state.model_state = state
            yield

    app = service_app("model", options=options, lifespan=running)
    app.state.model_state = None
    captures = app.state.captures = Captures(app.state.registry)
    store = app.state.store = ResponseStore()
    admission = Admission(app.state.registry)
    answering = RequestHandler(app.state, captures, store, admission, BackEnd(respond, stream, api))
    call = partial(add_route, app, "POST", answers=[JsonResponse.media_type, MEDIA_TYPE], most_bytes=ROW_BYTES)
    for prefix in ("", "/rollouts/{rollout_id}"):
        for dialect in api_dialects(api):
            path, body = prefix + dialect.path, _BODIES[dialect.name]
            call(path, answering.handler(dialect), summary=dialect.title, body=body)
            if dialect.name == "messages" and count_tokens is not None:
                counter, summary = answering.counter(dialect, count_tokens), "The number of tokens of a prompt"
                counted = object_of({"input_tokens": {"type": "integer"}})
                path = f"{path}/count_tokens"
                add_route(app, "POST", path, counter, summary=summary, body=body, answer=counted, most_bytes=ROW_BYTES)
        add_route(app, "GET", f"{prefix}/v1/models", _models, summary="The model's name", answer=_LIST)
        model_path = f"{prefix}/v1/models/{{name:path}}"
        add_route(app, "GET", model_path, _model, summary="The model, by its name", answer=_MODEL)
        stored = f"{prefix}/v1/responses/{{response_id}}"
        add_route(app, "GET", stored, _response, summary="A stored response", answer=_MODEL)
        add_route(app, "DELETE", stored, _delete_response, summary="Delete a stored response", answer=_MODEL)
        add_route(
            app, "GET", f"{stored}/input_items", _input_items, summary="The input of a stored response", answer=_LIST
        )
        add_route(app, "POST", f"{stored}/cancel", _cancel, summary="Refused: there are no background responses")
    add_route(app, "GET", "/rollouts/{rollout_id}/segments", _segments, summary="The rollout's captured calls")
    add_route(app, "DELETE", "/rollouts/{rollout_id}/segments", _forget, summary="Forget them", answers=())
    add_route(
        app, "GET", "/weights", _weights, summary="Policy version; this server's weights never change", answer=WEIGHTS
    )
    return app


WEIGHTS = object_of(
    {"policy_version": {"type": "integer"}, "transport": {"type": ["array", "object"]}, "updating": {"type": "boolean"}}
)
_MODEL = object_of({"id": STRING, "object": STRING})
_LIST = object_of({"object": STRING, "data": {"type": "array", "items": OBJECT}})

_MESSAGES: Json = {"type": "object", "required": ["messages"], "properties": {"messages": {"type": "array"}}}
_BODIES: dict[str, Json] = {
    "responses": {"type": "object", "required": ["input"], "properties": {"input": {"type": ["string", "array"]}}},
    "chat": _MESSAGES,
    "messages": _MESSAGES,
}


async def _models(request: Request) -> Response:
    return JsonResponse({"object": "list", "data": [_describe_model(request)]})


async def _model(request: Request) -> Response:
    model, name = _describe_model(request), request.path_params["name"]
    with Refusals(openai_refusal):
        if name not in (model["id"], context_of(request).name):  # the names that any_model_name: false accepts
            detail = f"there is no model {name!r} here; this server has {model['id']!r}"
            raise NotFound(detail, extra={"code": "model_not_found"})
    return JsonResponse(model)


def _describe_model(request: Request) -> Json:
    return {"id": context_of(request).options.model, "object": "model", "created": 0, "owned_by": "ngym"}


async def _response(request: Request) -> Response:
    with Refusals(openai_refusal):
        body = _store(request).response(request.path_params["response_id"])
    return Response(body, media_type="application/json")


async def _delete_response(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    with Refusals(openai_refusal):
        _store(request).forget(response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


async def _cancel(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    with Refusals(openai_refusal):
        _store(request).response(response_id)
        raise BadRequest(
            f"response {response_id!r} is finished: there are no background responses here; a call ends when its "
            "client hangs up",
            status=400,
        )


async def _input_items(request: Request) -> Response:
    """OpenAI's list: newest first unless `order=asc`, at most `limit` items, starting after `after`."""
    with Refusals(openai_refusal):
        items = _store(request).input_items_of(request.path_params["response_id"])
    if request.query_params.get("order", "desc") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "")
    first = ids.index(after) + 1 if after in ids else 0
    last = first + (int(limit) if LIMIT.fullmatch(limit) else 20)
    page = items[first:last]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JsonResponse({"object": "list", "data": page, **ends, "has_more": last < len(items)})


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.store
    return store


async def _segments(request: Request) -> Response:
    captures: Captures = request.app.state.captures
    rollout_id = str(rollout_of(request))
    segments = captures.segments(rollout_id)
    if segments is None:
        raise _unknown(rollout_id, captures)
    return JsonResponse(segments)


async def _forget(request: Request) -> Response:
    captures: Captures = request.app.state.captures
    rollout_id = str(rollout_of(request))
    if not captures.forget(rollout_id):
        raise _unknown(rollout_id, captures)
    return Response(status_code=204)


def _unknown(rollout_id: str, captures: Captures) -> NotFound:
    return NotFound(
        f"no captured call of rollout {rollout_id!r}: none was made under /rollouts/{rollout_id}/v1 with token data, "
        "or it was fetched and deleted, or dropped (ngym_captures_forgotten in /metrics)",
        extra={"kept_s": captures.kept_s(), "kept_id": captures.kept_id},
    )


async def _weights(request: Request) -> Response:
    return JsonResponse({"policy_version": 0, "transport": [], "updating": False})
