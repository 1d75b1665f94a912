"""The web application of ng_view: read-only, and only the files that were opened. Refuses pages of another origin.

Bare Starlette: FastAPI's import alone takes longer than a page may take to open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym.errors import NgymError, NotFound, ServiceError, Unauthorized, UsageError
from ngym.net.auth import Lock, Visitors, refuse
from ngym.schema import Json
from ngym.view import training
from ngym.view.compare import compare
from ngym.view.index_store import row_seq
from ngym.view.rows import MOST_ROWS, Rows
from ngym.view.runs import Opened

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
LOCKED = "this viewer is locked: open the address that ng_view printed; programs send 'Authorization: Bearer TOKEN'"
_ADDED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
DEFAULT_ROWS = 200
SERVICE = "the viewer"
Answer = TypeVar("Answer")
Handler = Callable[[Request], Awaitable[Response]]


class Guard:
    """An ASGI application behind the checks. The page itself has no secrets and is open: it brings the token to /api.

    Args:
        hosts: what a Host header may name beside loopback (`ngym.net.auth.Visitors`). None: anything, from any page.
        lock: what opens /api; None: it is open.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, lock: Lock | None) -> None:
        self._app = app
        self._visitors = None if hosts is None else Visitors(hosts)
        self._lock = lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_ADDED]
            await send(message)

        problem = self._problem(scope)
        if problem is None:
            await self._app(scope, receive, guarded)
            return
        await refuse(guarded, problem, SERVICE)

    def _problem(self, scope: Scope) -> ServiceError | None:
        if self._visitors is not None and (problem := self._visitors.problem(scope)):
            return problem
        if scope["path"].startswith("/api") and self._lock is not None and not self._lock.opens(scope["headers"]):
            return Unauthorized(LOCKED)
        return None


STATIC = Path(__file__).parent / "static"


class Wrong(ServiceError):
    """A parameter of the address says nothing."""

    status = 400
    title = "The address is not valid"


