"""Indexes a rollout file while it grows; a separate process reads it."""

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
from threading import Event
from typing import Any, NamedTuple

import orjson

from ngym.errors import NgymError, NotFound
from ngym.view.file_scanner import FIRST_TEXT, REPORTED, ScannedBatch, ScannedLine, scan_rows

PART_BITS = 40
FAILURES = 1  # the part of a run that is its failures file; its rollouts are part 0
LINE = (1 << PART_BITS) - 1
MAX_DIGITS = 12
EDGE_BYTES = 4096  # of a file's beginning, and before a place in it: unchanged as long as it only grew
BUSY_S = 10.0
INDEX_LIFETIME_S = 30 * 86400.0  # since it was opened
BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Made when the rows of a file are there: in one go it costs a third of what it would cost row by row.
INDEXES = (
    "CREATE INDEX IF NOT EXISTS rows_of_group ON rows (g)",
    "CREATE INDEX IF NOT EXISTS rows_of_task ON rows (task_key)",
)
TABLES = ("rows", "texts", "groups", "parts", "bad_lines", "fields")
NOT_BEGUN = ("no such table", "unable to open")  # SQLite's message for an index that no process has begun to write


def row_name(seq: int) -> str:
    """The name of a row: its line from 0, in the failures file with an f before it."""
    line = seq & LINE
    return f"f{line}" if seq >> PART_BITS else str(line)


def row_seq(name: str) -> int:
    """
    Raises:
        NotFound: no row is called so.
    """
    digits = name.removeprefix("f")
    if not digits.isascii() or not digits.isdigit() or len(digits) > MAX_DIGITS:
        raise NotFound(f"there is no row {name!r}; rows are called 0, 1, ..., failed attempts f0, f1, ...")
    return int(digits) + ((FAILURES << PART_BITS) if digits != name else 0)


@contextmanager
def open_descriptor(path: Path) -> Iterator[int]:
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
        file_stat = path.stat()
    except FileNotFoundError:
        return None
    return file_stat if stat.S_ISREG(file_stat.st_mode) else None


def path_text(path: Path | str) -> str:
    """A name may have bytes that are not text."""
    return os.fsencode(path).decode("utf-8", "replace")


def size(path: Path) -> int | None:
    try:
        stat = status(path)
    except OSError:
        return None
    return None if stat is None else stat.st_size


def edges(fd: int, end: int) -> tuple[bytes, bytes]:
    """The first bytes of a file, and those before `end`."""
    length = min(EDGE_BYTES, end)
    return os.pread(fd, length, 0), os.pread(fd, length, end - length)


LOWER = "lower_case"  # a function of the databases, for all letters
PLAIN, TEXTS = ScannedLine._fields[1:FIRST_TEXT], ScannedLine._fields[FIRST_TEXT:]

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

    def is_writer(self) -> bool:
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
        # indexes that were not opened for long: their files may be gone
        for path in self.path.parent.glob("*.sqlite"):
            with contextlib.suppress(OSError):  # another viewer does the same
                if time.time() - path.stat().st_mtime > INDEX_LIFETIME_S:
                    _remove(path)
                    path.with_suffix(".lock").unlink()
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
        """The connection of who `is_writer`; what is done stays if there is no exception."""
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


def index_path(output: Path) -> Path:
    """The path of the index of this rollout file: $XDG_CACHE_HOME/ngym/view, or ~/.cache/ngym/view."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    name = sha256(os.fsencode(output) + SCHEMA.encode()).hexdigest()[:24]
    return Path(cache) / "ngym" / "view" / f"{name}.sqlite"


def _identity(path: Path) -> tuple[int, int] | None:
    stat = status(path)
    return None if stat is None else (stat.st_dev, stat.st_ino)


def _remove(path: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def _connected(name: str) -> sqlite3.Connection:
    database = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA temp_store = MEMORY")
    database.create_function(LOWER, 1, _lower, deterministic=True)
    return database


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class IndexedPart(NamedTuple):
    """The indexed part of a file. head, tail: the bytes at its beginning and before `bytes`. bad: lines that are not
    rollouts.
    """

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
    """The indexed size of a run, and its whole size.

    version: another one after every change; -1: no process has begun to write it. epoch: another one when the rows are not
    those of before and some more. read: the bytes that the files had when all of them was indexed; -1: that never was.
    """

    version: int
    epoch: int
    read: int
    parts: dict[int, IndexedPart]
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
    sizes = {part: bytes_read for part, path in paths.items() if (bytes_read := size(path)) is not None}
    try:
        with store.reading() as database:
            version, epoch, read = database.execute("SELECT version, epoch, read FROM state").fetchone()
            parts = {row[0]: IndexedPart(*row[1:]) for row in database.execute("SELECT * FROM parts")}
    except OperationalError as error:
        if not str(error).startswith(NOT_BEGUN):
            raise
        return Extent(-1, -1, -1, {}, sizes)
    return Extent(version, epoch, read, parts, sizes)


_INSERT_ROW = f"INSERT INTO rows VALUES (? + %d{', ?' * len(PLAIN)})"
_INSERT_TEXT = f"INSERT INTO texts VALUES (? + %d{', ?' * len(TEXTS)})"
_ADD_GROUP = """
INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ? + %d) ON CONFLICT (g) DO UPDATE SET n = n + excluded.n,
    scored = scored + excluded.scored, total = total + excluded.total
