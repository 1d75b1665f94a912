"""CPU-heavy checks answer within their deadline, whatever they are fed: warm forked workers, killed when they overrun.

    server ──calls, one at a time each──> worker, worker, ...     own CPU timer, own memory limit
       └──────────control──────────────> zygote                   imports and warms once, forks and buries workers

Threads cannot be stopped (one `9**9**9**9` holds the interpreter's lock for good) and a process per call pays for its
imports every time; a worker forked from a warm zygote starts in milliseconds and dies in one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from ngym.errors import NotReady, Overloaded
from ngym.workers.processes import Outcome, Worker, Zygote, ZygoteLost


class WorkerPool:
    """Runs one function in worker processes. The function is found by file and name and takes and returns plain JSON.

    Workers limit time and memory. They are no sandbox: files and network are open to what runs in them.

    Args:
        file: the module that has the function; relative imports of its siblings work.
        function: the function's name there.
        warm: a function there that is called once before any worker is forked (fill caches, build tables).
        workers: how many calls run at once; the usable cores by default. Each is forked when first needed.
        deadline_s: CPU seconds that a call may use, unless `run` says otherwise; WALL_FACTOR times as much wall time
            is the backstop.
        memory_mib: address space of a worker.
        recycle_after: a worker is replaced after so many calls, so that what the function leaks is given back.
        backlog: calls that may wait for a worker; one more is refused.
    """

    def __init__(
        self,
        file: str | Path,
        function: str,
        *,
        warm: str | None = None,
        workers: int | None = None,
        deadline_s: float = 5.0,
        memory_mib: int = 2048,
        recycle_after: int = 1000,
        backlog: int = 16384,
    ) -> None:
        self.file = Path(file).resolve()
        self.function = function
        self.warm = warm
        self.workers = workers or usable_cores()
        self.deadline_s = deadline_s
        self.memory_mib = memory_mib
        self.recycle_after = recycle_after
        self.backlog = backlog
        self._slots: _Slots | None = None

    async def run(self, *args: Any, deadline_s: float | None = None) -> Outcome:
        """Call the function with JSON values; its outcome comes within the deadline. Cancelling ends the call.

        Raises:
            Overloaded: `backlog` calls are waiting already.
            ServiceError: the function's file cannot be loaded.
        """
        deadline_s = deadline_s or self.deadline_s
        line = orjson.dumps([deadline_s, args]) + b"\n"
        slots = self._slots = self._slots or _Slots(self)
        slot = await slots.take()
        slot.wanted = True
        # A task of its own: a caller that is cancelled must not leave a half-made worker or a half-read reply behind.
        task = asyncio.create_task(slots.run(slot, line, deadline_s))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():  # else the slot serves somebody else by now
                slot.hang_up()
            raise

    async def start(self) -> None:
        """Load and warm now; without this, the first call does. ServiceError says why it cannot."""
        slots = self._slots = self._slots or _Slots(self)
        await slots.zygote()

    async def aclose(self) -> None:
        """End every process of the pool; calls under way end with NotReady."""
        slots, self._slots = self._slots, None
        if slots is not None:
            await slots.close()

    @asynccontextmanager
    async def lifespan(self, context: object = None) -> AsyncIterator[None]:
        """The pool as a service's `lifespan=`: warm before the service is ready, ended with it."""
        try:
            await self.start()
            yield
        finally:
            await self.aclose()


def usable_cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine's."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Slot:
    """A place for one worker, forked when first needed."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.wanted = False  # somebody waits for the call that is under way

    def hang_up(self) -> None:
        self.wanted = False
        if self.worker is not None:
            self.worker.hang_up()


class _Slots:
    """A started pool: its zygote, its slots, the calls under way. Belongs to one event loop."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._waiting = 0
        # Last in, first out: a light load keeps to few workers, and the others are never forked.
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for _ in range(pool.workers):
            self._free.put_nowait(_Slot())

    async def take(self) -> _Slot:
        """A free slot; `run` gives it back."""
        if self._waiting >= self._pool.backlog:
            raise Overloaded(f"{self._waiting} calls of {self._pool.function!r} are waiting for a worker already")
        self._waiting += 1
        try:
            return await self._free.get()
        finally:
            self._waiting -= 1

    async def run(self, slot: _Slot, line: bytes, deadline_s: float) -> Outcome:
        try:
            for _ in range(2):  # a worker that goes down with its zygote is not this call's doing: once more
                with suppress(ZygoteLost):
                    return await self._attempt(slot, line, deadline_s)
            detail = "the processes of the worker pool died twice during this call"
            return Outcome("crash", detail=detail, infra=True)
        finally:
            self._free.put_nowait(slot)

    async def _attempt(self, slot: _Slot, line: bytes, deadline_s: float) -> Outcome:
        if slot.worker is not None and slot.worker.died():
            await self._drop(slot)
        if slot.worker is None:
            slot.worker = await (await self.zygote()).fork()
        if not slot.wanted:
            return Outcome("crash", detail="nobody waits for this call any more", infra=True)
        outcome = await slot.worker.call(line, deadline_s)
        worn = slot.worker.calls >= self._pool.recycle_after or outcome.kind == "memory"
        if worn or slot.worker.gone:
            await self._drop(slot)
        return outcome

    async def _drop(self, slot: _Slot) -> None:
        worker, slot.worker = slot.worker, None
        if worker is not None and not worker.gone:
            with suppress(ZygoteLost):
                await worker.bury()

    async def zygote(self) -> Zygote:
        """The zygote; a new one where there was none or it died."""
        async with self._starting:
            if self._closed:
                raise NotReady(f"the worker pool of {self._pool.function!r} is closing")
            if self._zygote is None or not self._zygote.alive():
                await self._end_zygote()
                pool = self._pool
                self._zygote = await Zygote.start(pool.file, pool.function, pool.warm, pool.memory_mib << 20)
            return self._zygote

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            await self._end_zygote()

    async def _end_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.end()
