"""Runs the coroutines of blocking calls on an event loop in a thread; an interrupt cancels them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

import uvloop

from ngym.errors import NgymError

Result = TypeVar("Result")
TICK_S = 0.25
_RUNNING: set[asyncio.Task[Any]] = set()


def _nothing() -> None:
    return None


class Background:
    """An event loop in its own daemon thread, until `close`. It handles no signals."""

    def __init__(self, name: str) -> None:
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self._begun.wait()

    def begin(self, work: Coroutine[Any, Any, Result]) -> Work[Result]:
        """Start a coroutine on the loop."""
        return Work(self._loop, work)

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive() and not self._end.is_set()

    def end(self) -> None:
        """Stop the loop and cancel what still runs on it; returns at once."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end.set)

    def close(self) -> None:
        """End the loop, and wait until everything on it has ended."""
        self.end()
        self._thread.join()

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._begun.set()
        await self._end.wait()


class Work(Generic[Result]):
    """A coroutine on a background loop, and two ways to wait for it: blocking, and awaited on another loop.

    While waiting, they call `tick` a few times a second, in the waiting thread. If the wait is interrupted (Ctrl-C, a
    kernel's interrupt, a cancelled task), the coroutine is cancelled, and the wait continues until it has ended;
    another interrupt calls `hurry`, on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> None:
        self._loop = loop
        # Held until the end. A plain lock: an interrupt at any moment can leave the locks inside Event and Future held.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._ended = False
        self._awaiting: list[Callable[[], object]] = []
        loop.call_soon_threadsafe(self._start, work)

    def result(self, tick: Callable[[], None] = _nothing, hurry: Callable[[], None] = _nothing) -> Result:
        """Block until the coroutine has ended, and return its result."""
        try:
            while not self._ended:
                self._under_way.acquire(timeout=TICK_S)
                tick()
        except BaseException:
            self._cancel()
            while not self._ended:
                try:
                    self._under_way.acquire(timeout=TICK_S)
                except KeyboardInterrupt:
                    self._loop.call_soon_threadsafe(hurry)
            raise
        return self._outcome()

    async def awaited(self, tick: Callable[[], None] = _nothing, hurry: Callable[[], None] = _nothing) -> Result:
        """As `result`, for a coroutine: its own loop continues to run."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        self._loop.call_soon_threadsafe(self._tell, lambda: loop.call_soon_threadsafe(ended.set))
        waiting = asyncio.create_task(ended.wait())
        try:
            while not ended.is_set():
                await asyncio.wait([waiting], timeout=TICK_S)
                tick()
        except BaseException:
            self._cancel()
            while not ended.is_set():
                try:
                    await asyncio.wait([waiting])
                except asyncio.CancelledError:
                    self._loop.call_soon_threadsafe(hurry)
            raise
        return self._outcome()

    def _outcome(self) -> Result:
        if self._task.cancelled():
            raise NgymError("the call was stopped before its end, and so were the services that it used")
        return self._task.result()

    def _start(self, work: Coroutine[Any, Any, Result]) -> None:
        self._task = self._loop.create_task(work)
        _RUNNING.add(self._task)  # an event loop only has weak references to its tasks
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _tell(self, ended: Callable[[], object]) -> None:
        if self._ended:
            ended()
        else:
            self._awaiting.append(ended)

    def _end(self, task: asyncio.Task[Result]) -> None:
        _RUNNING.discard(task)
        self._ended = True
        self._under_way.release()
        for tell in self._awaiting:
            tell()
        if not task.cancelled():
            task.exception()  # marks the error as retrieved: there may be no waiter
