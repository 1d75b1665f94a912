"""The number of replicas of a model with `replicas: {min, max}`: it grows while calls wait, and shrinks when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ngym.config.service_config import ReplicaRange

LOAD_CHECK_S = 2.0
GROW_AFTER_S = 5.0
SHRINK_AFTER_S = 60.0


class ReplicaLoad(NamedTuple):
    """ready: replicas that take calls. changing: those that start or stop. waiting, running: calls.

    failed: those that were added and could not start. They are removed first, before another is tried.
    """

    ready: int
    changing: int
    waiting: int
    running: int
    failed: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether one replica less could run each call on a replica of its own."""
        return self.waiting == 0 and self.running < self.ready


def step(bounds: ReplicaRange, load: ReplicaLoad, waiting_s: float, idle_s: float) -> int:
    """The change of the number of replicas: 1, 0 or -1; 0 until the last change is done.

    waiting_s, idle_s: for how long calls have been waiting without a pause, and for how long the replicas were idle.
    """
    if load.changing:
        return 0
    if waiting_s >= GROW_AFTER_S and load.waiting and load.ready < bounds.max and not load.failed:
        return 1
    if idle_s >= SHRINK_AFTER_S and load.is_idle and (load.failed or load.ready > bounds.min):
        return -1
    return 0


async def follow_load(
    bounds: ReplicaRange, look: Callable[[], Awaitable[ReplicaLoad | None]], change: Callable[[int], Awaitable[None]]
) -> None:
    """Look at the load forever, and change the number of replicas. look: None if the load is not known."""
    waiting_since = idle_since = time.monotonic()
    while True:
        await asyncio.sleep(LOAD_CHECK_S)
        load, now = await look(), time.monotonic()
        if load is None or not load.waiting:
            waiting_since = now
        if load is None or not load.is_idle:
            idle_since = now
        if load is not None and (by := step(bounds, load, now - waiting_since, now - idle_since)):
            await change(by)
            waiting_since = idle_since = time.monotonic()