"""
POLL_S = 0.5
AFTER_ERROR_S = 5.0
STOPPED_S = 2.0
STORES_TRIED = 3  # the stored one, the same rebuilt, memory


class Writer:
    """Of one index, as long as this process may write it. stopped: ends it within a batch."""

    def __init__(self, store: Store, paths: Mapping[int, Path], stopped: Event) -> None:
        self.reading_on = False  # more of the files, at this moment
        self._store = store
        self._paths = paths
        self._stopped = stopped
        self._parts = dict(extent_of(store, paths).parts)
        self._last_stats: dict[int, tuple[int, int, int]] = {}  # part -> inode, size and time of its file
        self._read: int | None = None  # as announced to the other processes

    def catch_up(self) -> bool:
        """Whether all is indexed; False: it was stopped.

        Raises:
            sqlite3.Error: the index cannot be written. OSError, NgymError: a file cannot be read.
        """
        stats = {part: stat for part, path in self._paths.items() if (stat := status(path)) is not None}
        if any(part not in stats or not self._has_only_grown(part, stats[part]) for part in self._parts):
            self._forget()
        try:
            for part, stat in stats.items():
                looked_at = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if (
                    stat.st_size > self._parts.get(part, IndexedPart()).bytes
                    and self._last_stats.get(part) != looked_at
                ):
                    self.reading_on = True
                    self._read_new_rows(part, stat)
                self._last_stats[part] = looked_at  # a torn line is not read again before there is more of it
        finally:
            self.reading_on = False
        if self._stopped.is_set():
            return False
        self._has_read(sum(stat.st_size for stat in stats.values()))
        return True

    def _has_read(self, bytes: int) -> None:
        """Tell the other processes that so much is there, and all of it indexed."""
        if bytes == self._read:
            return
        with self._store.writing() as database:
            for statement in INDEXES:
                database.execute(statement)
            database.execute("UPDATE state SET read = ?", (bytes,))
        self._read = bytes

    def _has_only_grown(self, part: int, stat: os.stat_result) -> bool:
        known = self._parts[part]
        if (stat.st_dev, stat.st_ino) != (known.device, known.inode) or stat.st_size < known.bytes:
            return False
        if stat.st_size == known.bytes:
            return stat.st_mtime_ns == known.mtime
        with open_descriptor(self._paths[part]) as fd:
            return edges(fd, known.bytes) == (known.head, known.tail)

    def _forget(self) -> None:
        """A file was replaced or edited: everything is read again."""
        with self._store.writing() as database:
            for table in TABLES:
                database.execute(f"DELETE FROM {table}")
            database.execute("UPDATE state SET version = version + 1, epoch = epoch + 1, read = -1")
        self._parts.clear()
        self._last_stats.clear()
        self._read = None

    def _read_new_rows(self, part: int, stat: os.stat_result) -> None:
        known = self._parts.get(part, IndexedPart())
        known = known._replace(device=stat.st_dev, inode=stat.st_ino, mtime=stat.st_mtime_ns)
        for batch in scan_rows(str(self._paths[part]), known.bytes, stat.st_size):
            if self._stopped.is_set():
                return
            known = self._add_batch(part, known, batch)

    def _add_batch(self, part: int, known: IndexedPart, batch: ScannedBatch) -> IndexedPart:
        """The index with one batch more."""
        if not batch.lines:
            return known
        end = max(known.bytes, batch.end)
        with open_descriptor(self._paths[part]) as fd:
            head, tail = edges(fd, end)
        now = known._replace(
            head=head,
            tail=tail,
            bytes=end,
            lines=known.lines + batch.lines,
            rows=known.rows + len(batch.rows),
            bad=known.bad + batch.bad_lines,
        )
        base = (part << PART_BITS) + known.lines
        with self._store.writing() as database:
            database.executemany(_INSERT_ROW % base, batch.rows)
            database.executemany(_INSERT_TEXT % base, batch.texts)
            database.executemany(_ADD_GROUP % base, batch.groups)
            database.executemany("INSERT OR IGNORE INTO fields VALUES (?)", ((name,) for name in batch.fields))
            if known.bad < REPORTED:
                bad = ((part, known.lines + line, problem) for line, problem in batch.bad)
                database.executemany("INSERT INTO bad_lines VALUES (?, ?, ?)", bad)
            database.execute(f"INSERT OR REPLACE INTO parts VALUES ({', '.join('?' * (1 + len(now)))})", (part, *now))
            database.execute("UPDATE state SET version = version + 1")
        self._parts[part] = now
        return now


class Index:
    """The index of out.jsonl and out_failures.jsonl; `start` has a thread follow the files.

    Other processes may show the same files: one of them writes the index, all read it.
    """

    def __init__(self, output: Path, failures: Path) -> None:
        self.paths = {0: output, FAILURES: failures}
        self.error: str | None = None
        self.caught_up = False  # with the files, as they were a moment ago
        self._store = Store(index_path(output))
        self._writer: Writer | None = None  # while this process is the one that writes
        self._awaited_bytes: int | None = None  # bytes that another process shall have read
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"index {output.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Without waiting for it; `close` does."""
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(STOPPED_S)
        if not self._thread.is_alive():  # else the disk hangs; it ends with this process
            self._store.close()

    @property
    def note(self) -> str | None:
        """The reason why the index is not kept."""
        return self._store.note

    @property
    def reading_on(self) -> bool:
        """Whether this process reads more of the files, at this moment."""
        writer = self._writer
        return writer is not None and writer.reading_on

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one state; tables may not be there yet: see `extent`."""
        with self._store.reading() as database:
            yield database

    def extent(self) -> Extent:
        return extent_of(self._store, self.paths)

    def line(self, seq: int) -> bytes:
        """A row, byte for byte as in its file. Raises NotFound: there is no such row, or the file was replaced."""
        if self.extent().version < 0:
            raise NotFound(f"there is no row {row_name(seq)} yet")
        with self.reading() as database:
            record = database.execute("SELECT start, size FROM rows WHERE seq = ?", (seq,)).fetchone()
            inode = database.execute("SELECT inode FROM parts WHERE part = ?", (seq >> PART_BITS,)).fetchone()
        if record is None:
            raise NotFound(f"there is no row {row_name(seq)}")
        path = self.paths[seq >> PART_BITS]
        try:
            with open_descriptor(path) as fd:
                if os.fstat(fd).st_ino != inode[0]:
                    raise NotFound(f"{path} was replaced; its rows are read again; repeat the request")
                return os.pread(fd, record[1], record[0]).strip()
        except OSError as error:
            raise NotFound(f"{path}: cannot be read: {error.strerror}") from None

    def lines(self, seqs: Sequence[int], most_bytes: int) -> Iterator[tuple[int, bytes]]:
        """These rows (ascending), byte for byte as in their files; neighbours are read together.

        Raises:
            NotFound: a file cannot be read.
        """
        with self.reading() as database:
            numbers = orjson.dumps(list(seqs)).decode()
            places = database.execute(
                "SELECT seq, start, size FROM rows WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq",
                (numbers,),
            ).fetchall()
        for part, path in self.paths.items():
            own = [place for place in places if place[0] >> PART_BITS == part]
            if not own:
                continue
            try:
                with open_descriptor(path) as fd:
                    yield from read_together(fd, own, most_bytes)
            except OSError as error:
                raise NotFound(f"{path}: cannot be read: {error.strerror}") from None

    def catch_up(self) -> None:
        """Index what the files have more than the index; where another process does that, see how far it is."""
        for _ in range(STORES_TRIED):
            try:
                if self._store.is_lost():
                    self._detach_store()
                caught_up = self._write() if self._store.is_writer() else self._check_other_writer()
                there = any(map(status, self.paths.values()))
            except sqlite3.Error as error:
                # A broken index is rebuilt; one that cannot be stored is kept in memory
                self._detach_store()
                if self._store.path is not None and getattr(error, "sqlite_errorcode", None) in BROKEN:
                    self._store.remove()
                else:
                    self._store = Store(None, f"the index is not kept: {self._store.path}: {error}")
            except (OSError, NgymError) as error:
                self.error = str(error)
                return
            else:
                self.error = None if there else f"{self.paths[0]}: there is no such file any more"
                self.caught_up = caught_up
                return
        self.error = "the index cannot be written, not even in memory; start ng_view again"

    def _follow(self) -> None:
        try:
            while not self._stopped.is_set():
                self.catch_up()
                self._stopped.wait(POLL_S if self.error is None else AFTER_ERROR_S)
        except BaseException as error:
            try:
                if self._store.path is not None:
                    self._detach_store()  # another process may continue once the error is reported
            finally:
                self.error = f"the index ended: {error!r}"
            raise

    def _write(self) -> bool:
        """Whether all is indexed; False: it was stopped."""
        if self._writer is None:
            self._writer = Writer(self._store, self.paths, self._stopped)
        return self._writer.catch_up()

    def _check_other_writer(self) -> bool:
        """Whether it is done. It need not be for ever with a file that grows: what was there at the first look is enough."""
        extent = self.extent()
        self._awaited_bytes = min(
            extent.bytes, self._awaited_bytes if self._awaited_bytes is not None else extent.bytes
        )
        return self._awaited_bytes <= extent.read <= extent.bytes

    def _detach_store(self) -> None:
        """The store, which is not what this process wrote."""
        self._writer = self._awaited_bytes = None
        self.caught_up = False
        self._store.close()
