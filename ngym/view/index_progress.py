"""How much of a run is indexed, and how much is there?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from sqlite3 import OperationalError
from typing import NamedTuple

from ngym.view.file_reads import size
from ngym.view.index_store import Store
from ngym.view.row_ids import FAILURES

NOT_BEGUN = ("no such table", "unable to open")  # what SQLite says of an index that nobody has begun to write


class Part(NamedTuple):
    """How far a file is indexed. head, tail: the bytes at its beginning and before `bytes`. bad: lines that are no rollouts."""

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

    version: another one after every change; -1: nobody has begun to write it. epoch: another one when the rows are not
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
