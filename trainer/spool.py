"""Every rollout that a run collected, on the disk before long: what a trainer that died had collected need not be again.

    rollouts.jsonl             finished rollouts, in order of completion (wire.md, section 3)
    rollouts_failures.jsonl    those that were given up (section 4)

Each row says in `_ng_train` which task it was an attempt at, and how many batches the oldest weights in it had learned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from ngym.rowlog import RowLog
from ngym.schema import Json

OURS = "_ng_train"


class Place(NamedTuple):
    """Where a row stands."""

    path: Path
    start: int
    end: int


class Spool:
    """The two files of a run, open for writing; on an event loop.

    Args:
        file: rollouts.jsonl; the failures stand beside it.
        wanted: whether rows of the task of this number may be asked for.

    Raises:
        FileLocked: another trainer writes them. UsageError: a line is bad.
    """

    def __init__(self, file: Path, wanted: Callable[[int], bool]) -> None:
        self._finished = RowLog(file, _identity)
        self._failed = RowLog(file.with_name(f"{file.stem}_failures{file.suffix}"), _identity)
        self._known: dict[tuple[int, int], tuple[str, Place]] = {}
        self._writing: set[asyncio.Task[None]] = set()
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

    def keep(self, row: Json) -> None:
        """Have it written; `check` tells if that failed. It may be used before it is on the disk."""
        log = self._failed if "failure" in row else self._finished
        writing = asyncio.create_task(log.append(orjson.dumps(row)), name="spool")
        self._writing.add(writing)
        writing.add_done_callback(self._written)

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
        try:
            await self._finished.flush()
            await self._failed.flush()
        finally:
            for writing in self._writing:
                writing.cancel()
            await asyncio.gather(*self._writing, return_exceptions=True)
            self._finished.close()
            self._failed.close()


def _identity(row: Json) -> str:
    identity: str = row["ng"]["rollout_id"]
    return identity if OURS in row else ""
