"""The middleware around each request's handler: request ids, bounded bodies, deadlines, disconnected callers, event
streams, spans.

A handler is cancelled when its caller hangs up or its caller's deadline passes.

Known routes bypass FastAPI: its exit stacks, dependencies and scan over all routes cost more than most handlers do,
and our handlers read the request themselves. FastAPI serves the rest: paths with parameters other than a rollout's
id, the documentation, and unknown paths.

Without a limit every call begins at once and queues in the back end instead.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym.errors import Overloaded, PeerTimeout, Unreachable
from ngym.net import request_context
from ngym.net.connection_limits import LIMITS_OWN_BODY, Exchange
from ngym.net.json_limits import CALL_BYTES
from ngym.net.request_context import EXACT_S, Timeout, Timer, later, pending_of
from ngym.schema import DEADLINE_HEADER, Json
from ngym.services.base.request_bodies import RequestBody
from ngym.telemetry import tracing

MAX_RETRY_AFTER_S = 30.0
SMOOTHING = 0.1  # weight of the last call in the moving average of call times
DISCONNECT_CHECK_S = 0.25  # seconds; faster answers are not watched for a disconnect
CLIENT_CLOSED_REQUEST = 499
HEADERS = {"cache-control": "no-cache"}
MEDIA_TYPE = "text/event-stream"
ROLLOUT_ROUTE = "/rollouts/{rollout_id}"
Handler = Callable[[Request], Awaitable[Response]]
_BOUNDS = Histogram.DEFAULT_BUCKETS  # in seconds; the last one is infinite


class Admission:
    """First come, first served.

    Args:
        registry: counts waiting and refused calls.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._limit: int | None = None
        self._max_waiting = 0
        self._in_flight = 0
        self._seconds = 1.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        waiting = Gauge("ngym_calls_waiting", "Calls that wait for their turn", registry=registry)
        waiting.set_function(lambda: len(self._waiting))
        self._refused = Counter("ngym_calls_refused", "Calls answered with 429: the line was full", registry=registry)

    def begin(self, limit: int | None, line: int) -> None:
        """Reset. limit: concurrent calls, None for no limit. line: calls that may wait."""
        self._limit, self._max_waiting, self._in_flight = limit, line, 0
        self._waiting.clear()

    @property
    def is_open(self) -> bool:
        """Whether there is no limit."""
        return self._limit is None

    async def enter(self) -> float:
        """Wait until the call may begin. Returns the start time, for `leave`. Raises Overloaded: the line is full."""
        if self._limit is None:
            return 0.0
        if self._in_flight < self._limit:
            self._in_flight += 1
            return time.monotonic()
        if len(self._waiting) >= self._max_waiting:
            self._refused.inc()
            wait_s = min(MAX_RETRY_AFTER_S, self._seconds * (len(self._waiting) + 1) / self._limit)
            raise Overloaded(
                f"{self._in_flight} calls are in flight and {len(self._waiting)} wait (max_in_flight, max_waiting); retry "
                f"in about {wait_s:.0f} s",
                retry_after_s=wait_s,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn  # leave() hands its place over
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            elif turn in self._waiting:  # else its turn came just after it was given up
                self._waiting.remove(turn)
            raise
        return time.monotonic()

    def leave(self, began: float) -> None:
        """End a call that entered."""
        if self._limit is None:
            return
        self._seconds += SMOOTHING * (time.monotonic() - began - self._seconds)
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._in_flight -= 1


async def in_time(handler: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """The handler's response. Raises PeerTimeout once the caller's deadline has passed; a plain function in a thread
    runs on, and its answer is dropped.
    """
    remaining_s = request_context.current.get().remaining_s()
    if remaining_s is None:
        return await handler(request)
    if remaining_s <= 0:
        raise _deadline_passed(request, "was not begun")
    timer = Timeout(remaining_s)
    try:
        with timer:
            return await handler(request)
    except TimeoutError:
        if not timer.expired:
            raise
    # The handler's own error and the timer refer to frames that hold the request.
    del timer
    raise _deadline_passed(request, "was stopped")


def _deadline_passed(request: Request, what: str) -> PeerTimeout:
    return PeerTimeout(f"{request.scope['path']} {what}: the caller's deadline passed ({DEADLINE_HEADER})")


class ClientDisconnected(Exception):
    """The caller hung up, so no answer is needed."""


class DeadlinePassed(Exception):
    """The caller's deadline passed, and what it asked for was stopped."""


class Caller:
    """`with Caller(receive):` cancels what is awaited inside, and raises ClientDisconnected, when the caller hangs up; and
    DeadlinePassed when its deadline has passed.

    Args:
        receive: of a request whose body has been read, or a RequestBody. With a RequestBody, watching starts once it has
            been read: until then its reader receives the disconnect.
        remaining_s: seconds until the deadline, or None without one.
    """

    __slots__ = (
        "_cancelling", "_deadline", "_pending", "_receive", "_remaining_s", "_task", "_timer", "_watch", "_why", "due"
    )  # fmt: skip

    def __init__(self, receive: Receive, remaining_s: float | None = None) -> None:
        self._receive = receive
        self._remaining_s = remaining_s
        self._why: type[ClientDisconnected | DeadlinePassed] | None = None
        self._deadline: Timer | None = None
        self._timer: Timer | None = None
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task: asyncio.Task[object] = task
        self._cancelling = task.cancelling()
        self.due = loop.time() + DISCONNECT_CHECK_S
        self._pending = pending_of(loop)
        self._pending[self] = None
        if self._remaining_s is not None and self._remaining_s <= EXACT_S:
            self._deadline = loop.call_later(self._remaining_s, self._stop, DeadlinePassed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pending.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        why = self._why
        is_ours = why and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)
        del self._task  # a task keeps its error, whose frames may hold this object
        if why and is_ours:
            raise why from None

    def fire(self) -> None:
        """Look for a disconnect, once the answer is not a fast one."""
        if self._deadline is None and self._remaining_s is not None:  # a fast answer needs no timer of its own for it
            self._deadline = later(
                max(0.0, self._remaining_s - DISCONNECT_CHECK_S), partial(self._stop, DeadlinePassed)
            )
        if isinstance(self._receive, RequestBody) and not self._receive.read:
            self._timer = later(DISCONNECT_CHECK_S, self.fire)
            return
        self._watch = asyncio.get_running_loop().create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._stop(ClientDisconnected)

    def _stop(self, why: type[ClientDisconnected | DeadlinePassed]) -> None:
        if self._why is None:
            self._why = why
            self._task.cancel()


def client_closed() -> Response:
    """The response to a caller that hung up; only the metrics show its status."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def whole_stream(written: bytes) -> Response:
    """A stream that is already complete, sent as one piece to save the cost of chunks."""
    return Response(written, media_type=MEDIA_TYPE, headers=HEADERS)


class EventStream(Response):
    """Sends what `parts` yields as soon as it is there; a slow client delays only itself.

    first, parts: server-sent events, already encoded. parts is always closed at the end.

    Attributes:
        when_over: called when the stream has ended, for whatever reason.
    """

    media_type = MEDIA_TYPE

    def __init__(self, first: bytes, parts: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.when_over: Callable[[], None] = lambda: None
        self._first = first
        self._parts = parts
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with Caller(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for part in self._parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnected:
            pass  # the client stopped reading
        finally:
            try:
                await self._parts.aclose()
            finally:
                self.when_over()


class RouteHandler(NamedTuple):
    """A route's handler and its limits.

    most_bytes: limit of the body; None: the handler limits its size and time.
    finishes: the handler runs to its end even if its caller hangs up.
    """

    handler: Handler
    most_bytes: int | None = CALL_BYTES
    finishes: bool = False


@dataclass
class ServingState:
    """State of the application that its middleware reads.

    Attributes:
        is_on: the lifespan has begun and not ended.
        most_bytes: limit of a body, from the service's options; None: that of its route.
        answer_headers: further headers of the answer to a request with this scope.
    """

    is_on: bool = False
    most_bytes: int | None = None
    answer_headers: Callable[[Scope], list[tuple[bytes, bytes]]] | None = None


@dataclass(slots=True)
class _Route:
    """statuses: the number of answers with each. buckets: of times up to each of _BOUNDS, not cumulative.

    since, created: when the first answer with a status came, and the first of all, in seconds since 1970.
    """

    created: float
    statuses: dict[int, int] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * len(_BOUNDS))
    seconds: float = 0.0


class RequestMetrics(Collector):
    """The metrics of requests. As a Counter and a Histogram, without their locks: only the event loop counts here."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}

    def count(self, route: str, status: int, seconds: float) -> None:
        """route: its template, which keeps the number of labels small."""
        counts = self._routes.get(route)
        if counts is None:
            counts = self._routes[route] = _Route(time.time())
        number = counts.statuses.get(status, 0)
        counts.statuses[status] = number + 1
        if not number:
            counts.since[status] = time.time()
        counts.buckets[bisect_left(_BOUNDS, seconds)] += 1
        counts.seconds += seconds

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("ngym_requests", "Requests by route and status", labels=["route", "status"])
        times = HistogramMetricFamily("ngym_request_seconds", "Time to answer", labels=["route"])
        for route, counts in self._routes.items():
            for status, number in counts.statuses.items():
                requests.add_metric([route, str(status)], number, created=counts.since[status])
            buckets = zip(map(floatToGoString, _BOUNDS), accumulate(counts.buckets), strict=True)
            times.add_metric([route], list(buckets), counts.seconds)
            times.add_sample("ngym_request_seconds_created", {"route": route}, counts.created)
        yield requests
        yield times


class _Sender:
    """`send` of a request. status: of the answer once it begins; 0 before."""

    __slots__ = ("_scope", "_send", "_serving", "status")

    def __init__(self, send: Send, scope: Scope, serving: ServingState) -> None:
        self._send = send
        self._scope = scope
        self._serving = serving
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._serving.answer_headers is not None:
                message["headers"] = [*message["headers"], *self._serving.answer_headers(self._scope)]
        await self._send(message)


class RequestMiddleware:
    """The outermost middleware.

    Args:
        served: (method, path) -> what answers it, for paths without parameters; they may be under ROLLOUT_ROUTE.
        start: called before the first request if the server has run no lifespan.

    Attributes:
        errors: an unexpected error -> the application that answers it and raises it again; None: an outer one does.
    """

    def __init__(
        self,
        app: ASGIApp,
        registry: CollectorRegistry,
        served: Mapping[tuple[str, str], RouteHandler],
        serving: ServingState,
        start: Callable[[Any], Awaitable[None]],
    ) -> None:
        self.app = app
        self.serving = serving
        self.start = start
        self.served = served
        self.metrics = RequestMetrics()
        registry.register(self.metrics)
        self.errors: Callable[[Exception], ASGIApp] | None = None
        self._running = 0
        in_flight = Gauge("ngym_requests_in_flight", "Requests being served", registry=registry)
        in_flight.set_function(lambda: self._running)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        serving = self.serving
        if not serving.is_on:
            await self.start(scope["app"])
        headers = request_context.headers_of(scope)
        token = request_context.current.set(request_context.from_headers(headers))
        status, sender, route = 0, None, scope["path"]
        served = self.served.get((scope["method"], route))
        if served is None and route.startswith("/rollouts/"):
            rollout_id, slash, rest = route.removeprefix("/rollouts/").partition("/")
            route = f"{ROLLOUT_ROUTE}{slash}{rest}"
            served = self.served.get((scope["method"], route))
            scope["path_params"] = {"rollout_id": rollout_id}
        self._running += 1
        started = time.perf_counter()
        try:
            most_bytes = CALL_BYTES if served is None else served.most_bytes
            if most_bytes is None:
                scope[LIMITS_OWN_BODY] = True
            else:
                receive = RequestBody(receive, headers, serving.most_bytes or most_bytes)
            if served is None:
                sender = _Sender(send, scope, serving)
                await self._call_app(scope, receive, sender)
            else:
                response = await _answer(served, Request(scope, receive), receive)
                exchange = getattr(send, "__self__", None)
                if (
                    type(exchange) is Exchange
                    and type(response).__call__ is Response.__call__
                    and not response.background
                ):
                    status, parts = response.status_code, response.raw_headers
                    if serving.answer_headers is not None:
                        parts = [*parts, *serving.answer_headers(scope)]
                    await exchange.answer(status, parts, response.body)  # nothing in between changes what is sent
                else:
                    sender = _Sender(send, scope, serving)
                    await response(scope, receive, sender)
        except asyncio.CancelledError:
            if not isinstance(getattr(send, "__self__", None), Exchange):
                raise
            # only uvicorn cancels the task of an Exchange: at the end of the server's grace period
            if not (status or (sender is not None and sender.status)):
                sender = _Sender(send, scope, serving)
                await _stopped(Request(scope, receive), sender)
        except Exception as error:
            if self.errors is None or status or (sender is not None and sender.status):
                raise
            sender = _Sender(send, scope, serving)
            await self.errors(error)(scope, receive, sender)
        finally:
            self._running -= 1
            request_context.current.reset(token)
            if served is None:
                route = getattr(scope.get("route"), "path", "unknown")
            status = status if sender is None else sender.status
            self.metrics.count(route, status or 500, time.perf_counter() - started)

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            await client_closed()(scope, receive, send)


async def _answer(served: RouteHandler, request: Request, receive: Receive) -> Response:
    """The handler's response, or that of the application's handler for the exception that it raised."""
    try:
        if served.finishes:
            return await served.handler(request)
        remaining_s = request_context.current.get().remaining_s()
        if remaining_s is not None and remaining_s <= 0:
            raise _deadline_passed(request, "was not begun")
        with Caller(receive, remaining_s):
            return await served.handler(request)
    except (ClientDisconnected, ClientDisconnect):
        return client_closed()
    except DeadlinePassed:
        response = await _error_response(request, _deadline_passed(request, "was stopped"))
        assert response is not None
        return response
    except Exception as error:
        response = await _error_response(request, error)
        if response is None:
            raise
        return response


async def _stopped(request: Request, send: Send) -> None:
    """Answer a request that the end of the server has stopped."""
    name = getattr(request.app.state.context, "name", request.app.title)
    error = Unreachable(f"{name} was shut down before it answered {request.method} {request.scope['path']}")
    response = await _error_response(request, error)
    assert response is not None
    await response(request.scope, request.receive, send)


async def _error_response(request: Request, error: Exception) -> Response | None:
    """The response to an error; None if the application has no handler for it."""
    known = request.app.exception_handlers
    # not the one for Exception itself: that is called further out, so that the traceback goes to the log
    respond = next((known[kind] for kind in type(error).__mro__ if kind in known and kind is not Exception), None)
    if respond is None:
        return None
    answer = respond(request, error)
    response: Response = await answer if inspect.isawaitable(answer) else answer
    return response


def invoke_agent(handler: Handler) -> Handler:
    """Wrap an agent's handler of a whole rollout in its span."""

    async def traced(request: Request) -> Response:
        context = request.app.state.context
        with tracing.span(f"invoke_agent {context.name}", "server") as span:
            if span.is_recording:
                span.set("gen_ai.operation.name", "invoke_agent")
                span.set("gen_ai.agent.name", context.name)
                span.set("gen_ai.provider.name", "ngym")
            return await handler(request)

    return traced


def execute_tool(name: str) -> tracing.Span:
    """The span of a tool call."""
    span = tracing.span(f"execute_tool {name}", "server")
    span.set("gen_ai.operation.name", "execute_tool")
    span.set("gen_ai.tool.name", name)
    span.set("gen_ai.tool.type", "function")
    return span


def verify() -> tracing.Span:
    """The span of scoring a rollout."""
    span = tracing.span("verify", "server")
    span.set("gen_ai.evaluation.name", "reward")
    return span


def record_rewards(span: tracing.Span, outcome: Json) -> None:
    """Record the rewards on the span; a null reward is left out."""
    if not span.is_recording:
        return
    span.set("gen_ai.evaluation.score.value", outcome["reward"])
    for name, value in (outcome.get("reward_components") or {}).items():
        span.set(f"ngym.reward.{name}", value)
