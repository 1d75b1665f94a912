"""Where are many bytes read? In helper processes, block by block; the batches come back in the order of the file."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Self

import orjson

from ngym.errors import NgymError
from ngym.view.scan import Batch, Job, scan

BLOCK_BYTES = 8 << 20
FIRST_BYTES = 1 << 20  # the first block of a file, so that its rows can be shown at once
SMALL_BYTES = 16 << 20  # as little is read in this process
MOST_HELPERS = 4
AHEAD = 2  # jobs that a helper is given before it has answered
PIPE_BYTES = 1 << 20
ONE_FILE = threading.Lock()  # is read by helpers at a time: more would only compete
SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)


def scanned(path: str, start: int, size: int) -> Iterator[Batch]:
    """What stands in the bytes from `start` to `size`, in order.

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
        with suppress(BrokenPipeError):  # `take` tells
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
