"""Indexes a rollout file while it grows; a separate process reads it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import orjson

from ngym.errors import NgymError, NotFound
from ngym.view.index_store import (
    BROKEN,
    FAILURES,
    INDEXES,
    PART_BITS,
    PLAIN,
    TABLES,
    TEXTS,
    Extent,
    Part,
    Store,
    edges,
    extent_of,
    opened,
    place,
    read_together,
    row_name,
    status,
)
from ngym.view.scan import REPORTED, Batch, scanned

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
        self._looked_at: dict[int, tuple[int, int, int]] = {}  # part -> inode, size and time of its file
        self._read: int | None = None  # as announced to the other processes

    def catch_up(self) -> bool:
        """Whether all is indexed; False: it was stopped.

        Raises:
            sqlite3.Error: the index cannot be written. OSError, NgymError: a file cannot be read.
        """
        stats = {part: found for part, path in self._paths.items() if (found := status(path)) is not None}
        if any(part not in stats or not self._has_only_grown(part, stats[part]) for part in self._parts):
            self._forget()
        try:
            for part, found in stats.items():
                self._read_if_new(part, found)
        finally:
            self.reading_on = False
        if self._stopped.is_set():
            return False
        self._has_read(sum(found.st_size for found in stats.values()))
        return True

    def _read_if_new(self, part: int, found: os.stat_result) -> None:
        looked_at = (found.st_ino, found.st_size, found.st_mtime_ns)
        if found.st_size > self._parts.get(part, Part()).bytes and self._looked_at.get(part) != looked_at:
            self.reading_on = True
            self._read_on(part, found)
        self._looked_at[part] = looked_at  # a torn line is not read again before there is more of it

    def _has_read(self, bytes: int) -> None:
        """Tell the other processes that so much is there, and all of it indexed."""
        if bytes == self._read:
            return
        with self._store.writing() as database:
            for statement in INDEXES:
                database.execute(statement)
            database.execute("UPDATE state SET read = ?", (bytes,))
        self._read = bytes

    def _has_only_grown(self, part: int, found: os.stat_result) -> bool:
        known = self._parts[part]
        if (found.st_dev, found.st_ino) != (known.device, known.inode) or found.st_size < known.bytes:
            return False
        if found.st_size == known.bytes:
            return found.st_mtime_ns == known.mtime
        with opened(self._paths[part]) as fd:
            return edges(fd, known.bytes) == (known.head, known.tail)

    def _forget(self) -> None:
        """A file was replaced or edited: everything is read again."""
        with self._store.writing() as database:
            for table in TABLES:
                database.execute(f"DELETE FROM {table}")
            database.execute("UPDATE state SET version = version + 1, epoch = epoch + 1, read = -1")
        self._parts.clear()
        self._looked_at.clear()
        self._read = None

    def _read_on(self, part: int, found: os.stat_result) -> None:
        known = self._parts.get(part, Part())
        known = known._replace(device=found.st_dev, inode=found.st_ino, mtime=found.st_mtime_ns)
        for batch in scanned(str(self._paths[part]), known.bytes, found.st_size):
            if self._stopped.is_set():
                return
            known = self._kept(part, known, batch)

    def _kept(self, part: int, known: Part, batch: Batch) -> Part:
        """The index with one batch more."""
        if not batch.lines:
            return known
        end = max(known.bytes, batch.end)
        with opened(self._paths[part]) as fd:
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
        self._store = Store(place(output))
        self._writer: Writer | None = None  # while this process is the one that writes
        self._awaited: int | None = None  # bytes that another process shall have read
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
        """Why the index is not kept."""
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
        """A row, byte for byte as in its file.

        Raises:
            NotFound: there is no such row, or the file was replaced.
        """
        if self.extent().version < 0:
            raise NotFound(f"there is no row {row_name(seq)} yet")
        with self.reading() as database:
            found = database.execute("SELECT start, size FROM rows WHERE seq = ?", (seq,)).fetchone()
            inode = database.execute("SELECT inode FROM parts WHERE part = ?", (seq >> PART_BITS,)).fetchone()
        if found is None:
            raise NotFound(f"there is no row {row_name(seq)}")
        path = self.paths[seq >> PART_BITS]
        try:
            with opened(path) as fd:
                if os.fstat(fd).st_ino != inode[0]:
                    raise NotFound(f"{path} was replaced; its rows are read again; repeat the request")
                return os.pread(fd, found[1], found[0]).strip()
        except OSError as error:
            raise NotFound(f"{path}: cannot be read: {error.strerror}") from None

    def lines(self, seqs: Sequence[int], most_bytes: int) -> Iterator[tuple[int, bytes]]:
        """These rows (ascending), byte for byte as in their files; neighbours are read together.

        Raises:
            NotFound: a file cannot be read.
        """
        with self.reading() as database:
            asked = orjson.dumps(list(seqs)).decode()
            places = database.execute(
                "SELECT seq, start, size FROM rows WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq", (asked,)
            ).fetchall()
        for part, path in self.paths.items():
            own = [place for place in places if place[0] >> PART_BITS == part]
            if not own:
                continue
            try:
                with opened(path) as fd:
                    yield from read_together(fd, own, most_bytes)
            except OSError as error:
                raise NotFound(f"{path}: cannot be read: {error.strerror}") from None

    def catch_up(self) -> None:
        """Index what the files have more than the index; where another process does that, see how far it is."""
        for _ in range(STORES_TRIED):
            try:
                if self._store.is_lost():
                    self._leave()
                caught_up = self._write() if self._store.may_write() else self._look_at_another()
                there = any(map(status, self.paths.values()))
            except sqlite3.Error as error:
                self._fall_back(error)
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
                    self._leave()  # another process may continue once the error is reported
            finally:
                self.error = f"the index ended: {error!r}"
            raise

    def _write(self) -> bool:
        """Whether all is indexed; False: it was stopped."""
        if self._writer is None:
            self._writer = Writer(self._store, self.paths, self._stopped)
        return self._writer.catch_up()

    def _look_at_another(self) -> bool:
        """Whether it is done. It need not be for ever with a file that grows: what was there at the first look is enough."""
        extent = self.extent()
        self._awaited = min(extent.bytes, self._awaited if self._awaited is not None else extent.bytes)
        return self._awaited <= extent.read <= extent.bytes

    def _leave(self) -> None:
        """The store, which is not what this process wrote."""
        self._writer = self._awaited = None
        self.caught_up = False
        self._store.close()

    def _fall_back(self, error: sqlite3.Error) -> None:
        """A broken index is rebuilt; one that cannot be stored is kept in memory."""
        self._leave()
        if self._store.path is not None and getattr(error, "sqlite_errorcode", None) in BROKEN:
            self._store.remove()
        else:
            self._store = Store(None, f"the index is not kept: {self._store.path}: {error}")
