"""The application that every service shares: health, readiness, metrics and problem documents (middleware.py: its
middleware).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, ProcessCollector, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ngym.config.import_path import load_file
from ngym.did_you_mean import nearest
from ngym.errors import (
    MAX_NAME,
    BadRequest,
    ConfigError,
    FailureClass,
    NotReady,
    Problem,
    ServiceError,
    ToolError,
    bad_request,
    openai_refusal,
    shorten,
)
from ngym.net import request_context
from ngym.net.api_docs import api_docs_routes
from ngym.net.json_limits import CALL_BYTES
from ngym.schema import SESSION_HEADER, Json, Kind
from ngym.services.base.middleware import ROLLOUT_ROUTE, Handler, RequestMiddleware, RouteHandler, ServingState
from ngym.services.base.options import ServiceContext, ServiceOptions, context_from_environment

log = logging.getLogger("ngym.services")
UNREADABLE = ("64-bit range", "surrogates")  # from orjson's messages
FAILURES = frozenset(get_args(FailureClass))  # a peer may use its own classes
Lifespan = Callable[[ServiceContext], AbstractAsyncContextManager[None]]
OBJECT: Json = {"type": "object"}
_OF_CONTENT = frozenset({"content-length", "content-type"})
PACKAGE_ROOT = str(Path(__file__).parents[2])
_IN_PATH: Json = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


class SignatureError(ConfigError, TypeError):
    """A function of the author's that cannot be called: `app.py:12: look: what is wrong`."""


def signature_error(function: Callable[..., Any], what: str) -> SignatureError:
    line = line_of(function, whole=True)
    name = getattr(function, "__name__", repr(function))
    return SignatureError(f"{line}: {name}: {what}" if line else f"{name}: {what}")


