"""The web application of ng_view, and its server: read-only, and only the files that were opened. Refuses pages of another origin.

Bare Starlette: FastAPI's import alone takes longer than a page may take to open.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym.errors import NgymError, NotFound, ServiceError, Unauthorized, UsageError
from ngym.net.auth import RUN_TOKEN, OriginCheck, TokenAuth, hosts_of, is_loopback, new_token, refuse, token_from
from ngym.schema import Json
from ngym.view import html_report, training
from ngym.view.growing_index import row_seq
from ngym.view.rows import MAX_ROWS, RunRows
from ngym.view.runs import OpenedRuns, RolloutRun
from ngym.view.stats import compare

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
SHARED_ROWS = 40  # in full, of a filter
SERVICE = "the viewer"


class AccessGuard:
    """An ASGI application behind the checks. The page itself has no secrets and is open: it brings the token to /api.

    Args:
        hosts: what a Host header may name beside loopback (`ngym.net.auth.OriginCheck`). None: anything, from any page.
        lock: what opens /api; None: it is open.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, lock: TokenAuth | None) -> None:
        self._app = app
        self._origin_check = None if hosts is None else OriginCheck(hosts)
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
        if self._origin_check is not None and (problem := self._origin_check.problem(scope)):
            return problem
        if scope["path"].startswith("/api") and self._lock is not None and not self._lock.accepts(scope["headers"]):
            return Unauthorized(LOCKED)
        return None


STATIC = Path(__file__).parent / "static"


class InvalidParameter(ServiceError):
    """A parameter of the address says nothing."""

    status = 400
    title = "The address is not valid"


def application(
    runs: OpenedRuns, *, hosts: frozenset[str] | None, lock: TokenAuth | None, title: str = "ngym"
) -> Starlette:
    """
    Args:
        hosts: what a request's Host header may say; None: anything.
        lock: what opens /api; None: it is open.
    """
    api = Api(runs, title)
    routes = [
        Route("/", _static),
        Route("/static/{name:path}", _static),
        Route("/api/runs", api.runs),
        Route("/api/runs/{id}/rows", api.rows),
        Route("/api/runs/{id}/rows/{row}", api.row),
        Route("/api/runs/{id}/rows/{row}/tokens", api.tokens),
        Route("/api/runs/{id}/rows/{row}/trained", api.trained),
        Route("/api/runs/{id}/groups/{task}", api.group),
        Route("/api/runs/{id}/tasks", api.tasks),
        Route("/api/runs/{id}/tasks/{task}", api.task),
        Route("/api/runs/{id}/stats", api.stats),
        Route("/api/runs/{id}/report", api.report),
        Route("/api/compare", api.compare),
        Route("/api/training", api.training),
        Route("/api/training/{id}/metrics", api.training_metrics),
        Route("/api/training/{id}/config", api.training_config),
        Route("/api/training/{id}/samples", api.training_samples),
    ]
    handlers: dict[Any, Any] = {NgymError: _refusal, HTTPException: _no_route, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(AccessGuard, hosts=hosts, lock=lock)
    return app


class Api:
    """The answers under /api. Starlette runs them in threads: the event loop never waits for a disk."""

    def __init__(self, runs: OpenedRuns, title: str) -> None:
        self._runs = runs
        self._title = title

    def _run(self, request: Request) -> RolloutRun:
        return self._runs.rollout_run(request.path_params["id"])

    def _training_run(self, request: Request) -> training.TrainingRun:
        return self._runs.training_run(request.path_params["id"])

    def runs(self, request: Request) -> Response:
        return _json({"title": self._title, "runs": self._runs.as_json()})

    def rows(self, request: Request) -> Response:
        return _json(self._run(request).rows.page(*_table(request)).as_json())

    def row(self, request: Request) -> Response:
        line = self._run(request).index.line(row_seq(request.path_params["row"]))
        return Response(line, media_type="application/json")

    def tokens(self, request: Request) -> Response:
        return _json(self._run(request).tokens(row_seq(request.path_params["row"])))

    def trained(self, request: Request) -> Response:
        run, seq = self._run(request), row_seq(request.path_params["row"])
        run.index.line(seq)
        return _json(run.trained(seq))

    def group(self, request: Request) -> Response:
        return self._with_task(request, RunRows.group)

    def task(self, request: Request) -> Response:
        return self._with_task(request, RunRows.task)

    def _with_task(self, request: Request, read: Callable[[RunRows, int], list[Json]]) -> Response:
        run, task = self._run(request), _integer("task", request.path_params["task"])
        rows = read(run.rows, task)
        if not rows:
            raise NotFound(f"there is no task {task} in {run.name}")
        return _json({"task": task, "rows": rows})

    def tasks(self, request: Request) -> Response:
        return _json(self._run(request).rows.tasks(*_table(request)).as_json())

    def stats(self, request: Request) -> Response:
        return _json(self._run(request).stats.of(request.query_params.get("q", "")))

    def report(self, request: Request) -> Response:
        """A file to send: one rollout, or what a filter lets through. It holds nothing of other runs."""
        run, row = self._run(request), request.query_params.get("row")
        title = f"{self._title}: {run.name}" + (f", row {row}" if row else "")
        if row:
            page = html_report.single(run, row, title)
        else:
            alone = OpenedRuns({run.id: run}, {})
            page, _ = html_report.report(alone, rows=SHARED_ROWS, q=request.query_params.get("q", ""), title=title)
        return Response(page, media_type="text/html", headers={"content-disposition": "attachment"})

    def compare(self, request: Request) -> Response:
        a, b = (self._runs.rollout_run(request.query_params.get(name, "")) for name in ("a", "b"))
        return _json(compare(a.rows, b.rows, *_table(request)))

    def training(self, request: Request) -> Response:
        return _json({"runs": self._runs.training_as_json()})

    def training_metrics(self, request: Request) -> Response:
        after = request.query_params.get("after", training.BEGINNING)
        return _json(training.metrics(self._training_run(request), after))

    def training_config(self, request: Request) -> Response:
        return _json(training.config(self._training_run(request)))

    def training_samples(self, request: Request) -> Response:
        run = self._training_run(request)
        files = {"file": self._runs.id_of(run.rollouts), "held_out": self._runs.id_of(run.held_out)}
        return _json({**training.samples(run), **files})


async def _static(request: Request) -> Response:
    """One of the files in the folder; a path from the client is never opened."""
    name = request.path_params.get("name", "index.html")
    files = (path for path in STATIC.rglob("*") if path.suffix in KINDS)
    file = next((path for path in files if path.relative_to(STATIC).as_posix() == name), None)
    if file is None:
        raise NotFound(f"there is no page file {name!r:.60}")
    return Response(file.read_bytes(), media_type=KINDS[file.suffix])


def _table(request: Request) -> tuple[str, str, int, int]:
    """q, sort, offset, limit."""
    params = request.query_params
    limit = _integer("limit", params.get("limit", str(DEFAULT_ROWS)))
    if limit > MAX_ROWS:
        raise InvalidParameter(f"limit={limit}: a page has at most {MAX_ROWS:,} rows; ask for the next with offset")
    return params.get("q", ""), params.get("sort", ""), _integer("offset", params.get("offset", "0")), limit


def _integer(name: str, text: str) -> int:
    digits = text.removeprefix("-") if name == "task" else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise InvalidParameter(f"{name}={text!r:.40} is not a whole number")
    return int(text)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, ServiceError):
        return _problem(error)
    return _problem(ServiceError(str(error), status=400 if isinstance(error, UsageError) else 500))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(ServiceError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code))


