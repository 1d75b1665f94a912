"""What have the files more than their index? One process reads that and writes it down; its own state is as it wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Event

from ngym.view.file_reads import edges, opened, status
from ngym.view.helpers import scanned
from ngym.view.index_progress import Part, extent_of
from ngym.view.index_store import INDEXES, PLAIN, TABLES, TEXTS, Store
from ngym.view.row_ids import PART_BITS
from ngym.view.scan import REPORTED, Batch

_INSERT_ROW = f"INSERT INTO rows VALUES (? + %d{', ?' * len(PLAIN)})"
_INSERT_TEXT = f"INSERT INTO texts VALUES (? + %d{', ?' * len(TEXTS)})"
_ADD_GROUP = """
INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ? + %d) ON CONFLICT (g) DO UPDATE SET n = n + excluded.n,
    scored = scored + excluded.scored, total = total + excluded.total
"""


class Writer:
    """Of one index, as long as this process may write it. stopped: ends it within a batch."""

    def __init__(self, store: Store, paths: Mapping[int, Path], stopped: Event) -> None:
        self.reading_on = False  # more of the files, at this moment
        self._store = store
        self._paths = paths
        self._stopped = stopped
        self._parts = dict(extent_of(store, paths).parts)
        self._looked_at: dict[int, tuple[int, int, int]] = {}  # part -> inode, size and time of its file
        self._read: int | None = None  # as the other processes were told

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
        """A file is not what it was: everything is read anew."""
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
