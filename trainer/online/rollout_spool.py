"""The journal of a live run: every task that was drawn and every rollout that was collected. A resumed run repeats neither.

    rollouts_tasks.jsonl       which task each number is, in the order in which they were drawn
    rollouts.jsonl             finished rollouts, in order of completion (wire.md, section 3)
    rollouts_failures.jsonl    those that were given up (section 4)

Each row says in `_ng_train` which task it was an attempt at, and how many batches the oldest weights in it had learned.
Tasks that a curriculum draws depend on which groups were complete first. The order is therefore recorded, not derived: a
row of a task is written after its number, so that a number never is one task before a resumption and another one after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ngym.files.row_log import RowLog
from ngym.schema import Json

from .task_sampler import Drawn, Task

OURS = "_ng_train"


class Place(NamedTuple):
    """Where a row stands."""

    path: Path
    start: int
    end: int


class Spool:
    """The three files of a run, open for writing; on an event loop.

    Args:
        file: rollouts.jsonl; the others stand beside it.
        wanted: whether the task of this number, and its rows, may be asked for.

    Raises:
        FileLocked: another trainer writes them. UsageError: a line is bad.
    """

    def __init__(self, file: Path, wanted: Callable[[int], bool]) -> None:
        self._finished = RowLog(file, _identity)
        self._failed = RowLog(file.with_name(f"{file.stem}_failures{file.suffix}"), _identity)
        self._order = RowLog(file.with_name(f"{file.stem}_tasks{file.suffix}"), _number)
        self._known: dict[tuple[int, int], tuple[str, Place]] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._recording: dict[int, asyncio.Task[None]] = {}
        self.drawn: dict[int, Drawn] = {
            line.row["number"]: Drawn(line.row["environment"], line.row["index"])
            for line in self._order.rows()
            if wanted(line.row["number"])
        }
        for log in (self._finished, self._failed):
            for line in log.rows():
                ours = line.row[OURS]
                number, index = line.row["_ng_task_index"], line.row["_ng_rollout_index"]
                if wanted(number):
                    self._known[number, index] = (ours["task"], Place(log.path, line.start, line.end))

    def __len__(self) -> int:
        return len(self._known)

    def rows(self, number: int, task: str) -> Iterator[Json]:
        """What an earlier life of this run collected for this task under this number, in order; it is told only once."""
        for key in sorted(key for key in self._known if key[0] == number):
            whose, place = self._known.pop(key)
            if whose == task:
                with place.path.open("rb") as file:
                    file.seek(place.start)
                    yield orjson.loads(file.read(place.end - place.start))

    def record(self, task: Task) -> None:
        """Have the number of a task that was just drawn written, before any of its rows."""
        if task.number in self.drawn:
            return
        row = orjson.dumps({"number": task.number, "environment": task.environment, "index": task.index})
        self._recording[task.number] = self._write(self._order.append(row))
        self._recording[task.number].add_done_callback(lambda _: self._recording.pop(task.number))

    def keep(self, row: Json) -> None:
        """Have it written; `check` tells if that failed. It may be used before it is on the disk."""
        self._write(self._append(row))

    async def _append(self, row: Json) -> None:
        if (recording := self._recording.get(row["_ng_task_index"])) is not None:
            await asyncio.shield(recording)
        log = self._failed if "failure" in row else self._finished
        await log.append(orjson.dumps(row))

    def _write(self, writes: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        writing = asyncio.create_task(writes, name="spool")
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        return writing

    def _written(self, writing: asyncio.Task[None]) -> None:
        if writing.cancelled() or writing.exception() is None:
            self._writing.discard(writing)  # a failed one stays, for `check`

    def check(self) -> None:
        """
        Raises:
            DiskFull, WriteFailed: a row could not be written.
        """
        for writing in self._writing:
            if writing.done():
                writing.result()

    async def close(self) -> None:
        """Returns when everything is on the disk.

        Raises:
            DiskFull, WriteFailed: not everything is.
        """
        logs = (self._order, self._finished, self._failed)
        try:
            await asyncio.gather(*self._writing)
            for log in logs:
                await log.flush()
        finally:
            for writing in self._writing:
                writing.cancel()
            await asyncio.gather(*self._writing, return_exceptions=True)
            for log in logs:
                log.close()


def _number(row: Json) -> int:
    number, _, _ = row["number"], row["environment"], row["index"]
    return int(number)


def _identity(row: Json) -> str:
    identity: str = row["ng"]["rollout_id"]
    return identity if OURS in row else ""
