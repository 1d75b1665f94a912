"""The index of a rollout file: row ids, its records in SQLite (or in memory), and how far it has come."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from sqlite3 import OperationalError
from typing import NamedTuple

from ngym.errors import NotFound
from ngym.view.line_record import FIRST_TEXT, Record

PART_BITS = 40
FAILURES = 1  # the part of a run that is its failures file; its rollouts are part 0
LINE = (1 << PART_BITS) - 1
MOST_DIGITS = 12
EDGE_BYTES = 4096  # of a file's beginning, and before a place in it: unchanged as long as it only grew
BUSY_S = 10.0
KEPT_S = 30 * 86400.0  # since it was opened
BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Made when the rows of a file are there: in one go it costs a third of what it would cost row by row.
INDEXES = (
    "CREATE INDEX IF NOT EXISTS rows_of_group ON rows (g)",
    "CREATE INDEX IF NOT EXISTS rows_of_task ON rows (task_key)",
)
TABLES = ("rows", "texts", "groups", "parts", "bad_lines", "fields")
NOT_BEGUN = ("no such table", "unable to open")  # SQLite's message for an index that no process has begun to write


def row_name(seq: int) -> str:
    """How a row is called: its line from 0, in the failures file with an f before it."""
    line = seq & LINE
    return f"f{line}" if seq >> PART_BITS else str(line)


def row_seq(name: str) -> int:
    """
    Raises:
        NotFound: no row is called so.
    """
    digits = name.removeprefix("f")
    if not digits.isascii() or not digits.isdigit() or len(digits) > MOST_DIGITS:
        raise NotFound(f"there is no row {name!r}; rows are called 0, 1, ..., failed attempts f0, f1, ...")
    return int(digits) + ((FAILURES << PART_BITS) if digits != name else 0)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def read_together(fd: int, places: Sequence[tuple[int, int, int]], most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """places: (name, start, size), ascending."""
    first = 0
    while first < len(places):
        start, last = places[first][1], first
        while last + 1 < len(places) and places[last + 1][1] + places[last + 1][2] - start <= most_bytes:
            last += 1
        data = os.pread(fd, places[last][1] + places[last][2] - start, start)
        for name, begin, size in places[first : last + 1]:
            yield name, data[begin - start : begin - start + size]
        first = last + 1


def status(path: Path) -> os.stat_result | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def said(path: Path | str) -> str:
    """A name may have bytes that are not text."""
    return os.fsencode(path).decode("utf-8", "replace")


def size(path: Path) -> int | None:
    try:
        found = status(path)
    except OSError:
        return None
    return None if found is None else found.st_size


def edges(fd: int, end: int) -> tuple[bytes, bytes]:
    """The first bytes of a file, and those before `end`."""
    length = min(EDGE_BYTES, end)
    return os.pread(fd, length, 0), os.pread(fd, length, end - length)


PLAIN, TEXTS = Record._fields[1:FIRST_TEXT], Record._fields[FIRST_TEXT:]

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS rows (seq INTEGER PRIMARY KEY, {", ".join(PLAIN)});
CREATE TABLE IF NOT EXISTS texts (seq INTEGER PRIMARY KEY, {", ".join(TEXTS)});
CREATE TABLE IF NOT EXISTS groups (g INTEGER PRIMARY KEY, task_key, task, task_id, agent, n, scored, total, first);
CREATE INDEX IF NOT EXISTS groups_of_task ON groups (task);
CREATE TABLE IF NOT EXISTS parts (part INTEGER PRIMARY KEY, device, inode, head BLOB, tail BLOB, mtime, bytes, lines, rows,
    bad);
CREATE TABLE IF NOT EXISTS bad_lines (part, line, problem, PRIMARY KEY (part, line));
CREATE TABLE IF NOT EXISTS fields (name TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS state (version INTEGER, epoch INTEGER, read INTEGER);
INSERT INTO state SELECT random() & 0xffffffffff, random() & 0xffffffffff, -1 WHERE NOT EXISTS (SELECT 1 FROM state);
COMMIT;
"""


