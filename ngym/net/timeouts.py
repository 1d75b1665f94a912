"""Timeouts of requests. A timer of the event loop costs 2.5 microseconds, and a rollout's request would need four.

Timers of several seconds share one timer of the loop, which ticks while there are any. They fire up to TICK_S late.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

TICK_S = 0.25
EXACT_S = 4.0  # shorter timeouts get a timer of their own


class Timer(Protocol):
    def cancel(self) -> object: ...


class SharedTimer:
    """A callback that is due at a tick."""

    __slots__ = ("_callback", "_due")

    def __init__(self, due: dict[SharedTimer, None], callback: Callable[[], object]) -> None:
        self._due = due
        self._callback: Callable[[], object] | None = callback
        due[self] = None

    def cancel(self) -> None:
        self._due.pop(self, None)
        self._callback = None  # its object may hold this timer: a circle that would keep a request alive

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class _Ticks:
    """The shared timers of one event loop, by the tick at which they are due."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: dict[int, dict[SharedTimer, None]] = {}
        self._next: int | None = None  # the tick that the loop's timer waits for

    def later(self, delay_s: float, callback: Callable[[], object]) -> SharedTimer:
        now = self.loop.time()
        tick = int((now + delay_s) / TICK_S) + 1
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = {}
        if self._next is None:
            self._wait(int(now / TICK_S) + 1)
        return SharedTimer(due, callback)

    def _wait(self, tick: int) -> None:
        self._next = tick
        self.loop.call_at(tick * TICK_S, self._tick)

    def _tick(self) -> None:
        assert self._next is not None
        reached, self._next = max(self._next, int(self.loop.time() / TICK_S)), None
        for tick in sorted(self._due):
            due = self._due[tick]
            if tick <= reached:
                del self._due[tick]
                for timer in tuple(due):
                    timer.fire()
            elif not due:
                del self._due[tick]
        if self._due and self._next is None:
            self._wait(reached + 1)


_of_thread = threading.local()


def later(delay_s: float, callback: Callable[[], object]) -> SharedTimer:
    """Call back after this time, or up to TICK_S later."""
    loop = asyncio.get_running_loop()
    ticks: _Ticks | None = getattr(_of_thread, "ticks", None)
    if ticks is None or ticks.loop is not loop:
        ticks = _of_thread.ticks = _Ticks(loop)
    return ticks.later(delay_s, callback)


class Timeout:
    """`with Timeout(seconds):` cancels what is awaited inside after this time, and raises TimeoutError.

    As asyncio.timeout, but a timeout of more than EXACT_S comes up to TICK_S late.

    Attributes:
        expired: whether the time has passed.
    """

    __slots__ = ("_cancelling", "_seconds", "_task", "_timer", "expired")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a timeout needs a task"
        self._task: asyncio.Task[object] = task
        self._cancelling = task.cancelling()
        seconds = self._seconds
        self._timer: Timer = (
            later(seconds, self._expire)
            if seconds > EXACT_S
            else asyncio.get_running_loop().call_later(seconds, self._expire)
        )
        return self

    def _expire(self) -> None:
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
