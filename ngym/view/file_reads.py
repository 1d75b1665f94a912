"""What does a file hold here, and is it still the one that it was? Plain reads; nothing is mapped, because files may be cut."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

EDGE_BYTES = 4096  # of a file's beginning, and before a place in it: unchanged as long as it only grew


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
    """A name may have bytes that are no text."""
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
