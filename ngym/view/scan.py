"""Which records stand in these bytes of a file? A block of whole lines -> a batch; in a helper process, too: `python -m ngym.view.scan`.

A helper reads jobs, one JSON object a line, and answers each with a batch, one JSON object a line.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import orjson

from ngym.view.line_record import FIRST_TEXT, NoRollout, Record, record

MOST_LINE_BYTES = 256 << 20
BUFFER_BYTES, SKIPPED_BYTES = 256 << 10, 1 << 20
REPORTED = 20  # bad lines of a batch that are named
_G, _KEY, _TASK, _TASK_ID, _AGENT = map(Record._fields.index, ("g", "task_key", "task", "task_id", "agent"))
_REWARD, _FAILURE = (Record._fields.index(name) for name in ("reward", "failure"))


class Job(NamedTuple):
    """The lines that begin in [start, end) of a file that had `size` bytes."""

    path: str
    start: int
    end: int
    size: int


@dataclass
class Batch:
    """What stands there; lines are counted from the block's first. end: of the last line, the start of a torn one.

    rows, texts: the two parts of each record, with its line before the texts; as they go into the index's tables.
    """

    end: int
    lines: int = 0
    rows: list[Any] = field(default_factory=list)
    texts: list[Any] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    bad_lines: int = 0
    groups: list[Any] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)


class GroupSum:
    """A group's rollouts in one batch, without failed attempts, to be added to those of others."""

    __slots__ = ("first", "n", "scored", "total")

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.first = row
        self.n = self.scored = 0
        self.total = 0.0

    def add(self, row: tuple[Any, ...]) -> None:
        if row[_FAILURE] is not None:
            return
        self.n += 1
        reward = row[_REWARD]
        if reward is not None:
            self.scored += 1
            self.total += reward

    def values(self) -> tuple[Any, ...]:
        """In the order of the index's table."""
        g, key, task, task_id, agent = (self.first[place] for place in (_G, _KEY, _TASK, _TASK_ID, _AGENT))
        return (g, key, task, task_id, agent, self.n, self.scored, self.total, self.first[0])


def scan(job: Job) -> Batch:
    """
    Raises:
        OSError: the file cannot be read.
    """
    # One buffer, read line by line: large blocks of their own would cost more in fresh memory than their parsing does.
    with open(job.path, "rb", buffering=BUFFER_BYTES) as file:
        place = _first_line(file, job)
        found = _Found(Batch(place))
        while place < job.end:
            text = file.readline(min(MOST_LINE_BYTES, job.size - place))
            if not text or not found.add(text, place):
                break  # a torn last line
            place += len(text)
            if not text.endswith(b"\n") and place < job.size:
                place = _next_line(file, place, job.size)
            found.batch.end = place
        return found.whole()


def _first_line(file: BinaryIO, job: Job) -> int:
    """Where the first line begins that is this block's: one that began before belongs to the block before."""
    if job.start == 0:
        return 0
    file.seek(job.start - 1)
    return job.start if file.read(1) == b"\n" else _next_line(file, job.start, job.size)


def _next_line(file: BinaryIO, place: int, size: int) -> int:
    """Behind the line in which this place is."""
    while place < size:
        text = file.readline(min(SKIPPED_BYTES, size - place))
        place += len(text)
        if not text or text.endswith(b"\n"):
            break
    return place


class _Found:
    """A batch while it is made."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._groups: dict[int, GroupSum] = {}
        self._fields: set[str] = set()

    def add(self, text: bytes, start: int) -> bool:
        """Whether the line counts: one without its end does if it is an object, of which no beginning is one."""
        batch = self.batch
        ended = text.endswith(b"\n")
        if text.isspace():
            batch.lines += ended
            return ended
        try:
            row = record(text, batch.lines, start, len(text) - ended)
        except NoRollout as error:
            if not ended and len(text) < MOST_LINE_BYTES:
                return False
            batch.bad_lines += 1
            if len(batch.bad) < REPORTED:
                batch.bad.append((batch.lines, str(error)))
        else:
            self._add(row)
        batch.lines += 1
        return True

    def _add(self, row: Record) -> None:
        self.batch.rows.append(row[:FIRST_TEXT])
        self.batch.texts.append((row.line, *row[FIRST_TEXT:]))
        if row.fields is not None:
            self._fields.update(orjson.loads(row.fields))
        if row.g is not None:
            group = self._groups.get(row.g)
            if group is None:
                group = self._groups[row.g] = GroupSum(row)
            group.add(row)

    def whole(self) -> Batch:
        self.batch.groups = [group.values() for group in self._groups.values()]
        self.batch.fields = sorted(self._fields)
        return self.batch


def serve(asked: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more jobs. A file that cannot be read is an answer, too."""
    for line in iter(asked.readline, b""):
        try:
            batch = scan(Job(**orjson.loads(line)))
            told: Any = batch
        except OSError as error:
            told = {"error": error.strerror or str(error)}
        answers.write(orjson.dumps(told) + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
