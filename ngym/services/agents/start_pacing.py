"""When may a rollout begin? When those that have begun have had their turn: a few begin each time round the event loop.

Without this, thousands of rollouts that arrive together go through the agent in step: all seed, then all ask the model,
then all verify. Each wave opens as many connections as there are rollouts, and the next service is idle until it is over. With
it, as many are under way as the agent and its peers keep up with. Rollouts that wait for a slow peer hold up nobody:
while they wait, the loop turns and others begin.
"""

from __future__ import annotations

import asyncio
from collections import deque

STARTS = 8  # rollouts that begin in one turn of the event loop


class Turns:
    """First come, first served. One per process and event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def mine(self) -> None:
        """Returns when the caller may begin."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._next)
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        begun = 0
        while self._waiting and begun < STARTS:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                begun += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
