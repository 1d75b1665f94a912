"""Checks the whole input of a collection: a first part before anything starts, the rest while rollouts run.

An input of up to FIRST_BYTES is checked before anything starts. For a larger one, the first part is checked before, and
a thread checks the rest, so that the first rollout does not wait. A bad line there ends the collection with every bad
line named; the finished rollouts are kept, and --resume continues with the corrected input.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import re
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import orjson

from ngym.collect.plan import Recipe, RowCheck, check_agent
from ngym.errors import UsageError
from ngym.files.jsonl import READ_BYTES, CheckedLines, Line

FIRST_BYTES = 16 << 20
BEGIN_S = 1.0  # the first rollouts have the interpreter to themselves
SLICE_S = 0.01  # of the interpreter's time, then as much for the event loop
_NAMED = re.compile(rb'"agent_ref"\s*:\s*\{[^{}]*?"name"\s*:\s*("(?:[^"\\]|\\.)*")')


class InputCheck:
    """Checks every row that a recipe uses, and computes the file's digest.

    Args:
        agents: the agents that exist; None if that is not known.

    Attributes:
        rows: rows checked so far. named: the agents that they name, or --agent. complete: whether all are checked.
        digest: sha256 of the file; None until it is known.
    """

    def __init__(self, path: Path, recipe: Recipe, agents: Collection[str] | None) -> None:
        check_agent(recipe, agents)
        self.rows = 0
        self.named: set[str] = set()
        self.complete = False
        self.digest: str | None = None
        self._path = path
        self._recipe = recipe
        self._lines = CheckedLines(path, RowCheck(recipe, agents), recipe.limit)
        self._left = iter(self._lines)
        self._end = 0  # bytes that were checked
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._rest: Future[None] | None = None

    def first(self, size: int = FIRST_BYTES) -> None:
        """Check the first `size` bytes, or everything if there is a bad line among them.

        Raises:
            UsageError: bad lines; all are named.
        """
        for line in self._left:
            self._count(line)
            if line.end >= size and not self._lines.bad:
                return
        self._all_checked()
        if self._path.stat().st_size <= size:
            self.digest = digest_of(self._path)

    def begin_rest(self) -> None:
        """Check the rest and compute the digest in a thread, unless both are done."""
        if self.digest is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="check the input")
            self._rest = self._thread.submit(self._check_rest)

    def raise_if_bad(self) -> None:
        """
        Raises:
            UsageError: the thread has found bad lines; all are named.
        """
        if self._rest is not None and self._rest.done():
            self._rest.result()

    async def done(self) -> None:
        """Wait for the thread.

        Raises:
            UsageError: there are bad lines; all are named.
        """
        if self._rest is not None:
            self._hurry.set()
            await asyncio.wrap_future(self._rest)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def names_in_rest(self) -> set[str]:
        """The agents that rows after the first part may name, found without parsing them: 1 s for a GB.

        Also finds names in other objects that look like an agent_ref.
        """
        if self.complete or self._path.stat().st_size <= self._end:
            return set()
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = set(_NAMED.findall(content, self._end))
        return {orjson.loads(name) for name in found if _is_text(name)}

    def _check_rest(self) -> None:
        self._hurry.wait(BEGIN_S)
        began = time.perf_counter()
        for line in self._left:
            self._count(line)
            if self._stop.is_set():
                return
            if time.perf_counter() - began > SLICE_S:
                self._hurry.wait(SLICE_S)
                began = time.perf_counter()
        self._all_checked()
        self.digest = digest_of(self._path, self._stop)

    def _count(self, line: Line) -> None:
        self.rows += 1
        self._end = line.end
        reference = line.row.get("agent_ref")
        self.named.add(reference["name"] if reference is not None else str(self._recipe.agent))

    def _all_checked(self) -> None:
        if self.rows == 0:
            raise UsageError(f"{self._path}: no rows in it; each line is one task")
        self.complete = True


def digest_of(path: Path, stop: threading.Event | None = None) -> str | None:
    """sha256 of a file; None if `stop` was set.

    Raises:
        UsageError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(path):
            if stop is not None and stop.is_set():
                return None
            digest.update(part)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            yield part


def _is_text(name: bytes) -> bool:
    try:
        return isinstance(orjson.loads(name), str)
    except orjson.JSONDecodeError:
        return False
