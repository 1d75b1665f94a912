"""Arguments of the Python functions: checks, and tasks in any of their forms."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from ngym.errors import UsageError
from ngym.schema import Json

Input = Any
"""A path; an iterable of rows, such as a `datasets.Dataset`; or a data frame of pandas or polars."""


class Folder:
    """A temporary folder that lives as long as this object, at most as long as the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ngym-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def tasks_in(given: Input, folder: Path) -> Path:
    """The given file, or a new one in this folder with the given rows.

    Raises:
        UsageError: the input has another type.
    """
    if isinstance(given, str | Path):
        if not Path(given).is_file():
            raise UsageError(f"{given}: no such file (input=)")
        return Path(given)
    path = folder / "tasks.jsonl"
    with path.open("wb") as file:
        for number, row in enumerate(rows_of(given)):
            file.write(_line(row, number))
    return path


def rows_of(given: Any) -> Iterable[Json]:
    """The rows of an input; a missing value of a data frame is left out of its row."""
    if isinstance(given, Mapping):
        return [dict(given)]
    if hasattr(given, "iter_rows"):  # polars
        return map(_present, given.iter_rows(named=True))
    if hasattr(given, "itertuples"):  # pandas
        return map(_present, given.to_dict("records"))
    if isinstance(given, Iterable):
        return given
    raise UsageError(f"input must be rows, a path or a data frame, not {type(given).__name__}")


def _present(row: Mapping[str, Any]) -> Json:
    # missing values are None, or NaN or NA of pandas
    return {name: value for name, value in row.items() if value is not None and not _is_nan(value)}


def _is_nan(value: Any) -> bool:
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))


def _line(row: Any, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise UsageError(
            f'row {number} must be an object such as {{"responses_create_params": {{"input": "..."}}}}, not {row!r:.60}'
        )
    try:
        return orjson.dumps(dict(row), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError as error:
        raise UsageError(f"row {number} cannot be written as JSON: {error}") from None


def at_least_one(**given: int | None) -> None:
    """
    Raises:
        UsageError: one of these arguments is less than 1.
    """
    for name, value in given.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