def line_of(function: Callable[..., Any], *, whole: bool = False) -> str:
    """`app.py:12`, where the function begins; "" if it has no Python code. whole: with the file's folder."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return f"{code.co_filename if whole else Path(code.co_filename).name}:{code.co_firstlineno}"


def check_async(function: Any, form: str, *, yields: bool = False) -> None:
    """Check a function of the author's.

    Args:
        form: its usual name and the positional arguments that it is called with: `respond(request, call)`.
        yields: it is an async generator; otherwise it is awaited.

    Raises:
        SignatureError: it is not of this kind, or takes other arguments.
    """
    called = function if inspect.isroutine(function) or isinstance(function, partial) else type(function).__call__
    is_kind = inspect.isasyncgenfunction if yields else inspect.iscoroutinefunction
    expected = f"write `async def {form}`" + (" that yields" if yields else "")
    if not callable(function) or not is_kind(called):
        raise signature_error(function, expected)
    try:
        inspect.signature(function).bind(*form.partition("(")[2].split(", "))
    except TypeError as error:
        raise signature_error(function, f"{expected}; with these arguments: {error}") from None


def check_settings(maker: str, options: Any, base: type[ServiceOptions], **functions: Any) -> None:
    """Check arguments of gym_server, agent or model_server.

    Args:
        options: the author's class of options; it derives from `base`.
        functions: by their names; each is None or can be called.

    Raises:
        ConfigError: an argument is something else.
    """
    if not isinstance(options, type) or not issubclass(options, base):
        raise ConfigError(f"{maker}(options={options!r}): give a class that derives from {base.__name__}")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{maker}({name}={function!r}): give a function")


def load(file: Path) -> ModuleType:
    """The service in this file. Raises ConfigError: the file cannot be imported, or defines no service."""
    module = load_file(file)
    if not hasattr(module, "app") and not hasattr(module, "serve"):
        del sys.modules[module.__name__]
        raise ConfigError(
            f"{file}: defines neither `app = gym_server(...)` (or agent, model_server) nor `async def serve(context)`"
        )
    app = getattr(module, "app", None)
    if not hasattr(module, "serve") and not hasattr(getattr(app, "state", None), "options_model"):
        del sys.modules[module.__name__]
        raise ConfigError(f"{file}: `app` is a {type(app).__name__}; make it with gym_server, agent or model_server")
    return module


class JsonResponse(Response):
    """JSON through orjson: one dump, without validating our own data again.

    Numbers and texts that JSON readers reject, which a model may have written, are replaced instead of raising an
    error.
    """

    media_type = "application/json"
    long_integers: Literal["text", "number"] = "text"  # those beyond 64 bits, which most JSON readers round or refuse

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        if headers and not _OF_CONTENT.isdisjoint(map(str.lower, headers)):
            super().init_headers(headers)
            return
        kind, size = self.media_type.encode("latin-1"), b"%d" % len(self.body)
        self.raw_headers = [(b"content-length", size), (b"content-type", kind)]
        for name, value in headers.items() if headers else ():
            self.raw_headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))

    def render(self, content: Any) -> bytes:
        try:
            return _dump(content)
        except TypeError as error:
            if not any(reason in str(error) for reason in UNREADABLE):
                raise
        return _dump(_readable(content, self.long_integers))


def _dump(content: Any) -> bytes:
    try:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY, default=_default)
    except TypeError as error:  # orjson reads 1024 levels but writes 254; input is often part of the answer
        if "Recursion limit" not in str(error):
            raise
        raise BadRequest("the JSON is nested deeper than 250 levels") from None


def _readable(value: Any, long_integers: Literal["text", "number"]) -> Any:
    """The same value with integers beyond 64 bits in this form, and lone surrogates replaced by a mark."""
    match value:
        case BaseModel():
            return _readable(value.model_dump(), long_integers)
        case dict():
            return {_readable(key, "text"): _readable(member, long_integers) for key, member in value.items()}
        case list() | tuple():
            return [_readable(member, long_integers) for member in value]
        case str():
            return value.encode("utf-8", "replace").decode()
        case int() if not -(1 << 63) <= value < 1 << 64:
            return str(value) if long_integers == "text" else orjson.Fragment(str(value))
    return value


class ProblemResponse(JsonResponse):
    media_type = "application/problem+json"


def service_app(kind: Kind, *, options: type[ServiceOptions], lifespan: Lifespan | None = None) -> FastAPI:
    """An application with the routes that every service has; `app.state.context` is set once it serves.

    ngym's runner sets the context. Elsewhere (`uvicorn app:app`, a test client) the lifespan makes it, from defaults and
    the environment; a server that runs no lifespan begins it with the first request (`ensure_started`).
    """

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        is_own = getattr(app.state, "context", None) is None
        if is_own:
            app.state.context = context_from_environment(app.state.default_name, kind, options)
        context: ServiceContext = app.state.context
        app.title, app.openapi_schema = context.name, None
        try:
            async with AsyncExitStack() as stack:
                if lifespan is not None:
                    await stack.enter_async_context(lifespan(context))
                mib = getattr(context.options, "max_body_mib", None)
                serving.is_on, serving.most_bytes = True, mib << 20 if mib else None
                yield
        finally:
            serving.is_on = False
            if is_own:
                app.state.context = None
            await context.peers.close()

    name = _author()
    serving = ServingState()
    app = _Application(title=name, lifespan=run, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.router.routes += api_docs_routes(lambda: app.title)
    app.state.default_name = name
    app.state.serving = serving
    app.state.starting = None
    app.state.kind = kind
    app.state.options_model = options
    app.state.not_ready = None
    registry = CollectorRegistry()
    app.state.registry = registry
    app.state.errors = Counter(
        "ngym_errors", "Answers that are problems, by failure class", ["class"], registry=registry
    )
    app.state.process_metrics = ProcessCollector(registry=registry)
    app.state.served = {}
    app.add_middleware(
        RequestMiddleware, registry=registry, served=app.state.served, serving=serving, start=ensure_started
    )
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(MemoryError, _no_memory)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _bug)
    alive = object_of({"status": STRING})
    add_route(app, "GET", "/", _health, summary="Liveness", answer=alive)
    add_route(app, "GET", "/health", _health, summary="Liveness", answer=alive)
    add_route(app, "GET", "/ready", _ready, summary="Readiness: 503 with a reason until it can serve", answer=alive)
    add_route(app, "GET", "/metrics", _metrics, summary="Prometheus metrics", answers=["text/plain"])
    return app


class _Application(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As FastAPI's and Starlette's, in one call."""
        if self.root_path:
            scope["root_path"] = self.root_path
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        await self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """As FastAPI's; without a middleware of the author, RequestMiddleware is the outermost one and calls the one
        for errors itself.
        """
        outermost = super().build_middleware_stack()
        if not (isinstance(outermost, ServerErrorMiddleware) and isinstance(outermost.app, RequestMiddleware)):
            return outermost
        handler = outermost.handler

        def errors(error: Exception | None) -> ASGIApp:
            async def raises(scope: Scope, receive: Receive, send: Send) -> None:
                nonlocal error
                raised, error = error, None  # it refers to this frame as soon as it is raised
                assert raised is not None
                try:
                    raise raised
                finally:
                    del raised

            return ServerErrorMiddleware(raises, handler, self.debug)

        outermost.app.errors = errors
        return outermost.app

    def openapi(self) -> dict[str, Any]:
        """The document, with the token of a locked run as a security scheme: /docs then asks for it."""
        is_new = self.openapi_schema is None
        document = super().openapi()
        context = getattr(self.state, "context", None)
        if is_new and context is not None and context.run_token:
            document.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
            document["paths"]["/health"]["get"]["security"] = []
        return document


