"""What can be reached: an allow-list of vLLM's routes, and ours. Its control routes are not in this application."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from ngym import correlation
from ngym.errors import NotFound, NotReady, ServiceError
from ngym.schema import ROLLOUT_HEADER
from ngym.services.app import Handler, JsonResponse, ProblemResponse, add_route
from ngym.services.model import ROLLOUT_ID

from .adapter import Adapter, beside
from .engine import Engine
from .push import WeightPush
from .pushed import PushOptions
from .responses import Responses

# Everything else of vLLM's (sleep, LoRA, profiler, tokenizer, collective RPC, raw tokens ...) can be reached by nobody.
VLLM_ROUTES = {
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
}
UNDER_A_ROLLOUT = {"/v1/responses", "/v1/chat/completions", "/v1/messages", "/v1/models"}
ROLLOUTS = "/rollouts/"


async def build_application(service: str, arguments: Namespace, engine: Engine, push: PushOptions) -> ASGIApp:
    """vLLM's application over this engine, with its routes pruned and ours added."""
    await engine.update_weight_version("0")
    ours = engine.checkpoint_shapes()
    matrices = beside(engine.adapted_layers, ours or {})
    if matrices:
        engine.adapter = await Adapter.of(engine, matrices)
    tasks = await engine.get_supported_tasks()
    app = build_app(arguments, tasks, engine.model_config)
    await init_app_state(engine, app.state, arguments, tasks)
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM's error handlers set it; raise_when_dead does the work
    app.router.routes[:] = [route for route in app.router.routes if _names(route) & VLLM_ROUTES]
    app.state.handlers = {}  # add_route fills it; requests come through vLLM's middleware (its api_key) all the same
    _add_ours(service, app, engine, WeightPush(engine, ours, matrices, push))
    reachable = frozenset().union(VLLM_ROUTES, *map(_names, app.router.routes))
    return Edge(app, service, reachable)


def _names(route: BaseRoute) -> set[tuple[str, str]]:
    """The (method, path) pairs under which a route is found."""
    if isinstance(route, Mount):
        return {("GET", route.path)}
    return (
        {(method, route.path) for method in getattr(route, "methods", None) or ()} if hasattr(route, "path") else set()
    )


def _add_ours(service: str, app: FastAPI, engine: Engine, push: WeightPush) -> None:
    generation = engine.model_config.try_get_generation_config()
    ends = generation.get("eos_token_id") or []
    turn_ends = frozenset([*(ends if isinstance(ends, list) else [ends]), engine.get_tokenizer().eos_token_id])
    responses = Responses(app.state.openai_serving_responses, turn_ends)

    async def alive(request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        if engine.errored or engine.broken:
            raise NotReady(engine.broken or "vLLM's engine process died")
        return JsonResponse({"status": "ready"})

    def add(method: str, path: str, handler: Handler, summary: str, body: dict[str, str] | None = None) -> None:
        add_route(app, method, path, _telling_problems(service, handler), summary=summary, body=body)

    add("GET", "/", alive, "Liveness")
    add("GET", "/health", alive, "Liveness")
    add("GET", "/ready", ready, "Readiness")
    for method, path, handler, summary in push.routes:
        add(method, path, handler, summary)
    create_params = {"type": "object", "description": "OpenAI's Responses create params"}
    add("POST", "/v1/responses", responses.create, "One answer, with its tokens on the last output item", create_params)


def _telling_problems(service: str, handler: Handler) -> Handler:
    """Our errors as problem documents. Here, because vLLM's application has fixed its own error handlers by now."""

    async def told(request: Request) -> Response:
        try:
            return await handler(request)
        except ServiceError as error:
            return _problem(service, error)

    return told


def _problem(service: str, error: ServiceError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    problem = error.problem(service, correlation.current.get().rollout_id)
    return ProblemResponse(problem, status_code=error.status, headers=headers)


class Edge:
    """Outermost: refuses what is not on the list; a call under /rollouts/{id} is the same call with that id as its header."""

    def __init__(self, app: ASGIApp, service: str, reachable: frozenset[tuple[str, str]]) -> None:
        self._app = app
        self._service = service
        self._reachable = reachable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(ROLLOUTS):
            scope = _under_rollout(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        correlation.current.set(correlation.from_headers(headers))
        if (scope["method"], scope["path"]) in self._reachable:
            await self._app(scope, receive, send)
            return
        problem = _problem(self._service, NotFound(f"{scope['method']} {scope['path']}: no such route"))
        await problem(scope, receive, send)


def _under_rollout(scope: Scope) -> Scope:
    rollout_id, _, rest = scope["path"].removeprefix(ROLLOUTS).partition("/")
    path = "/" + rest
    if not ROLLOUT_ID.fullmatch(rollout_id) or path not in UNDER_A_ROLLOUT:
        return scope
    headers = [(name, value) for name, value in scope["headers"] if name != ROLLOUT_HEADER.encode()]
    headers.append((ROLLOUT_HEADER.encode(), rollout_id.encode()))
    return {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
