"""Bounds on the start of rollouts: a gate that several reasons can close, and a window per agent.

An agent whose rollouts wait for a model has none waiting for their turn, and gets all that the run's concurrency allows. One that
is as fast as its CPU gets what keeps it busy: each further rollout would only be a connection and a body to hold, cold
when its turn comes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

FIRST = 64  # rollouts to begin with, and the fewest
ENOUGH = 32  # waiting for their turn: the agent does not run dry before it is given more
OPENING_S = 0.05  # the window grows by half this often while the agent has not told that it has enough
BELIEVED_S = 1.0  # how long it is believed; it tells with every rollout that comes back


@dataclass
class Gate:
    """Open as long as nobody holds it shut. `reasons`: who holds it -> one line for the screen."""

    reasons: dict[str, str] = field(default_factory=dict)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def hold(self, who: str, reason: str | None) -> None:
        """Shut the gate for this reason; None takes it back."""
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
        limit: the most there may ever be.
    """

    def __init__(self, limit: int) -> None:
        self.size = min(FIRST, limit)
        self.in_flight = 0
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._opens_at = self._loop.time() + OPENING_S
        self._left = asyncio.Event()

    async def enter(self) -> None:
        """Returns when there is room for one more. One caller at a time."""
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
        """A rollout came back, and with it how many wait for their turn at the agent."""
        if waiting >= ENOUGH:
            self._opens_at = self._loop.time() + BELIEVED_S
        else:
            self._opens_at = min(self._opens_at, self._loop.time() + OPENING_S)
        if waiting > 2 * ENOUGH:
            self.size = max(min(FIRST, self._limit), min(self.size, self.in_flight - waiting + ENOUGH))

    def leave(self) -> None:
        self.in_flight -= 1
        self._left.set()
