"""Rows in, rows out: files are streamed, never held; every problem is named with its first line.

`read(path)` yields every line of a JSONL file with what is wrong with it; `checked(path, check)` yields the good ones and
reports all problems together. What is appended to for hours, and must survive a kill, is a `ngym.files.row_log.RowLog`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson

from ngym.did_you_mean import near_file
from ngym.errors import NgymError, UsageError
from ngym.net.json_limits import MAX_DEPTH, is_deep
from ngym.schema import Json

REPORTED_LINES = 20
READ_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20  # as much as any of our services takes or answers
BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line of a JSONL file. `number` counts from 1; [start, end) are its bytes; `row` is {} where there is a `problem`."""

    number: int
    start: int
    end: int
    row: Json
    problem: str | None
    complete: bool


class WriteFailed(NgymError):
    """The file cannot be written, and waiting would not help."""


def read(path: Path) -> Iterator[Line]:
    """Every line of a JSONL file but the empty ones; a BOM and CRLF are tolerated.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with path.open("rb", buffering=READ_BYTES) as file:
            start = 0
            for number, raw in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
                end = start + len(raw)
                if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    complete = _skip_line(file)
                    end = file.tell()
                    yield Line(number, start, end, {}, f"longer than {MAX_LINE_BYTES >> 20} MiB", complete)
                    start = end
                    continue
                text = raw.removeprefix(BOM).strip() if number == 1 else raw.strip()
                if text:
                    yield _line(number, start, end, text, raw.endswith(b"\n"))
                start = end
    except OSError as error:
        near = near_file(path) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{path}: cannot be read: {error.strerror}{near}") from None


def _skip_line(file: BinaryIO) -> bool:
    """Whether it has an end."""
    while part := file.readline(READ_BYTES):
        if part.endswith(b"\n"):
            return True
    return False


class CheckedLines:
    """The good lines of a file, streamed; at its end, one UsageError with every problem (the first 20), each with its first line.

    Args:
        check: what is wrong with a row, or None.
        limit: look at the first lines only.

    Attributes:
        bad: how many bad lines were found so far.
    """

    def __init__(self, path: Path, check: Callable[[Json], str | None], limit: int | None = None) -> None:
        self.bad = 0
        self._path = path
        self._check = check
        self._limit = limit

    def __iter__(self) -> Iterator[Line]:
        named: dict[str, list[int]] = {}  # problem -> its first line, and how many lines have it
        for line in islice(read(self._path), self._limit):
            problem = line.problem or self._check(line.row)
            if problem is None:
                yield line
                continue
            self.bad += 1
            if problem in named:
                named[problem][1] += 1
            elif len(named) < REPORTED_LINES:
                named[problem] = [line.number, 1]
        if named:
            raise UsageError("\n".join(self._told(named)))

    def _told(self, named: dict[str, list[int]]) -> Iterator[str]:
        for problem, (number, count) in named.items():
            more = f" (and {count - 1:,} more lines like it)" if count > 1 else ""
            yield f"{self._path}:{number}: {problem}{more}"
        if rest := self.bad - sum(count for _, count in named.values()):
            yield f"... and {rest} more lines of {self._path}"


def checked(path: Path, check: Callable[[Json], str | None], limit: int | None = None) -> Iterator[Line]:
    """`CheckedLines` for callers that only want the lines."""
    return iter(CheckedLines(path, check, limit))


def _line(number: int, start: int, end: int, text: bytes, complete: bool) -> Line:
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        utf16 = "; the file looks like UTF-16, save it as UTF-8" if text[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        return Line(
            number, start, end, {}, f"not JSON: {_reason(error)}{utf16}; the line begins {_begin(text)}", complete
        )
    if not isinstance(row, dict):
        return Line(number, start, end, {}, f"not a JSON object but {type(row).__name__}: {_begin(text)}", complete)
    if is_deep(text, row):
        return Line(number, start, end, {}, f"nested deeper than {MAX_DEPTH} levels", complete)
    return Line(number, start, end, row, None, complete)


def _reason(error: orjson.JSONDecodeError) -> str:
    return f"{error.msg} (column {error.colno})" if error.doc else error.msg


def _begin(text: bytes) -> str:
    shown = text[:60].decode("utf-8", "replace")
    return repr(shown + "..." if len(text) > 60 else shown)


def check_output(path: Path) -> None:
    """UsageError where no file can be put: its folder does not exist, or something that is none has its name."""
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist; make it first: mkdir -p {path.parent}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file for --output")
    _check_regular(path)


def _check_regular(path: Path) -> None:
    """What is written aside and renamed takes the place of a device: root's `--output /dev/null` would be the machine's end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UsageError(f"{path} is no regular file, but a device or a pipe; name a file")


def write_whole(path: Path, data: bytes) -> None:
    """A small file, entirely or not at all, see `whole_file`."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be written, entirely or not at all: aside, synced, and renamed if the block ends well. A link stays one.

    Raises:
        UsageError: something that is no file has its name. WriteFailed: it cannot be written.
    """
    _check_regular(path)
    there = Path(os.path.realpath(path))
    beside = there.with_name(there.name + ".tmp")
    try:
        with beside.open("wb", buffering=READ_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.rename(there)
    except OSError as error:
        raise WriteFailed(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            beside.unlink()
    sync_folder(there.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's new names on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
