"""Append-only JSONL files with one writer. `RowLog`: rows are durable, a torn last line and duplicate rows are dropped.
`LossyRowLog`: a full disk loses rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from bisect import bisect
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Self

from ngym.errors import NgymError, UsageError
from ngym.files.atomic import WriteFailed, open_locked, sync_folder
from ngym.files.jsonl import READ_BYTES, Line, read
from ngym.option_names import another_output, option
from ngym.schema import Json

COMMIT_ROWS = 64
COMMIT_S = 0.05
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# macOS has no fdatasync
_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class DiskFull(NgymError):
    """The disk was full for longer than the limit."""


class RowLog:
    """An append-only JSONL file with one writer; `append` returns when the row is on the disk.

    Opening locks the file; `rows()` drops a torn last line and must be exhausted before the first `append`. Rows are
    written in batches: one write and one fdatasync for every 64 rows or 50 ms, in a thread. A full disk leaves no torn
    row: the file is truncated to its last complete row, and the write is retried until there is room.

    Args:
        key: identifies a row; later rows with the same key are dropped.
        on_stall: called with a reason when the disk is full, and with None when it no longer is.
        retry_s, give_up_s: interval of retries on a full disk, and their total time (then DiskFull).

    Raises:
        FileLocked: another process has it open; the message has its pid.
        UsageError: the file cannot be opened, or a line in its middle is bad.
    """

    def __init__(
        self,
        path: Path,
        key: Callable[[Json], Hashable],
        *,
        on_stall: Callable[[str | None], None] = lambda reason: None,
        retry_s: float = 5.0,
        give_up_s: float = 600.0,
    ) -> None:
        self.path = path
        self._repeated: list[tuple[int, int]] = []  # of each duplicate its start, and the bytes of all up to it
        self._key = key
        self._on_stall = on_stall
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._ending = False
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._many = asyncio.Event()
        self._committer: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"write {path.name}")
        self._writing: Future[None] | None = None
        self._fd = open_locked(path, path, another_output())
        self._size = os.fstat(self._fd).st_size

    @property
    def empty(self) -> bool:
        return self._size == 0

    @property
    def duplicates(self) -> int:
        """The number of rows that `rows()` has dropped."""
        return len(self._repeated)

    def start_of(self, line: Line) -> int:
        """The first byte of a row in the repaired file. line: as `rows()` yields it, with its place before the repair."""
        before = bisect(self._repeated, line.start, key=itemgetter(0))
        return line.start - (self._repeated[before - 1][1] if before else 0)

    def cut(self, start: int) -> None:
        """Drop every row from this byte on (`start_of` a row); after `rows()`, before the first `append`."""
        os.ftruncate(self._fd, start)
        self._size = start

    def rows(self) -> Iterator[Line]:
        """Yield each row of the file once; then repair the file: no torn last line, no duplicates."""
        keys: set[Hashable] = set()
        repeated: list[Line] = []
        last: Line | None = None
        for line in read(self.path):
            last = line
            if line.problem or (key := self._key_of(line)) is None:
                if line.complete:
                    raise UsageError(self._corrupt(line))
                continue
            if key in keys:
                repeated.append(line)
                size = self._repeated[-1][1] if self._repeated else 0
                self._repeated.append((line.start, size + line.end - line.start))
                continue
            keys.add(key)
            yield line
        try:
            if last is not None and not last.complete:
                self._repair_tail(last)
            if repeated:
                self._cut_out(repeated)
        except OSError as error:
            raise WriteFailed(f"{self.path}: cannot be repaired: {error.strerror}") from error

    async def append(self, row: bytes) -> None:
        """Add one row (JSON without a newline); returns once it is on the disk, in the order of the calls.

        Raises:
            DiskFull, WriteFailed: it is not on the disk.
        """
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_forever(), name=f"commit {self.path.name}")
        elif self._committer.done():
            self._committer.result()  # raises its error
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, written))
        self._wake.set()
        if len(self._waiting) >= COMMIT_ROWS:
            self._many.set()
        await written

    async def flush(self) -> None:
        """Write pending rows, also of appenders that were cancelled; nothing can be appended afterwards.

        If it is cancelled, such as while the disk is full, pending rows are lost.

        Raises:
            DiskFull, WriteFailed: not all rows are on the disk.
        """
        self._ending = True
        self._wake.set()
        self._many.set()
        if self._committer is not None:
            await self._committer

    def close(self, *, remove_empty: bool = True) -> None:
        """Close and unlock the file; an empty one is removed. A hanging write keeps it open until it ends."""
        self._thread.shutdown(wait=False)
        if self._writing is not None and not self._writing.done():
            self._writing.add_done_callback(lambda _: os.close(self._fd))
            return
        if self.empty and remove_empty:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    async def _commit_forever(self) -> None:
        try:
            while self._waiting or not self._ending:
                await self._batch_is_due()
                batch = self._waiting[:]
                await self._commit(b"".join([row + b"\n" for row, _ in batch]))
                del self._waiting[: len(batch)]
                for _, written in batch:
                    if not written.done():
                        written.set_result(None)
        except Exception as error:
            for _, written in self._waiting:
                if not written.done():
                    written.set_exception(error)
            raise

    async def _batch_is_due(self) -> None:
        """Wait until 64 rows are pending, some have been pending for 50 ms, or the log ends."""
        if not self._ending:
            if not self._waiting:
                self._wake.clear()
            if len(self._waiting) < COMMIT_ROWS:
                self._many.clear()
        await self._wake.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_S):
                await self._many.wait()

    async def _commit(self, data: bytes) -> None:
        """Write and sync in a thread; retry while the disk is full."""
        loop = asyncio.get_running_loop()
        full_since: float | None = None
        while True:
            try:
                self._writing = self._thread.submit(self._write, data)
                await asyncio.wrap_future(self._writing)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise WriteFailed(f"{self.path}: cannot be written: {error.strerror}") from error
                full_since = full_since or loop.time()
                if loop.time() - full_since >= self._give_up_s:
                    raise DiskFull(
                        f"{self.path}: {error.strerror} for {self._give_up_s:.0f} s; make room, then run again with {option('resume', True)}"
                    ) from None
                self._on_stall(f"{self.path}: {error.strerror}")
                await asyncio.sleep(self._retry_s)
            else:
                if full_since is not None:
                    self._on_stall(None)
                return

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            _sync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        if os.fstat(self._fd).st_nlink == 0:
            raise WriteFailed(f"{self.path} was deleted while it was written, and its rows are gone; start again")
        self._size += len(data)

    def _key_of(self, line: Line) -> Hashable | None:
        """The row's key; None for a row without one, so that a row of another format is a bad line."""
        try:
            return self._key(line.row)
        except (KeyError, TypeError, ValueError):
            return None

    def _corrupt(self, line: Line) -> str:
        problem = line.problem or "not a row that was written here (its task and rollout indices are missing)"
        return (
            f"{self.path}:{line.number} (byte {line.start}): {problem}; "
            f"fix or delete that line, or start again with {option('overwrite', True)}"
        )

    def _repair_tail(self, last: Line) -> None:
        """Repair a last line without newline: a complete row gets one, a torn row (never a valid object) is cut."""
        if last.problem or self._key_of(last) is None:
            os.ftruncate(self._fd, last.start)
            self._size = last.start
        else:
            os.write(self._fd, b"\n")
            self._size = last.end + 1
        _sync(self._fd)

    def _cut_out(self, lines: list[Line]) -> None:
        """Write a copy without these lines, and replace the file and its lock with it."""
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        new_fd = open_locked(temporary, temporary, another_output())
        start = 0
        for line in lines:
            _copy(self._fd, new_fd, start, line.start)
            start = line.end
        _copy(self._fd, new_fd, start, self._size)
        _sync(new_fd)
        temporary.rename(self.path)
        sync_folder(self.path.parent)
        os.close(self._fd)
        self._fd, self._size = new_fd, os.fstat(new_fd).st_size


class LossyRowLog:
    """A file to which a training run appends each row whole or not at all; a full disk loses rows, and the run goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reported = False

    def __enter__(self) -> Self:
        self._file = self._path.open("ab", buffering=0)
        self._size = self._end = os.fstat(self._file.fileno()).st_size
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: bytes) -> str | None:
        """Append a row; returns a message when rows are lost, once."""
        try:
            self._cut_partial_row()
            self._end += self._file.write(row)
            if self._end != self._size + len(row):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size = self._end
        except OSError as error:
            with contextlib.suppress(OSError):  # tried again before the next row
                self._cut_partial_row()  # a checkpoint that is written now records the length of the file
            if not self._reported:
                self._reported = True
                return f"{self._path}: entries are lost: {error.strerror}; training continues"
        return None

    def _cut_partial_row(self) -> None:
        """Remove the rest of a partial write."""
        if self._end != self._size:
            os.ftruncate(self._file.fileno(), self._size)
            self._end = self._size


def _copy(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        part = os.pread(source, min(READ_BYTES, end - start), start)
        start += os.write(target, part)
