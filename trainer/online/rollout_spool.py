"""The journal of a live run: every drawn task and every collected rollout, so that a resumed run repeats neither.

    rollouts_tasks.jsonl       the task of each number, in the order of the draws
    rollouts.jsonl             finished rollouts, in order of completion (wire.md, section 3)
    rollouts_failures.jsonl    failed rollouts (section 4)

`_ng_train` in each row has the task's number and the number of batches behind the oldest weights in it. The draws of a
curriculum depend on which groups finish first, so their order is recorded instead of derived. A task's number is
written before its rows, so that a number means the same task after a resumption.
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
    """The position of a row."""

    path: Path
    start: int
    end: int


class Spool:
    """The three files of a run, open for writing; on an event loop.

    Args:
        file: rollouts.jsonl; the others are next to it.
        wanted: whether the task with this number, and its rows, may be requested.

    Raises:
        FileLocked: another trainer writes them. UsageError: a line is invalid.
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
        """The rows that were collected for this task and number before a resumption, in order; each is returned only
        once.
        """
        for key in sorted(key for key in self._known if key[0] == number):
            whose, place = self._known.pop(key)
            if whose == task:
                with place.path.open("rb") as file:
                    file.seek(place.start)
                    yield orjson.loads(file.read(place.end - place.start))

    def record(self, task: Task) -> None:
        """Write the number of a newly drawn task, before any of its rows."""
        if task.number in self.drawn:
            return
        row = orjson.dumps({"number": task.number, "environment": task.environment, "index": task.index})
        self._recording[task.number] = self._write(self._order.append(row))
        self._recording[task.number].add_done_callback(lambda _: self._recording.pop(task.number))

    def keep(self, row: Json) -> None:
        """Write a row in the background; `check` raises if that failed. The row may be used before it is on the disk."""
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
            DiskFull, WriteFailed: some rows could not be written.
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