def _author() -> str:
    """The name of the folder whose app.py creates the service, or of another file that does."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_ROOT):
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    return file.resolve().parent.name if file.name == "app.py" else file.stem


async def ensure_started(app: FastAPI) -> None:
    """Run the lifespan of an application whose server runs none, such as httpx.ASGITransport.

    It ends with the event loop, which cancels its tasks.
    """
    started: asyncio.Future[None] | None = app.state.starting
    loop = asyncio.get_running_loop()
    if started is None or started.done() or started.get_loop() is not loop:
        started = app.state.starting = loop.create_future()
        # app.state keeps the task alive: asyncio only holds weak references to tasks
        app.state.lifespan = loop.create_task(_run_lifespan(app, started))
    await asyncio.shield(started)


async def _run_lifespan(app: FastAPI, started: asyncio.Future[None]) -> None:
    try:
        async with app.router.lifespan_context(app):
            started.set_result(None)
            await asyncio.Event().wait()
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


STRING: Json = {"type": "string"}


def object_of(properties: Json, *optional: str, **more: Any) -> Json:
    """The JSON Schema of an object. optional: properties that may be missing."""
    return {
        "type": "object",
        "properties": properties,
        "required": [n for n in properties if n not in optional],
        **more,
    }


def add_route(
    app: FastAPI,
    method: str,
    path: str,
    handler: Handler,
    *,
    summary: str = "",
    body: dict[str, Any] | None = None,
    answers: Sequence[str] = (JsonResponse.media_type,),
    answer: Json = OBJECT,
    most_bytes: int | None = CALL_BYTES,
    finishes: bool = False,
) -> None:
    """A route whose handler reads the raw request itself.

    Args:
        body: the JSON Schema of the body, for /openapi.json.
        answers: the media types of the response; empty: status 204.
        answer: the JSON Schema of a JSON response.
        most_bytes, finishes: as in `RouteHandler`; a path with other parameters than a rollout's id has neither.
    """
    names = re.findall(r"{(\w+)", path)
    here = f"#/paths/{path.replace('~', '~0').replace('/', '~1')}/{method.lower()}"
    json_answer = _with_root_references(answer, f"{here}/responses/200/content/application~1json/schema")
    extra: Json = {"parameters": [{**_IN_PATH, "name": name} for name in names]} if names else {}
    if body:
        schema = _with_root_references(body, f"{here}/requestBody/content/application~1json/schema")
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    content = {kind: {"schema": json_answer if kind == JsonResponse.media_type else STRING} for kind in answers}
    if "{" not in path.removeprefix(ROLLOUT_ROUTE):
        app.state.served[method, path] = RouteHandler(handler, most_bytes, finishes)
    app.add_api_route(
        path,
        handler,
        methods=[method],
        summary=summary or None,
        openapi_extra=extra,
        response_class=Response,
        response_model=None,
        status_code=200 if answers else 204,
        responses={**({200: {"content": content}} if answers else {}), "default": _PROBLEM},
    )


def _with_root_references(schema: Any, place: str) -> Any:
    """The schema with its references relative to the document's root. place: the schema's JSON pointer in the document."""
    if isinstance(schema, list):
        return [_with_root_references(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rooted = {key: _with_root_references(value, place) for key, value in schema.items()}
    if isinstance(target := schema.get("$ref"), str) and target.startswith("#/$defs/"):
        rooted["$ref"] = place + target.removeprefix("#")
    return rooted


_PROBLEM: Json = {
    "description": "What went wrong, as a problem document (RFC 9457)",
    "content": {
        ProblemResponse.media_type: {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status", "detail"],
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                    "retryable": {"type": "boolean"},
                },
            }
        }
    },
}


def context_of(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.context
    return context


def _default(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON")


def _problem(request: Request, error: ServiceError) -> Response:
    for_sdks = "/v1/" in request.url.path or error.status == HTTPStatus.NOT_FOUND  # a base_url without /v1
    context = getattr(request.app.state, "context", None)
    rollout_id = request_context.current.get().rollout_id
    request.app.state.errors.labels(error.failure if error.failure in FAILURES else type(error).__name__).inc()
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    if error.status in (429, 503):
        headers = {"retry-after": str(max(1, round(error.retry_after_s)))}
    body = error.problem(context.name if context else request.app.state.kind, rollout_id)
    if isinstance(error, ToolError):  # distinguishes it from a proxy's answer, which lacks the session
        body |= {"for_the_model": True, "session": request.headers.get(SESSION_HEADER)}
    if context:
        body["detail"] = context.redact.text(body["detail"])  # an exception's message may quote its arguments
    if for_sdks and "error" not in body:
        body["error"] = openai_refusal(error)["error"] | {"message": body["detail"]}
    return ProblemResponse(body, status_code=error.status, headers=headers)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    if error.status >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, error.detail, exc_info=error.__cause__)
    return _problem(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shorten(request.url.path, MAX_NAME)
    failure = ServiceError(
        f"{request.method} {path}: {error.detail}{_route_hint(request, error)}", status=error.status_code
    )
    response = _problem(request, failure)
    response.headers.update(error.headers or {})  # the allowed methods
    return response


def _route_hint(request: Request, error: HTTPException) -> str:
    """A hint: ` (did you mean '/verify'?)` for an unknown path, ` (POST)` for a wrong method."""
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow")
        return f" ({allowed})" if allowed else ""
    near = nearest(request.url.path, {route.path for route in request.app.routes if isinstance(route, Route)})
    return f" (did you mean {near!r}?)" if near else ""


async def _invalid(request: Request, error: Exception) -> Response:
    """Validation errors of a route that an author wrote with FastAPI's own decorators."""
    assert isinstance(error, RequestValidationError)
    wrong = (Problem(".".join(map(str, one["loc"])), str(one["msg"])) for one in error.errors())
    return _problem(request, bad_request(wrong, shorten(request.url.path, MAX_NAME)))


async def _no_memory(request: Request, error: Exception) -> Response:
    path = shorten(request.url.path, MAX_NAME)
    return _problem(request, NotReady(f"{path}: there is not enough memory for this request now"))


async def _bug(request: Request, error: Exception) -> Response:
    """An unexpected exception: the response has only its class; the traceback goes to the log (uvicorn prints it)."""
    response = _problem(request, ServiceError(f"{request.url.path} failed: {type(error).__name__}", retryable=False))
    response.headers["connection"] = "close"  # uvicorn closes it: no client may send another request on it
    return response


async def _health(request: Request) -> Response:
    return JsonResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    reason = request.app.state.not_ready
    if reason:
        return JsonResponse({"status": "not ready", "reason": reason}, status_code=503)
    return JsonResponse({"status": "ready"})


async def _metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
