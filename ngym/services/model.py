"""model_server(): a model behind OpenAI's APIs, as an application; the author writes one function, `respond`."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.datastructures import Headers
from starlette.responses import Response

from ngym import correlation
from ngym.convert import (
    SSE_DONE,
    chat_chunks,
    chat_from_response,
    check_chat_request,
    check_create_params,
    create_params,
    response_events,
    sse,
)
from ngym.errors import BadRequest, ConfigError, ServiceError, boundary
from ngym.schema import Json
from ngym.services.app import JsonResponse, add_route, context_of, json_body, service_app
from ngym.services.options import ServiceContext, ServiceOptions

ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


class ModelOptions(ServiceOptions):
    """What every model server has. Derive from it."""

    model: str = Field(default="model", description="The name of the model, as /v1/models lists it.")


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What belongs to one call beside the request: whose rollout it is, and what the service has.

    state is what the service's lifespan yielded.
    """

    options: Any
    state: Any
    rollout_id: str | None
    headers: Headers


Respond = Callable[[Json, ModelCall], Awaitable[Json]]
ModelLifespan = Callable[[ServiceContext], AbstractAsyncContextManager[Any]]


def model_server(
    *, respond: Respond, options: type[ModelOptions] = ModelOptions, lifespan: ModelLifespan | None = None
) -> FastAPI:
    """A model as an application: `/v1/responses`, `/v1/chat/completions` and `/v1/models`, also under `/rollouts/{id}`.

    With `stream: true` a client gets every event that the specification asks for, made from the finished answer:
    nothing is sent before the model is done, and an error is still a plain problem document.

    Args:
        respond: `async (request, call)` -> a Response (OpenAI's JSON; `ngym.convert.new_response` makes one). `request`
            is a checked Responses create params object without nulls and without `stream`. A ServiceError that it
            raises becomes the answer.
        options: the record of the stanza's own keys; derives from ModelOptions.
        lifespan: `async with lifespan(context) as state` around serving; calls find what it yields in `call.state`.
    """
    if not inspect.iscoroutinefunction(respond):
        raise ConfigError(f"model_server: respond must be `async def respond(request, call)`, not {respond!r}")

    @asynccontextmanager
    async def running(context: ServiceContext) -> AsyncIterator[None]:
        if lifespan is None:
            yield
            return
        async with lifespan(context) as state:
            app.state.model_state = state
            yield

    app = service_app("model", options=options, lifespan=running)
    app.state.model_state = None

    async def answer(request: Request, params: Json) -> Json:
        call = ModelCall(context_of(request).options, app.state.model_state, _rollout_id(request), request.headers)
        with boundary("model_error", "the model failed"):
            return await respond(params, call)

    async def responses(request: Request) -> Response:
        with _openai_errors():
            params = check_create_params(await json_body(request))
            stream, _ = params.pop("stream", False), params.pop("stream_options", None)
            response = await answer(request, params)
        return _events(response_events(response)) if stream else JsonResponse(response)

    async def chat(request: Request) -> Response:
        with _openai_errors():
            body = check_chat_request(await json_body(request))
            completion = chat_from_response(await answer(request, create_params(body)))
        if not body.get("stream"):
            return JsonResponse(completion)
        include_usage = bool(body.get("stream_options", {}).get("include_usage"))
        return _events(chat_chunks(completion, include_usage=include_usage))

    async def models(request: Request) -> Response:
        model = {"id": context_of(request).options.model, "object": "model", "created": 0, "owned_by": "ngym"}
        return JsonResponse({"object": "list", "data": [model]})

    for prefix in ("", "/rollouts/{rollout_id}"):
        add_route(app, "POST", f"{prefix}/v1/responses", responses, summary="OpenAI Responses", body=_RESPONSES)
        add_route(app, "POST", f"{prefix}/v1/chat/completions", chat, summary="OpenAI Chat Completions", body=_CHAT)
        add_route(app, "GET", f"{prefix}/v1/models", models, summary="The model's name")
    add_route(app, "GET", "/weights", _weights, summary="Policy version; this server's weights never change")
    return app


_RESPONSES: Json = {"type": "object", "required": ["input"], "properties": {"input": {"type": ["string", "array"]}}}
_CHAT: Json = {"type": "object", "required": ["messages"], "properties": {"messages": {"type": "array"}}}


@contextmanager
def _openai_errors() -> Iterator[None]:
    """A problem document that also says `error.message`: OpenAI's clients show nothing else of it."""
    try:
        yield
    except ServiceError as error:
        wrong = error.extra.get("errors") or [{"field": None}]
        told = {"message": error.detail, "type": error.title, "param": wrong[0]["field"], "code": error.failure}
        error.extra = {**error.extra, "error": told}
        raise


def _rollout_id(request: Request) -> str | None:
    """The rollout that a call belongs to: from its path, else from its headers; it goes on to every further hop."""
    here = correlation.current.get()
    in_path = request.path_params.get("rollout_id")
    if in_path is None:
        return here.rollout_id
    if not ROLLOUT_ID.fullmatch(in_path):
        raise BadRequest(
            "the rollout id in the path must be 1 to 200 of A-Z a-z 0-9 . _ : - and begin with one of A-Z a-z 0-9"
        )
    correlation.current.set(here._replace(rollout_id=in_path))
    return str(in_path)


def _events(events: Iterable[Json]) -> Response:
    """A stream that is already whole, in one piece: chunks would only cost."""
    body = b"".join(map(sse, events)) + SSE_DONE
    return Response(body, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _weights(request: Request) -> Response:
    return JsonResponse({"policy_version": 0, "transport": [], "updating": False})