class Store:
    """One database. note: why it is not stored, for users; None: it is. writable: no other process writes it now."""

    def __init__(self, path: Path | None, note: str | None = None) -> None:
        self.path = path
        self.note = note
        self._lock_fd: int | None = None
        self._file: tuple[int, int] | None = None  # device and inode of what this process writes
        self._writer: sqlite3.Connection | None = None  # kept open: the last one to close would write everything twice
        self._memory = _connected(":memory:") if path is None else None
        self._one_at_a_time = threading.RLock()
        if self._memory is not None:
            self._memory.executescript(SCHEMA)

    def may_write(self) -> bool:
        """Whether this process is the one that writes; the tables are there then.

        Raises:
            sqlite3.Error: it cannot be written at all.
        """
        if self.path is None or self._lock_fd is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            unusable = sqlite3.OperationalError(error.strerror or str(error))
            unusable.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise unusable from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._writer = _connected(str(self.path))
            # By who writes alone: two connections that want to change it at once would both be refused.
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.executescript(SCHEMA)
            os.utime(self.path)
            self._file = _identity(self.path)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        _remove_old(self.path.parent)
        return True

    def is_lost(self) -> bool:
        """Whether the file that this process writes was deleted."""
        return self.path is not None and self._lock_fd is not None and _identity(self.path) != self._file

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection whose statements see one state of the index."""
        with self._connection() as database:
            database.execute("BEGIN")
            try:
                yield database
            finally:
                database.rollback()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The connection of who `may_write`; what is done stays if there is no exception."""
        with self._one_at_a_time:
            database = self._memory or self._writer
            assert database is not None
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.commit()
            finally:
                if database.in_transaction:
                    database.rollback()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if self._memory is not None:
            with self._one_at_a_time:
                yield self._memory
            return
        database = _connected(str(self.path))
        try:
            yield database
        finally:
            database.close()

    def remove(self) -> None:
        """A database that is broken; it is written by this process."""
        assert self.path is not None
        _remove(self.path)

    def close(self) -> None:
        for database in (self._memory, self._writer):
            if database is not None:
                database.close()
        self._writer = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def place(output: Path) -> Path:
    """Where the index of this rollout file is kept: $XDG_CACHE_HOME/ngym/view, or ~/.cache/ngym/view."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    name = sha256(os.fsencode(output) + SCHEMA.encode()).hexdigest()[:24]
    return Path(cache) / "ngym" / "view" / f"{name}.sqlite"


def _identity(path: Path) -> tuple[int, int] | None:
    found = status(path)
    return None if found is None else (found.st_dev, found.st_ino)


def _remove_old(folder: Path) -> None:
    """Indexes that were not opened for long: their files may be gone."""
    for path in folder.glob("*.sqlite"):
        with contextlib.suppress(OSError):  # another viewer does the same
            if time.time() - path.stat().st_mtime > KEPT_S:
                _remove(path)
                path.with_suffix(".lock").unlink()


def _remove(path: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def _connected(name: str) -> sqlite3.Connection:
    database = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA temp_store = MEMORY")
    return database


class Part(NamedTuple):
    """How far a file is indexed. head, tail: the bytes at its beginning and before `bytes`. bad: lines that are not rollouts."""

    device: int = 0
    inode: int = 0
    head: bytes = b""
    tail: bytes = b""
    mtime: int = 0
    bytes: int = 0
    lines: int = 0
    rows: int = 0
    bad: int = 0


class Extent(NamedTuple):
    """How much of a run is indexed, and how much there is.

    version: another one after every change; -1: no process has begun to write it. epoch: another one when the rows are not
    those of before and some more. read: the bytes that the files had when all of them was indexed; -1: that never was.
    """

    version: int
    epoch: int
    read: int
    parts: dict[int, Part]
    sizes: dict[int, int]

    @property
    def rows(self) -> int:
        """Rollouts, without failed attempts."""
        return self.parts[0].rows if 0 in self.parts else 0

    @property
    def failures(self) -> int:
        return self.parts[FAILURES].rows if FAILURES in self.parts else 0

    @property
    def bad(self) -> int:
        return sum(part.bad for part in self.parts.values())

    @property
    def indexed_bytes(self) -> int:
        return sum(part.bytes for part in self.parts.values())

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def extent_of(store: Store, paths: Mapping[int, Path]) -> Extent:
    """
    Raises:
        sqlite3.Error: the index is broken.
    """
    sizes = {part: found for part, path in paths.items() if (found := size(path)) is not None}
    try:
        with store.reading() as database:
            version, epoch, read = database.execute("SELECT version, epoch, read FROM state").fetchone()
            parts = {row[0]: Part(*row[1:]) for row in database.execute("SELECT * FROM parts")}
    except OperationalError as error:
        if not str(error).startswith(NOT_BEGUN):
            raise
        return Extent(-1, -1, -1, {}, sizes)
    return Extent(version, epoch, read, parts, sizes)
