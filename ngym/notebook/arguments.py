"""Arguments of the Python API: their checks, and their names in errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ngym.errors import UsageError
from ngym.option_names import python_option_names

INPUT = "tasks.jsonl"  # the file of an input that is given as rows


@contextmanager
def as_arguments(folder: Path | None = None) -> Iterator[None]:
    """Errors of this block name arguments of the Python API instead of options of a command.

    folder: has the rows of an input that is not a file (INPUT); they are `row N of input`, from 0.
    """
    try:
        with python_option_names():
            yield
    except UsageError as error:
        if folder is not None:
            error.args = (_with_row_numbers(str(error), folder / INPUT),)
        raise


def _with_row_numbers(message: str, file: Path) -> str:
    path = re.escape(str(file))
    message = re.sub(rf"{path}:(\d+)", lambda line: f"row {int(line[1]) - 1} of input", message)
    return re.sub(path, "input", message)


def at_least_one(**given: int | None) -> None:
    """
    Raises:
        UsageError: one of these arguments is not a whole number, or less than 1.
    """
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name} must be a whole number, not {value!r}")
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
