"""The rows of JSONL files as a lazy sequence: keeps only the offset of each row, 8 bytes, and reads rows on access."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import overload

import orjson

from ngym.errors import UsageError
from ngym.files.jsonl import BOM, READ_BYTES, read
from ngym.schema import Json


class FileRows(Sequence[Json]):
    """The rows that the files had when they were first counted; later rows are not included. A torn last line is left
    out.

    Raises:
        UsageError: on access, if a file cannot be read or a line is not a JSON object.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Json: ...
    @overload
    def __getitem__(self, index: slice) -> list[Json]: ...
    def __getitem__(self, index: int | slice) -> Json | list[Json]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        file = bisect_right(self._ends, place)
        number = place - (self._ends[file - 1] if file else 0)
        return _row_at(self.paths[file], self._starts[file][number])

    def __iter__(self) -> Iterator[Json]:
        """Iterate over all rows, reading each file once."""
        for path, starts in zip(self.paths, self._starts, strict=True):
            wanted = len(starts)
            for line in read(path):
                if not wanted:
                    break
                if line.problem:
                    raise UsageError(f"{path}:{line.number}: {line.problem}")
                wanted -= 1
                yield line.row

    @cached_property
    def _starts(self) -> list[array[int]]:
        return [_starts_of(path) for path in self.paths]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self._starts)))


def _starts_of(path: Path) -> array[int]:
    """The offset of each row."""
    starts, start, raw = array("Q"), 0, b"\n"
    try:
        with path.open("rb", buffering=READ_BYTES) as file:
            for raw in file:
                if not raw.isspace():
                    starts.append(start)
                start += len(raw)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if starts and not raw.isspace() and not raw.endswith(b"\n") and not _is_json(raw.removeprefix(BOM)):
        starts.pop()
    return starts


def _row_at(path: Path, start: int) -> Json:
    try:
        with path.open("rb") as file:
            file.seek(start)
            raw = file.readline()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        row = orjson.loads(raw.removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path} (byte {start}): not JSON: {error}; load the file again if it was changed") from None
    if not isinstance(row, dict):
        raise UsageError(f"{path} (byte {start}): not a JSON object but {type(row).__name__}")
    return row


def _is_json(raw: bytes) -> bool:
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True
