"""Arguments of the Python API: their checks, and their names in errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError
from ngym.option_names import python_option_names

INPUT = "input.jsonl"  # the file of an input that is given as rows


@contextmanager
def as_arguments(folder: Path | None = None, name: str = "input") -> Iterator[None]:
    """Errors of this block name arguments of the Python API instead of options of a command.

    folder: has the rows of an input that is not a file (INPUT); they are `row N of input`, from 0.
    name: of the argument with that input.
    """
    try:
        with python_option_names():
            yield
    except UsageError as error:
        if folder is not None:
            error.args = (_with_row_numbers(str(error), folder / INPUT, name),)
        raise


def _with_row_numbers(message: str, file: Path, name: str) -> str:
    path = re.escape(str(file))
    message = re.sub(rf"{path}:(\d+)", lambda line: f"row {int(line[1]) - 1} of {name}", message)
    return re.sub(path, name, message)


def row_as_json(row: Mapping[str, Any], number: int) -> bytes:
    """The JSON text of a row, whose values may be numpy's.

    Raises:
        UsageError: a field has no JSON form; the message has its name and the row's number.
    """
    try:
        return _as_json(dict(row))
    except TypeError as error:
        for name, value in row.items():
            try:
                _as_json({name: value})
            except TypeError as of_field:
                raise UsageError(f"row {number}: {name!r} cannot be written as JSON: {of_field}") from None
        raise UsageError(f"row {number} cannot be written as JSON: {error}") from None


def _as_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def at_least_one(**arguments: int | None) -> None:
    """
    Raises:
        UsageError: one of these arguments is not a whole number, or less than 1.
    """
    whole(**arguments)
    for name, value in arguments.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")


def whole(**arguments: int | None) -> None:
    """
    Raises:
        UsageError: one of these arguments is not a whole number.
    """
    for name, value in arguments.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{name} must be a whole number, not {value!r:.60}")


def above_zero(**arguments: float) -> None:
    """
    Raises:
        UsageError: one of these arguments is not a number above 0.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UsageError(f"{name} must be a number above 0, not {value!r:.60}")


def one_of(known: Collection[str], **arguments: str) -> None:
    """
    Raises:
        UsageError: one of these arguments is another word.
    """
    for name, value in arguments.items():
        if value not in known:
            raise UsageError(f"{name}: {value!r:.60} is unknown{did_you_mean(str(value), known)}")