def application(shown: Opened, *, hosts: frozenset[str] | None, lock: Lock | None, title: str = "ngym") -> Starlette:
    """
    Args:
        hosts: what a request's Host header may say; None: anything.
        lock: what opens /api; None: it is open.
    """
    api = Api(shown, title)
    routes = [
        Route("/", _static),
        Route("/static/{name}", _static),
        Route("/api/runs", api.runs),
        Route("/api/runs/{id}/rows", api.rows),
        Route("/api/runs/{id}/rows/{row}", api.row),
        Route("/api/runs/{id}/rows/{row}/tokens", api.tokens),
        Route("/api/runs/{id}/groups/{task}", api.group),
        Route("/api/runs/{id}/tasks", api.tasks),
        Route("/api/runs/{id}/tasks/{task}", api.task),
        Route("/api/runs/{id}/stats", api.stats),
        Route("/api/compare", api.compare),
        Route("/api/training", api.training),
        Route("/api/training/{id}/metrics", api.training_metrics),
        Route("/api/training/{id}/config", api.training_config),
        Route("/api/training/{id}/samples", api.training_samples),
    ]
    handlers: dict[Any, Any] = {NgymError: _refused, HTTPException: _no_route, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(Guard, hosts=hosts, lock=lock)
    return app


class Api:
    """The answers under /api. What reads files or the index does so in a thread: the event loop never waits for a disk."""

    def __init__(self, shown: Opened, title: str) -> None:
        self._shown = shown
        self._title = title

    async def runs(self, request: Request) -> Response:
        return _json({"title": self._title, "runs": await asyncio.to_thread(self._shown.as_json)})

    async def rows(self, request: Request) -> Response:
        run = self._shown.rollout_run(request.path_params["id"])
        page = await asyncio.to_thread(run.rows.page, *_table(request))
        return _json(page.as_json())

    async def row(self, request: Request) -> Response:
        run = self._shown.rollout_run(request.path_params["id"])
        line = await asyncio.to_thread(run.index.line, row_seq(request.path_params["row"]))
        return Response(line, media_type="application/json")

    async def tokens(self, request: Request) -> Response:
        run = self._shown.rollout_run(request.path_params["id"])
        return _json(await asyncio.to_thread(run.tokens, row_seq(request.path_params["row"])))

    async def group(self, request: Request) -> Response:
        return await self._with_task(request, Rows.group)

    async def task(self, request: Request) -> Response:
        return await self._with_task(request, Rows.task)

    async def _with_task(self, request: Request, read: Callable[[Rows, int], list[Json]]) -> Response:
        run = self._shown.rollout_run(request.path_params["id"])
        task = _whole("task", request.path_params["task"])
        rows = await asyncio.to_thread(read, run.rows, task)
        if not rows:
            raise NotFound(f"there is no task {task} in {run.name}")
        return _json({"task": task, "rows": rows})

    async def tasks(self, request: Request) -> Response:
        run = self._shown.rollout_run(request.path_params["id"])
        page = await asyncio.to_thread(run.rows.tasks, *_table(request))
        return _json(page.as_json())

    async def stats(self, request: Request) -> Response:
        run = self._shown.rollout_run(request.path_params["id"])
        return _json(await asyncio.to_thread(run.stats.of, request.query_params.get("q", "")))

    async def compare(self, request: Request) -> Response:
        a, b = (self._shown.rollout_run(request.query_params.get(name, "")) for name in ("a", "b"))
        return _json(await asyncio.to_thread(compare, a.rows, b.rows, *_table(request)))

    async def training(self, request: Request) -> Response:
        return _json({"runs": await asyncio.to_thread(self._shown.training_as_json)})

    async def training_metrics(self, request: Request) -> Response:
        run = self._shown.training_run(request.path_params["id"])
        after = request.query_params.get("after", training.BEGINNING)
        return _json(await asyncio.to_thread(training.metrics, run, after))

    async def training_config(self, request: Request) -> Response:
        run = self._shown.training_run(request.path_params["id"])
        return _json(await asyncio.to_thread(training.config, run))

    async def training_samples(self, request: Request) -> Response:
        run = self._shown.training_run(request.path_params["id"])
        found = await asyncio.to_thread(training.samples, run)
        files = {"file": self._shown.id_of(run.rollouts), "held_out": self._shown.id_of(run.held_out)}
        return _json({**found, **files})


async def _static(request: Request) -> Response:
    return _file(request.path_params.get("name", "index.html"))


def _file(name: str) -> Response:
    """One of the files that lie in the folder; a path from the client is never opened."""
    found = next((path for path in STATIC.iterdir() if path.name == name and path.suffix in KINDS), None)
    if found is None:
        raise NotFound(f"there is no page file {name!r:.60}")
    return Response(found.read_bytes(), media_type=KINDS[found.suffix])


def _table(request: Request) -> tuple[str, str, int, int]:
    """q, sort, offset, limit."""
    asked = request.query_params
    limit = _whole("limit", asked.get("limit", str(DEFAULT_ROWS)))
    if limit > MOST_ROWS:
        raise Wrong(f"limit={limit}: a page has at most {MOST_ROWS:,} rows; ask for the next with offset")
    return asked.get("q", ""), asked.get("sort", ""), _whole("offset", asked.get("offset", "0")), limit


def _whole(name: str, text: str) -> int:
    digits = text.removeprefix("-") if name == "task" else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise Wrong(f"{name}={text!r:.40} is not a whole number")
    return int(text)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    told = (
        error
        if isinstance(error, ServiceError)
        else ServiceError(str(error), status=400 if isinstance(error, UsageError) else 500)
    )
    return _problem(told)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = ServiceError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    told.title = HTTPStatus(error.status_code).phrase
    return _problem(told)


async def _bug(request: Request, error: Exception) -> Response:
    return _problem(ServiceError(f"{request.url.path} failed: {type(error).__name__}"))


def _problem(error: ServiceError) -> Response:
    body = orjson.dumps(error.problem(SERVICE))
    return Response(body, status_code=error.status, media_type="application/problem+json")