async def _bug(request: Request, error: Exception) -> Response:
    return _problem(ServiceError(f"{request.url.path} failed: {type(error).__name__}"))


def _problem(error: ServiceError) -> Response:
    body = orjson.dumps(error.problem(SERVICE))
    return Response(body, status_code=error.status, media_type="application/problem+json")


PORT, TRIED_PORTS = 8770, 30
BACKLOG = 128
GRACE_S = 1
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
PORT_REMEDY = "choose another --port, or --port 0 for any free one"
HOST_REMEDY = "name an address of this machine with --host, or 0.0.0.0 for all that it has"


@dataclass(frozen=True)
class ListeningSocket:
    """An open socket, and what a browser is given to find it. token: None on loopback without NGYM_TOKEN."""

    socket: socket.socket
    token: str | None

    @property
    def address(self) -> str:
        """Without the token."""
        host, port = self.socket.getsockname()[:2]
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    @property
    def url(self) -> str:
        """The URL for a browser."""
        return f"{self.address}#token={quote(self.token, safe='')}" if self.token else self.address


def listen(host: str, port: int | None) -> ListeningSocket:
    """Listen. Off loopback a token is needed: NGYM_TOKEN, or one that is made.

    Args:
        port: 0: any free one; None: the usual one, or the next that is free.

    Raises:
        UsageError: the port is in use, the host does not belong to this machine, or the token could be guessed.
    """
    token = token_from(RUN_TOKEN) or (None if is_loopback(host) else new_token())
    ports = range(PORT, PORT + TRIED_PORTS) if port is None else [port]
    for number in ports:
        try:
            return ListeningSocket(_listening(host, number), token)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    remedy = PORT_REMEDY if problem.errno in PORT_ERRORS else HOST_REMEDY
    raise UsageError(f"port {ports[0]} on {host}: {problem.strerror or problem}; {remedy}")


def serve(runs: OpenedRuns, listening: ListeningSocket, title: str, ready: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM. ready: called when the page can be asked for."""
    lock = TokenAuth([listening.token]) if listening.token else None
    # A token is not a cookie, so a page of another name has none to send along.
    hosts = None if lock else frozenset(hosts_of([listening.address]))
    app = application(runs, hosts=hosts, lock=lock, title=title)
    asyncio.run(_serve_until_stopped(app, listening.socket, ready))


async def _serve_until_stopped(app: ASGIApp, listener: socket.socket, ready: Callable[[], None]) -> None:
    from ngym.net.connection_limits import Server, server_config

    server = Server(server_config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE_S))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.005)
    ready()
    await serving


def open_browser(url: str) -> None:
    """If a user sits in front of it."""
    display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if display and sys.stdout.isatty():
        webbrowser.open(url)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # what cannot be a name does not get as far as the resolver
        raise socket.gaierror(socket.EAI_NONAME, "no host can be called so") from None
    # asyncio sets TCP_NODELAY where it sees TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
