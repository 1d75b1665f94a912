"""Admission control for rollouts: a gate that several reasons can close, and a window per agent.

An agent whose rollouts wait for a model has no queue and gets the full concurrency of the run. A CPU-bound agent gets
enough rollouts to stay busy: each further one would only hold a connection and a body while it queues.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

FIRST = 64  # rollouts to begin with, and the fewest
ENOUGH = 32  # queued rollouts: the agent does not run out of work before it gets more
OPENING_S = 0.05  # the window grows by half at this interval, until the agent reports a long queue
BELIEVED_S = 1.0  # how long a report is valid; each finished rollout brings a new one


@dataclass
class Gate:
    """A gate that is open while nothing holds it. reasons: holder -> one line for the screen."""

    reasons: dict[str, str] = field(default_factory=dict)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def hold(self, who: str, reason: str | None) -> None:
        """Close the gate for this reason; None withdraws the holder's reason."""
        if reason is None:
            self.reasons.pop(who, None)
        else:
            self.reasons[who] = reason
        if self.reasons:
            self._open.clear()
        else:
            self._open.set()

    async def opened(self) -> None:
        if self.reasons:
            await self._open.wait()


class Window:
    """Rollouts in flight at one agent.

    Args:
        limit: the largest size of the window.
    """

    def __init__(self, limit: int) -> None:
        self.size = min(FIRST, limit)
        self.in_flight = 0
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._opens_at = self._loop.time() + OPENING_S
        self._left = asyncio.Event()

    async def enter(self) -> None:
        """Wait until there is room for one more rollout. One caller at a time."""
        while self.in_flight >= self.size:
            self._left.clear()
            if self.size >= self._limit:
                await self._left.wait()
            elif self._loop.time() >= self._opens_at:
                self.size = min(self._limit, self.size * 3 // 2 + 1)
                self._opens_at = self._loop.time() + OPENING_S
            else:
                timer = self._loop.call_at(self._opens_at, self._left.set)
                try:
                    await self._left.wait()
                finally:
                    timer.cancel()
        self.in_flight += 1

    def told(self, waiting: int) -> None:
        """Record the agent's queue length, which a finished rollout reports."""
        if waiting >= ENOUGH:
            self._opens_at = self._loop.time() + BELIEVED_S
        else:
            self._opens_at = min(self._opens_at, self._loop.time() + OPENING_S)
        if waiting > 2 * ENOUGH:
            self.size = max(min(FIRST, self._limit), min(self.size, self.in_flight - waiting + ENOUGH))

    def leave(self) -> None:
        self.in_flight -= 1
        self._left.set()
