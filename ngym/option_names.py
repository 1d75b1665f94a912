"""Names of options in messages of code that the commands and the Python API share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_python: ContextVar[bool] = ContextVar("python_option_names", default=False)
_NEGATED = {"keep_reasoning": "--drop-reasoning"}  # flags that switch an argument off


@contextmanager
def python_option_names() -> Iterator[None]:
    """Inside, and in tasks that are created inside, `option` and `option_name` return the spelling of the Python API."""
    before = _python.set(True)
    try:
        yield
    finally:
        _python.reset(before)


def option(name: str, value: object = None) -> str:
    """An option as a user writes it: `--min-reward`, or `min_reward=` in Python.

    Args:
        name: of the argument in Python.
        value: `--agent a` or `agent='a'`; of a flag `--resume` or `resume=True`; of a mapping `--map-agent a=b` or
            `map_agent={'a': 'b'}`; a list repeats the option of the command line.
    """
    if _python.get():
        return f"{name}=" if value is None else f"{name}={value!r}"
    if value is None or isinstance(value, bool):
        return option_name(name)
    if isinstance(value, Mapping):
        value = [f"{key}={one}" for key, one in value.items()]
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return " ".join(f"{option_name(name)} {one}" for one in values)


def another_output() -> str:
    return f"choose another {option('output')}"


def option_name(name: str) -> str:
    """An option as the subject of a sentence: `--min-reward must be ...`, or `min_reward must be ...` in Python."""
    return name if _python.get() else _NEGATED.get(name) or "--" + name.replace("_", "-")
