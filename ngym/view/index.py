"""A rollout file's rows, indexed on disk while they come; whoever asks gets what is there so far, the file is never held."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson

from ngym.errors import NgymError, NotFound
from ngym.view.file_reads import opened, read_together, status
from ngym.view.index_progress import Extent, extent_of
from ngym.view.index_store import BROKEN, Store, place
from ngym.view.index_writer import Writer
from ngym.view.row_ids import FAILURES, PART_BITS, row_name

POLL_S = 0.5
AFTER_ERROR_S = 5.0
STOPPED_S = 2.0
STORES_TRIED = 3  # the kept one, the same made anew, memory


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
        if not self._thread.is_alive():  # else the disk stands still under it; it ends with this process
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
        """A row as it stands in its file.

        Raises:
            NotFound: there is none, or the file is another one by now.
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
                    raise NotFound(f"{path} was replaced; its rows are read anew, ask again")
                return os.pread(fd, found[1], found[0]).strip()
        except OSError as error:
            raise NotFound(f"{path}: cannot be read: {error.strerror}") from None

    def lines(self, seqs: Sequence[int], most_bytes: int) -> Iterator[tuple[int, bytes]]:
        """These rows (ascending) as they stand in their files; neighbours are read together.

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
                    self._leave()  # another process may go on, as soon as the error is told
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
        """A broken index is made anew; one that cannot be kept lives in memory."""
        self._leave()
        if self._store.path is not None and getattr(error, "sqlite_errorcode", None) in BROKEN:
            self._store.remove()
        else:
            self._store = Store(None, f"the index is not kept: {self._store.path}: {error}")
