"""The context of a request: rollout id, trace and deadline, which are passed on to every hop."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from ngym.schema import DEADLINE_HEADER, ROLLOUT_HEADER

if TYPE_CHECKING:
    from starlette.types import Scope

TRACEPARENT = "traceparent"
_ROLLOUT, _DEADLINE, _TRACE = ROLLOUT_HEADER.encode(), DEADLINE_HEADER.encode(), TRACEPARENT.encode()
_HEADERS = "ngym.headers"  # in the scope of a request


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
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


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
