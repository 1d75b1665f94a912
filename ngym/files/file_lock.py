"""Locks on files and folders; the kernel releases them when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ngym.errors import NgymError, UsageError
from ngym.files.atomic import sync_folder


class FileLocked(NgymError):
    """Another process holds the lock."""


@contextmanager
def held_folder(folder: Path, otherwise: str) -> Iterator[None]:
    """Lock the folder for this process. `otherwise` and errors are those of `open_held`."""
    fd = open_held(folder / ".held", folder, otherwise)
    try:
        yield
    finally:
        os.close(fd)


def open_held(path: Path, what: Path, otherwise: str) -> int:
    """Open a file for appending and reading, and lock it; it is created if it does not exist.

    Args:
        what, otherwise: for the message: the locked object, and what the user can do instead of waiting.

    Raises:
        FileLocked: another process holds it; the message has its pid.
        UsageError: it cannot be opened.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{path}: cannot be opened for writing: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.fstat(fd).st_ino)
            os.close(fd)
            raise FileLocked(f"{what} is being written by {holder}; wait for it, or {otherwise}") from None
        if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
            sync_folder(path.parent)
            return fd
        os.close(fd)  # it was replaced between the open and the lock


def _holder(inode: int) -> str:
    """`process 1234`, from the kernel's list of locks (Linux only)."""
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return "another process"
    for fields in (line.split() for line in locks):
        if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}") and fields[4] != "0":
            return f"process {fields[4]}"
    return "another process"
