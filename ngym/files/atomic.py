"""Files and folders that are written completely or not at all, also after a kill or a power failure; and locks on them.

The kernel releases a lock when its process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ngym.errors import NgymError, UsageError
from ngym.option_names import another_output, option, option_name

BUFFER_BYTES = 1 << 20
POLL_S = 0.05
COMPRESSED = (".gz", ".zst")  # ngym/files/jsonl.py reads them


class WriteFailed(NgymError):
    """The file cannot be written, and waiting would not help."""


def check_output(path: Path) -> None:
    """Raise a UsageError if no file can be written there: no such folder, or not a writable one, the path is not a regular
    file, or its name is that of a compressed file.
    """
    if str(path) == "-":
        raise UsageError("-: output to standard output is not supported; name a file")
    if path.suffix in COMPRESSED:
        raise UsageError(f"{path}: output is not compressed; name it {path.stem}, and compress it afterwards")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist; make it first: mkdir -p {path.parent}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file for {option('output')}")
    _check_regular(path)
    check_writable(path.parent)


def check_new_output(path: Path, inputs: Iterable[Path], overwrite: bool) -> None:
    """Raise a UsageError if `check_output` does, the output is one of the inputs, or it exists and must not be replaced."""
    check_output(path)
    if path.exists() and any(path.samefile(one) for one in inputs if one.exists()):
        raise UsageError(f"{path} is both the input and {option_name('output')}; {another_output()}")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; add {option('overwrite', True)} to replace it, or {another_output()}")


def check_writable(folder: Path) -> None:
    """Raise a UsageError if nothing can be written into this folder, or into the nearest one above it that exists."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UsageError(f"{there} is not a folder; choose another place for the output")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{there} cannot be written to: it is read-only, or you have no permission")


def _check_regular(path: Path) -> None:
    """Raise a UsageError for a device or pipe: the final rename would replace it, such as /dev/null as root."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UsageError(f"{path} is not a regular file, but a device or a pipe; name a file")


async def wait_for_file(file: Path, within_s: float) -> bool:
    """Wait for a file that another process writes completely or not at all; whether it is there in time."""
    deadline = time.monotonic() + within_s
    while not file.is_file() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return file.is_file()


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file atomically, see `whole_file`."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: to a temporary file, synced, and renamed if the block succeeds. A link stays a link.

    Raises:
        UsageError: the path is not a regular file. WriteFailed: it cannot be written.
    """
    _check_regular(path)
    there = Path(os.path.realpath(path))
    temporary = there.with_name(there.name + ".tmp")
    try:
        with temporary.open("wb", buffering=BUFFER_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(there)
    except OSError as error:
        raise WriteFailed(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync_folder(there.parent)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Sync a file, so that its content survives a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new and renamed files survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into; when the block ends without an error, it replaces `folder`.

    First removes what an interrupted writer left. An old folder of this name is removed only when the new one is
    complete on the disk.

    Raises:
        WriteFailed: it cannot be written.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)  # the writer was killed between the two renames
    for left_behind in (aside, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        _sync(aside)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        sync_folder(folder.parent)
    except Exception as error:
        reason = error if isinstance(error, OSError) else _os_error(error)
        if reason is None:
            raise
        shutil.rmtree(aside, ignore_errors=True)
        raise WriteFailed(f"{folder}: cannot be written: {reason.strerror or reason}") from reason
    shutil.rmtree(old, ignore_errors=True)


def _os_error(error: Exception) -> OSError | None:
    """The operating system's error that an error of safetensors quotes; None in other errors."""
    match = re.search(r"I/O error: (.*?) \(os error (\d+)\)", str(error))
    return OSError(int(match[2]), match[1]) if match else None


def _sync(folder: Path) -> None:
    for entry in sorted(folder.rglob("*")):
        if entry.is_file():
            sync_file(entry)
        else:
            sync_folder(entry)
    sync_folder(folder)


class FileLocked(NgymError):
    """Another process holds the lock."""


@contextmanager
def held_folder(folder: Path, otherwise: str) -> Iterator[None]:
    """Lock the folder for this process. `otherwise` and errors are those of `open_locked`."""
    fd = open_locked(folder / ".held", folder, otherwise)
    try:
        yield
    finally:
        os.close(fd)


def open_locked(path: Path, what: Path, otherwise: str) -> int:
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
