"""What every service has: health, readiness, metrics, problem documents; edge.py is what each request passes first."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ngym import correlation
from ngym.errors import BadRequest, ServiceError
from ngym.schema import Json, Kind
from ngym.services.edge import OF_A_ROLLOUT, Edge, Handler
from ngym.services.options import ServiceContext, ServiceOptions

log = logging.getLogger("ngym.services")

Lifespan = Callable[[ServiceContext], AbstractAsyncContextManager[None]]


class JsonResponse(Response):
    """JSON through orjson: one dump, no re-validation of what we made ourselves."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=_default)


class ProblemResponse(JsonResponse):
    media_type = "application/problem+json"


def service_app(kind: Kind, *, options: type[ServiceOptions], lifespan: Lifespan | None = None) -> FastAPI:
    """An application with the routes that every service has; `app.state.context` is there once it serves."""

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        context: ServiceContext = app.state.context
        try:
            if lifespan is None:
                yield
            else:
                async with lifespan(context):
                    yield
        finally:
            await context.peers.close()

    app = FastAPI(title=f"ngym {kind}", lifespan=run, redirect_slashes=False)
    app.state.kind = kind
    app.state.options_model = options
    app.state.not_ready = None
    registry = CollectorRegistry()
    app.state.registry = registry
    app.state.handlers = {}
    app.add_middleware(Edge, registry=registry, handlers=app.state.handlers)
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    add_route(app, "GET", "/", _health, summary="Liveness")
    add_route(app, "GET", "/health", _health, summary="Liveness")
    add_route(app, "GET", "/ready", _ready, summary="Readiness: 503 with a reason until it can serve")
    add_route(app, "GET", "/metrics", _metrics, summary="Prometheus metrics")
    return app


def add_route(
    app: FastAPI, method: str, path: str, handler: Handler, *, summary: str = "", body: dict[str, Any] | None = None
) -> None:
    """A route whose handler reads the raw request itself; `body` is its JSON Schema for /openapi.json."""
    extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}} if body else None
    if "{" not in path.removeprefix(OF_A_ROLLOUT):
        app.state.handlers[method, path] = handler
    app.add_api_route(
        path, handler, methods=[method], summary=summary or None, openapi_extra=extra, response_model=None
    )


async def json_body(request: Request) -> Json:
    """The request's JSON object. BadRequest names what is wrong with it."""
    raw = await request.body()
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body of {request.url.path} is no JSON: {error}", status=400) from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body of {request.url.path} must be a JSON object, not {type(value).__name__}")
    return value


def validated(model: type[BaseModel], value: Json, what: str) -> Any:
    """The value as a record; BadRequest with one line that names each wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = [
            {"field": ".".join(str(part) for part in item["loc"]), "message": item["msg"]}
            for item in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        text = "; ".join(f"field {p['field']!r}: {p['message']}" for p in problems[:8])
        raise BadRequest(f"{what}: {text}", extra={"errors": problems}) from None


def context_of(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.context
    return context


def _default(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON")


def _problem(request: Request, error: ServiceError) -> Response:
    context = getattr(request.app.state, "context", None)
    rollout_id = correlation.current.get().rollout_id
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    if error.status in (429, 503):
        headers = {"retry-after": str(max(1, round(error.retry_after_s)))}
    body = error.problem(context.name if context else request.app.state.kind, rollout_id)
    return ProblemResponse(body, status_code=error.status, headers=headers)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    if error.status >= 500:
        rollout = correlation.current.get().rollout_id
        log.warning(
            "%s %s [rollout %s]: %s", request.method, request.url.path, rollout, error.detail, exc_info=error.__cause__
        )
    return _problem(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return _problem(request, ServiceError(detail, status=error.status_code, retryable=False))


async def _bug(request: Request, error: Exception) -> Response:
    """An exception that nobody foresaw: the class is told, the traceback goes to the log (uvicorn prints it), never out."""
    return _problem(request, ServiceError(f"{request.url.path} failed: {type(error).__name__}", retryable=False))


async def _health(request: Request) -> Response:
    return JsonResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    reason = request.app.state.not_ready
    if reason:
        return JsonResponse({"status": "not ready", "reason": reason}, status_code=503)
    return JsonResponse({"status": "ready"})


async def _metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
