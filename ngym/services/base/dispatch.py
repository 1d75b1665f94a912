"""What happens to a request before its handler? Its ids are taken from the headers, its body is bounded, it is counted and timed.

What its caller has hung up on, or set a deadline to that is over, is cancelled.

Then it goes straight to its handler. What FastAPI would put between the two (exit stacks, dependencies, a scan over
all routes) costs more than most handlers do, and our handlers read the request themselves; FastAPI gets the rest: paths
with parameters other than a rollout's id, the documentation, what does not exist.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym.net import request_context
from ngym.net.connection_limits import OWN_PACE
from ngym.services.base.deadlines import in_time
from ngym.services.base.disconnects import Body, Caller, CallerGone, nobody

CALL_BYTES = 16 << 20  # arguments of a tool, and what is not one of these:
ROW_BYTES = 64 << 20  # a row, a conversation; images are in them
BULK_BYTES = 256 << 20  # many rows

OF_A_ROLLOUT = "/rollouts/{rollout_id}"

Handler = Callable[[Request], Awaitable[Response]]


class Served(NamedTuple):
    """What answers a route.

    most_bytes: of a body; None: the handler bounds it itself, in size and in time.
    finishes: what it has begun is brought to its end, though its caller has hung up.
    """

    handler: Handler
    most_bytes: int | None = CALL_BYTES
    finishes: bool = False


class Edge:
    """The outermost middleware.

    Args:
        served: (method, path) -> what answers it, for paths without parameters; they may stand under OF_A_ROLLOUT.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, served: Mapping[tuple[str, str], Served]) -> None:
        self.app = app
        self.served = served
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
        token = request_context.current.set(request_context.from_headers(headers))
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        route = scope["path"]
        served = self.served.get((scope["method"], route))
        if served is None and route.startswith("/rollouts/"):
            rollout_id, slash, rest = route.removeprefix("/rollouts/").partition("/")
            route = f"{OF_A_ROLLOUT}{slash}{rest}"
            served = self.served.get((scope["method"], route))
            scope["path_params"] = {"rollout_id": rollout_id}
        self.in_flight.inc()
        started = time.perf_counter()
        try:
            most_bytes = CALL_BYTES if served is None else served.most_bytes
            if most_bytes is not None:
                most_bytes = _own_bound(scope["app"]) or most_bytes
            if most_bytes is None:
                scope[OWN_PACE] = True
            else:
                receive = Body(receive, headers, most_bytes)
            if served is None:
                await self._elsewhere(scope, receive, watched)
            else:
                response = await _answer(served, Request(scope, receive), receive)
                await response(scope, receive, watched)
        finally:
            self.in_flight.dec()
            request_context.current.reset(token)
            if served is None:
                route = getattr(scope.get("route"), "path", "unknown")
            self._count(route, status, time.perf_counter() - started)

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            await nobody()(scope, receive, send)

    def _count(self, route: str, status: int, seconds: float) -> None:
        """route: its template, so that labels stay few."""
        counter = self._counters.get((route, status))
        if counter is None:
            counter = self._counters[route, status] = self.requests.labels(route, str(status))
            self._timers.setdefault(route, self.seconds.labels(route))
        counter.inc()
        self._timers[route].observe(seconds)


def _own_bound(app: Any) -> int | None:
    """Bytes of a body, where the service's options name a bound."""
    context = getattr(app.state, "context", None)
    mib = getattr(context.options, "max_body_mib", None) if context else None
    return mib << 20 if mib else None


async def _answer(served: Served, request: Request, receive: Receive) -> Response:
    """The handler's response, or that of the application's exception handler for what it raised."""
    try:
        if served.finishes:
            return await served.handler(request)
        with Caller(receive):
            return await in_time(served.handler, request)
    except (CallerGone, ClientDisconnect):
        return nobody()
    except Exception as error:
        known = request.app.exception_handlers
        # not the one for Exception itself: that is called further out, where the traceback goes to the log
        respond = next((known[kind] for kind in type(error).__mro__ if kind in known and kind is not Exception), None)
        if respond is None:
            raise
        answered = respond(request, error)
        response: Response = await answered if inspect.isawaitable(answered) else answered
        return response
