"""Arguments of the Python API: their checks, and messages of the shared core, which name command-line options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ngym.errors import UsageError

INPUT = "tasks.jsonl"  # the file of an input that is given as rows
_FLAGS = {"overwrite": "overwrite=True", "resume": "resume=True", "keep-truncated": "keep_truncated=True"}
_FLAGS |= {"drop-reasoning": "keep_reasoning=False"}
_WITH_VALUE = ("agent", "format", "output")  # options whose value is in some messages
_NAMES = (*_WITH_VALUE, "best", "config", "input", "limit", "margin", "max-pairs", "min-reward", "pairs")
_FLAG = re.compile(rf"(?<![\w-])--({'|'.join(_FLAGS)})(?![\w-])")
_VALUE = re.compile(rf"(?<![\w-])--({'|'.join(_WITH_VALUE)}) ([\w./-]*\w)")
_NAME = re.compile(rf"(?<![\w-])--({'|'.join(_NAMES)})(?![\w-])")
_FIRST_NAME = re.compile(rf"\A--({'|'.join(_NAMES)})(?![\w-])")
_NO_ARGUMENT = re.compile(r" \(--map-agent [^)]*\)|, --map-agent \S+ only its rows")


@contextmanager
def as_arguments(folder: Path | None = None) -> Iterator[None]:
    """Errors of this block name arguments instead of options: `--min-reward` is `min_reward`, `--resume` `resume=True`.

    folder: has the rows of an input that is not a file (INPUT); they are `row N of input`, from 0.
    """
    try:
        yield
    except UsageError as error:
        error.args = (in_python(str(error), folder),)
        raise


def in_python(message: str, folder: Path | None = None) -> str:
    """A message of the core in the words of the Python API, see `as_arguments`."""
    if folder is not None:
        file = re.escape(str(folder / INPUT))
        message = re.sub(rf"{file}:(\d+)", lambda line: f"row {int(line[1]) - 1} of input", message)
        message = re.sub(file, "input", message)
    message = _FIRST_NAME.sub(lambda option: _snake(option[1]), _NO_ARGUMENT.sub("", message))
    message = _FLAG.sub(lambda option: _FLAGS[option[1]], message)
    message = _VALUE.sub(lambda option: f"{option[1]}={_shown(option[2])}", message)
    return _NAME.sub(lambda option: f"{_snake(option[1])}=", message)


def _snake(option: str) -> str:
    return option.replace("-", "_")


def _shown(value: str) -> str:
    """A value as a literal; a placeholder such as NAME stays."""
    return value if value.isupper() else repr(value)


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
