"""Admission control: a limit on concurrent calls and a bounded waiting line; further calls get 429 with a retry time.

Without a limit every call begins at once and queues in the back end instead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge

from ngym.errors import Overloaded

LONGEST_S = 30.0
MEMORY = 0.1  # weight of the last call in the moving average of call times


class Admission:
    """First come, first served.

    Args:
        registry: counts waiting and refused calls.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._limit: int | None = None
        self._line = 0
        self._inside = 0
        self._seconds = 1.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        waiting = Gauge("ngym_calls_waiting", "Calls that wait for their turn", registry=registry)
        waiting.set_function(lambda: len(self._waiting))
        self._refused = Counter("ngym_calls_refused", "Calls answered with 429: the line was full", registry=registry)

    def begin(self, limit: int | None, line: int) -> None:
        """Reset. limit: concurrent calls, None for no limit. line: calls that may wait."""
        self._limit, self._line, self._inside = limit, line, 0
        self._waiting.clear()

    @property
    def is_open(self) -> bool:
        """Whether there is no limit."""
        return self._limit is None

    async def enter(self) -> float:
        """Wait until the call may begin. Returns the start time, for `leave`.

        Raises:
            Overloaded: the line is full.
        """
        if self._limit is None:
            return 0.0
        if self._inside < self._limit:
            self._inside += 1
            return time.monotonic()
        if len(self._waiting) >= self._line:
            self._refused.inc()
            wait_s = min(LONGEST_S, self._seconds * (len(self._waiting) + 1) / self._limit)
            raise Overloaded(
                f"{self._inside} calls are in flight and {len(self._waiting)} wait (max_in_flight, max_waiting); retry "
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
        self._seconds += MEMORY * (time.monotonic() - began - self._seconds)
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._inside -= 1
