"""What happens to a request before its handler? Its ids are taken from the headers, its body is bounded, it is counted and timed.

Then it goes straight to its handler. What FastAPI would put between the two (exit stacks, dependencies, a scan over
all routes) costs more than most handlers do, and our handlers read the request themselves; FastAPI gets the rest: paths
with parameters other than a rollout's id, the documentation, what does not exist.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym import correlation
from ngym.errors import BadRequest

MAX_BODY_BYTES = 256 * 1024 * 1024

OF_A_ROLLOUT = "/rollouts/{rollout_id}"

Handler = Callable[[Request], Awaitable[Response]]


class Edge:
    """The outermost middleware.

    Args:
        handlers: (method, path) -> what answers it, for paths without parameters; they may stand under OF_A_ROLLOUT.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, handlers: Mapping[tuple[str, str], Handler]) -> None:
        self.app = app
        self.handlers = handlers
        self.requests = Counter("ngym_requests", "Requests by route and status", ["route", "status"], registry=registry)
        self.seconds = Histogram("ngym_request_seconds", "Time to answer", ["route"], registry=registry)
        self.in_flight = Gauge("ngym_requests_in_flight", "Requests being served", registry=registry)
        self._counters: dict[tuple[str, int], Any] = {}
        self._timers: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        receive = _bounded(receive, headers.get("content-length"))
        token = correlation.current.set(correlation.from_headers(headers))
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        route = scope["path"]
        handler = self.handlers.get((scope["method"], route))
        if handler is None and route.startswith("/rollouts/"):
            rollout_id, slash, rest = route.removeprefix("/rollouts/").partition("/")
            route = f"{OF_A_ROLLOUT}{slash}{rest}"
            handler = self.handlers.get((scope["method"], route))
            scope["path_params"] = {"rollout_id": rollout_id}
        self.in_flight.inc()
        started = time.perf_counter()
        try:
            if handler is None:
                await self.app(scope, receive, watched)
            else:
                response = await _answer(handler, Request(scope, receive))
                await response(scope, receive, watched)
        finally:
            self.in_flight.dec()
            correlation.current.reset(token)
            if handler is None:
                route = getattr(scope.get("route"), "path", "unknown")
            self._count(route, status, time.perf_counter() - started)

    def _count(self, route: str, status: int, seconds: float) -> None:
        """route: its template, so that labels stay few."""
        counter = self._counters.get((route, status))
        if counter is None:
            counter = self._counters[route, status] = self.requests.labels(route, str(status))
            self._timers.setdefault(route, self.seconds.labels(route))
        counter.inc()
        self._timers[route].observe(seconds)


async def _answer(handler: Handler, request: Request) -> Response:
    """The handler's response, or that of the application's exception handler for what it raised."""
    try:
        return await handler(request)
    except Exception as error:
        known = request.app.exception_handlers
        # not the one for Exception itself: that is called further out, where the traceback goes to the log
        respond = next((known[kind] for kind in type(error).__mro__ if kind in known and kind is not Exception), None)
        if respond is None:
            raise
        answered = respond(request, error)
        response: Response = await answered if inspect.isawaitable(answered) else answered
        return response


def _bounded(receive: Receive, content_length: str | None) -> Receive:
    """`receive` that refuses bodies over MAX_BODY_BYTES, announced or not."""
    declared = int(content_length) if content_length and content_length.isdigit() else 0
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if max(size, declared) > MAX_BODY_BYTES:
                raise BadRequest(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
        return message

    return bounded
