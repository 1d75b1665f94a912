"""Reads rollout files block by block in helper processes; batches arrive in the order of the file.

A helper reads jobs, one JSON object a line, and answers each with a batch, one JSON object a line.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Self

import orjson

from ngym.errors import NgymError
from ngym.view.line_record import FIRST_TEXT, NoRollout, Record, record

MOST_LINE_BYTES = 256 << 20
REPORTED = 20  # bad lines of a batch that are named
BLOCK_BYTES = 8 << 20
FIRST_BYTES = 1 << 20  # the first block of a file, so that its rows can be shown at once
SMALL_BYTES = 16 << 20  # as little is read in this process
MOST_HELPERS = 4
AHEAD = 2  # jobs that a helper is given before it has answered
PIPE_BYTES = 1 << 20
ONE_FILE = threading.Lock()  # is read by helpers at a time: more would only compete
SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)


BUFFER_BYTES, SKIPPED_BYTES = 256 << 10, 1 << 20
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
    """The rows of a block; lines are counted from its first. end: of the last line, the start of an incomplete one.

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


def scanned(path: str, start: int, size: int) -> Iterator[Batch]:
    """The rows in the bytes from `start` to `size`, in order.

    Raises:
        OSError: the file cannot be read. NgymError: a helper has ended.
    """
    jobs = list(_jobs(path, start, size))
    if size - start <= SMALL_BYTES:
        yield from map(scan, jobs)
        return
    with ONE_FILE, ExitStack() as stack:
        helpers = [stack.enter_context(_Helper()) for _ in range(min(MOST_HELPERS, len(os.sched_getaffinity(0))))]
        yield scan(jobs[0])
        yield from _shared(helpers, jobs[1:])


def _jobs(path: str, start: int, size: int) -> Iterator[Job]:
    end = start + FIRST_BYTES
    while start < size:
        yield Job(path, start, min(end, size), size)
        start, end = end, end + BLOCK_BYTES


def _shared(helpers: Sequence[_Helper], jobs: Sequence[Job]) -> Iterator[Batch]:
    """Job i is helper i mod n's; so the answers are in order without a queue."""
    count = len(helpers)
    for place, job in enumerate(jobs[: count * AHEAD]):
        helpers[place % count].give(job)
    for place in range(len(jobs)):
        helper = helpers[place % count]
        batch = helper.take()
        if place + count * AHEAD < len(jobs):
            helper.give(jobs[place + count * AHEAD])
        yield batch


class _Helper:
    """A process that scans."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: a module that lies in the folder from which the viewer was started is not ours
            [sys.executable, "-P", "-m", "ngym.view.scan"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        with suppress(OSError):  # a smaller pipe works, too
            fcntl.fcntl(self._out.fileno(), SET_PIPE_SIZE, PIPE_BYTES)

    def give(self, job: Job) -> None:
        with suppress(BrokenPipeError):  # `take` reports it
            self._in.write(orjson.dumps(job._asdict()) + b"\n")
            self._in.flush()

    def take(self) -> Batch:
        line = self._out.readline()
        if not line:
            raise NgymError(
                f"a process that reads the file ended with code {self._process.wait()}; start ng_view again"
            )
        told = orjson.loads(line)
        if "error" in told:
            raise OSError(told["error"])
        return Batch(**told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
