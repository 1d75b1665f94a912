"""Reads and writes JSON Lines files as streams; every problem is reported with its first line.

`read(path)` yields every line with its problem, if any; `checked(paths, check)` yields the good lines and reports all
problems together. Files that end in .gz and .zst are decompressed as they are read. For files that are appended to for
hours and must survive a kill, use `ngym.files.row_log.RowLog`.
"""

from __future__ import annotations

import glob
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import orjson

from ngym.did_you_mean import near_file
from ngym.errors import UsageError
from ngym.files.atomic import write_whole
from ngym.files.hub_download import HUB, local_copy
from ngym.net.json_limits import MAX_DEPTH, is_deep
from ngym.option_names import option
from ngym.schema import Json

REPORTED_LINES = 20
READ_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20  # the largest body of a service of ngym
BOM = b"\xef\xbb\xbf"
COMPRESSED = (".gz", ".zst")


class Line(NamedTuple):
    """One line of a JSONL file. `number` counts from 1; [start, end) are its bytes; `row` is {} with a `problem`."""

    number: int
    start: int
    end: int
    row: Json
    problem: str | None
    complete: bool


def expand_paths(inputs: Iterable[str | Path], name: str = "input") -> tuple[Path, ...]:
    """The files of these paths and patterns (`runs/*/out.jsonl.zst`), each once; those of a pattern are sorted. A file
    of the Hugging Face Hub (`ngym.files.hub_download`) is downloaded.

    Args:
        name: of the argument, for the message of an error; "" names none.

    Raises:
        UsageError: a file does not exist, or no file matches a pattern.
    """
    paths: dict[Path, Path] = {}  # what a link names -> its first path
    for text in map(str, inputs):
        path, is_pattern = Path(text), glob.has_magic(text)
        if text.startswith(HUB):
            path = local_copy(path)
        matches = sorted(map(Path, glob.iglob(text, recursive=True))) if is_pattern and not path.is_file() else [path]
        files = [one for one in matches if one.is_file()]
        if not files:
            reason = "no file matches" if is_pattern else "no such file"
            where = f" ({option(name)})" if name else ""
            raise UsageError(f"{text}: {reason}{where}{near_file(path)}")
        for file in files:
            paths.setdefault(file.resolve(), file)
    return tuple(paths.values())


@contextmanager
def open_rows(path: Path) -> Iterator[BinaryIO]:
    """A file's content, decompressed if its name ends in .gz or .zst.

    Raises:
        UsageError: it cannot be read, or its compressed content is damaged.
    """
    try:
        with _open_decompressed(path) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        near = near_file(path) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}{near}") from None


def _open_decompressed(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, gzip.open(path)), READ_BYTES))
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstandard(path), READ_BYTES))
    return path.open("rb", buffering=READ_BYTES)


class _Zstandard(io.RawIOBase):
    """The decompressed content of a .zst file. EOFError if it ends within a frame: zstandard itself does not notice."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._file = path.open("rb")
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._is_within = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            part = self._frame.unused_data or self._file.read(READ_BYTES)
            if not part:
                if self._is_within:
                    raise EOFError("the compressed file ends too early")
                return 0
            if self._frame.eof:
                self._frame = self._new()
            try:
                self._ready = memoryview(self._frame.decompress(part))
            except self._error as error:
                raise OSError(str(error)) from None
            self._is_within = not self._frame.eof
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def read(path: Path) -> Iterator[Line]:
    """Yield every non-empty line of a JSONL file; a BOM and CRLF are tolerated.

    Raises:
        UsageError: the file cannot be read.
    """
    with open_rows(path) as file:
        yield from _lines(file)


def _lines(file: BinaryIO) -> Iterator[Line]:
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


def _skip_line(file: BinaryIO) -> bool:
    """Skip the rest of a line; returns whether it ends with a newline."""
    while part := file.readline(READ_BYTES):
        if part.endswith(b"\n"):
            return True
    return False


class CheckedLines:
    """Streams the good lines of files; at the end, one UsageError has the first 20 problems, each with its first line.

    Args:
        check: returns the problem of a row, or None.
        limit: read only the first lines.

    Attributes:
        bad: number of bad lines so far.
        reads: index of the file that is being read.
    """

    def __init__(self, paths: Sequence[Path], check: Callable[[Json], str | None], limit: int | None = None) -> None:
        self.bad = self.reads = 0
        self._paths = paths
        self._check = check
        self._limit = limit

    def __iter__(self) -> Iterator[Line]:
        problems: dict[str, _Problem] = {}
        for line in islice(self._read(), self._limit):
            problem = line.problem or self._check(line.row)
            if problem is None:
                yield line
                continue
            self.bad += 1
            if problem in problems:
                problems[problem].count += 1
            elif len(problems) < REPORTED_LINES:
                problems[problem] = _Problem(f"{self._paths[self.reads]}:{line.number}")
        if problems:
            raise UsageError("\n".join(self._report(problems)))

    def _read(self) -> Iterator[Line]:
        for number, path in enumerate(self._paths):
            self.reads = number
            yield from read(path)

    def _report(self, problems: dict[str, _Problem]) -> Iterator[str]:
        for problem, found_lines in problems.items():
            more = f" (and {found_lines.count - 1:,} more lines like it)" if found_lines.count > 1 else ""
            yield f"{found_lines.first}: {problem}{more}"
        if rest := self.bad - sum(found_lines.count for found_lines in problems.values()):
            yield f"... and {rest} more lines of {', '.join(map(str, self._paths))}"


@dataclass
class _Problem:
    """first: `path:line` of the first line with it. count: the lines with it."""

    first: str
    count: int = 1


def check_lines(
    paths: Path | Sequence[Path], check: Callable[[Json], str | None], limit: int | None = None
) -> Iterator[Line]:
    """`CheckedLines` for callers that only want the lines."""
    return iter(CheckedLines((paths,) if isinstance(paths, Path) else paths, check, limit))


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
    beginning = text[:60].decode("utf-8", "replace")
    return repr(beginning + "..." if len(text) > 60 else beginning)


def write_rows(folder: Path, parts: Mapping[str, Iterable[Json]]) -> None:
    """Write each part's rows to `NAME.jsonl` in the folder, atomically. parts: name -> rows.

    Raises:
        WriteFailed: a file cannot be written.
    """
    for name, rows in parts.items():
        write_whole(folder / f"{name}.jsonl", b"".join(orjson.dumps(row) + b"\n" for row in rows))
