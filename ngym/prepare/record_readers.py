"""The records of a downloaded file, one by one: JSON Lines, a JSON array, CSV, Parquet, or plain lines."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from ngym.errors import UsageError
from ngym.files.jsonl import checked
from ngym.schema import Json

MAX_FIELD_CHARS = 1 << 24  # of a CSV file
BATCH_ROWS = 1_000


def joined(paths: Sequence[Path]) -> Iterator[Json]:
    """The records of files that belong together, as one: by `id` where they have one, else line by line.

    Raises:
        UsageError: one of them is not what its name says, or they do not belong together.
    """
    first, *others = paths
    if not others:
        yield from records(first)
        return
    rest = [list(records(path)) for path in others]
    by_id = [{row["id"]: row for row in rows if "id" in row} for rows in rest]
    number = -1
    for number, record in enumerate(records(first)):
        merged = dict(record)
        for path, rows, known in zip(others, rest, by_id, strict=True):
            other = known.get(record["id"]) if "id" in record else rows[number] if number < len(rows) else None
            if other is None:
                raise UsageError(f"{path}: has nothing for record {number + 1} of {first.name}")
            merged |= other
        yield merged
    for path, rows in zip(others, rest, strict=True):
        if len(rows) != number + 1:
            raise UsageError(f"{path}: has {len(rows)} records, and {first.name} has {number + 1}")


def records(path: Path) -> Iterator[Json]:
    """The records of a file, by its name. Each line of a text is `{name of the file: line}`."""
    match path.suffix:
        case ".jsonl" | ".json":
            yield from _json(path)
        case ".csv":
            csv.field_size_limit(MAX_FIELD_CHARS)
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        case ".parquet":
            yield from _parquet(path)
        case ".txt":
            with path.open(encoding="utf-8-sig", newline="\n") as file:
                for line in file:
                    yield {path.name: line.rstrip("\r\n")}
        case other:
            raise UsageError(f"{path}: no reader for {other or 'a file without an ending'}")


def _json(path: Path) -> Iterator[Json]:
    with path.open("rb") as file:
        is_array = file.read(64).lstrip()[:1] == b"["
    if not is_array:
        yield from (line.row for line in checked(path, lambda row: None))
        return
    try:
        yield from orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[Json]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(f"{path.name} is a Parquet file: pip install 'ngym[prepare]' ({error})") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(BATCH_ROWS):
            yield from batch.to_pylist()
    except arrow.ArrowException as error:
        raise UsageError(f"{path}: not a Parquet file that can be read: {error}") from None
