"""The context of a request: its headers, and rollout id, trace and deadline, which are passed on to every hop; timeouts.

A timer of the event loop costs 2.5 microseconds, and a rollout's request would need four. So timeouts of several seconds
share one timer of the loop, which ticks while there are any; they come up to TICK_S late.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from ngym.schema import DEADLINE_HEADER, ROLLOUT_HEADER

if TYPE_CHECKING:
    from starlette.types import Scope

TRACEPARENT = "traceparent"
_ROLLOUT, _DEADLINE, _TRACE = ROLLOUT_HEADER.encode(), DEADLINE_HEADER.encode(), TRACEPARENT.encode()
_HEADERS = "ngym.headers"  # in the scope of a request
TICK_S = 0.25
EXACT_S = 4.0  # shorter timeouts get a timer of their own


class TraceIds(NamedTuple):
    """trace: 32 hex digits. span: 16, of the span of the rollout itself."""

    trace: str
    span: str

    @property
    def traceparent(self) -> str:
        """The W3C traceparent header."""
        return f"00-{self.trace}-{self.span}-01"


def trace_ids(rollout_id: str) -> TraceIds:
    """Trace ids from the first 48 hex digits of the sha256 of the rollout's id."""
    digest = hashlib.sha256(rollout_id.encode()).hexdigest()
    return TraceIds(digest[:32], digest[32:48])


class Correlation(NamedTuple):
    """rollout_id, W3C traceparent, and the deadline in seconds of `time.monotonic()`; None if the caller sent none."""

    rollout_id: str | None = None
    traceparent: str | None = None
    deadline: float | None = None

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        if self.deadline is None:
            return None
        remaining_s = self.deadline - time.monotonic()
        return remaining_s if remaining_s > 0 else 0.0


current: ContextVar[Correlation] = ContextVar("ngym_correlation", default=Correlation())  # noqa: B039  (immutable)


def new_correlation(rollout_id: str, timeout_s: float | None = None) -> Correlation:
    """A new correlation for a rollout that starts here."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    return Correlation(rollout_id, trace_ids(rollout_id).traceparent, deadline)


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """A request's headers by name (lower case); of a repeated one the first. Built once per request: starlette's
    `Request.headers` searches and decodes the list at each access.
    """
    headers: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if headers is None:
        headers = scope[_HEADERS] = dict(reversed(scope["headers"]))
    return headers


def header(scope: Scope, name: str) -> str | None:
    """A request's header; name: in lower case."""
    value = headers_of(scope).get(name.encode())
    return None if value is None else value.decode("latin-1")


def from_headers(headers: Mapping[bytes, bytes]) -> Correlation:
    """The correlation that a caller sent; a deadline that is not a number is ignored."""
    rollout_id, deadline_ms, trace = headers.get(_ROLLOUT), headers.get(_DEADLINE), headers.get(_TRACE)
    return Correlation(
        None if rollout_id is None else rollout_id.decode("latin-1"),
        None if trace is None else trace.decode("latin-1"),
        time.monotonic() + int(deadline_ms) / 1000
        if deadline_ms is not None and deadline_ms.isdigit() and len(deadline_ms) < 16
        else None,
    )


def to_headers(correlation: Correlation) -> dict[str, str]:
    """The headers that carry a correlation to the next hop."""
    headers = {}
    if correlation.rollout_id:
        headers[ROLLOUT_HEADER] = correlation.rollout_id
    if correlation.traceparent:
        headers[TRACEPARENT] = correlation.traceparent
    remaining = correlation.remaining_s()
    if remaining is not None:
        headers[DEADLINE_HEADER] = str(int(remaining * 1000))
    return headers


def trace_headers() -> dict[str, str]:
    """The headers for an external service: only the trace, which that service may continue."""
    traceparent = current.get().traceparent
    return {TRACEPARENT: traceparent} if traceparent else {}


class Timer(Protocol):
    def cancel(self) -> object: ...


class _Due(Protocol):
    """The callbacks of the first tick after this time of the loop."""

    due: float

    def fire(self) -> None: ...


class SharedTimer:
    """A callback that is due at the first tick after this time of the loop."""

    __slots__ = ("_callback", "_pending", "due")

    def __init__(self, pending: dict[_Due, None], due: float, callback: Callable[[], object]) -> None:
        self.due = due
        self._pending = pending
        self._callback: Callable[[], object] | None = callback
        pending[self] = None

    def cancel(self) -> None:
        self._pending.pop(self, None)
        self._callback = None  # its object may hold this timer: a circle that would keep a request alive

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class _Ticks:
    """The shared timers of one event loop. A tick looks at all of them, so that one that never fires costs little."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pending: dict[_Due, None] = {}
        self.runs = False

    def wait(self) -> None:
        self.runs = True
        self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now, self.runs = self.loop.time(), False
        for timer in [timer for timer in self.pending if timer.due <= now]:
            self.pending.pop(timer, None)
            timer.fire()
        if self.pending and not self.runs:
            self.wait()


_of_thread = threading.local()


def later(delay_s: float, callback: Callable[[], object]) -> SharedTimer:
    """Call back after this time, or up to TICK_S later."""
    loop = asyncio.get_running_loop()
    return SharedTimer(pending_of(loop), loop.time() + delay_s, callback)


def pending_of(loop: asyncio.AbstractEventLoop) -> dict[_Due, None]:
    """The shared timers of the running loop, to add one."""
    ticks: _Ticks | None = getattr(_of_thread, "ticks", None)
    if ticks is None or ticks.loop is not loop:
        ticks = _of_thread.ticks = _Ticks(loop)
    if not ticks.runs:
        ticks.wait()
    return ticks.pending


class Timeout:
    """`with Timeout(seconds):` cancels what is awaited inside after this time, and raises TimeoutError.

    As asyncio.timeout, but a timeout of more than EXACT_S comes up to TICK_S late.

    Attributes:
        expired: whether the time has passed.
    """

    __slots__ = ("_cancelling", "_pending", "_seconds", "_task", "_timer", "due", "expired")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pending: dict[_Due, None] | None = None  # the shared timers, of which this is one
        self._timer: Timer | None = None
        self.expired = False

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()  # once: asyncio calls getpid() to look it up
        task = asyncio.current_task(loop)
        assert task is not None, "a timeout needs a task"
        self._task: asyncio.Task[object] = task
        self._cancelling = task.cancelling()
        seconds = self._seconds
        if seconds > EXACT_S:
            self.due = loop.time() + seconds
            self._pending = pending_of(loop)
            self._pending[self] = None
        else:
            self._timer = loop.call_later(seconds, self.fire)
        return self

    def fire(self) -> None:
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending is not None:
            self._pending.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # it refers to this object
        is_late = self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError
        del self._task  # a task keeps its error, whose frames hold this object
        if is_late:
            raise TimeoutError from error
