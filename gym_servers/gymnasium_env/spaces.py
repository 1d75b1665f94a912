"""Spaces as text: descriptions of actions, answers parsed as actions, observations as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from gymnasium import spaces

MAX_CHARS = 10_000
MAX_NUMBERS = 256  # of an observation; a larger one is a picture


class NoAction(Exception):
    """The answer is not an action of the space; the message says why."""


def described(space: spaces.Space[Any]) -> str:
    """What an action looks like, in words."""
    match space:
        case spaces.Discrete():
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case spaces.MultiDiscrete():
            ranges = ", ".join(
                f"{low} to {low + n - 1}" for low, n in zip(space.start.flat, space.nvec.flat, strict=True)
            )
            return f"a JSON list of {space.nvec.size} whole numbers ({ranges})"
        case spaces.MultiBinary():
            return f"a JSON list of {math.prod(space.shape)} numbers, each 0 or 1"
        case spaces.Box():
            return f"a JSON list of shape {list(space.shape)} of numbers from {bound(space.low)} to {bound(space.high)}"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters, as a JSON string"
        case spaces.Tuple():
            return f"a JSON list of: {'; '.join(described(part) for part in space.spaces)}"
        case spaces.Dict():
            return "a JSON object of: " + "; ".join(f'"{key}": {described(part)}' for key, part in space.spaces.items())
    raise NotImplementedError(f"a space of kind {type(space).__name__} has no text form")


def bound(values: Any) -> str:
    return f"{values.flat[0]:g}" if np.all(values == values.flat[0]) else str(values.tolist())


def action_in(space: spaces.Space[Any], text: str) -> Any:
    """Parse an answer as an action. Raises NoAction."""
    try:
        value = json.loads(text[:MAX_CHARS], parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NoAction(f"it must be {described(space)}, and {text[:40]!r} is not JSON") from None
    if isinstance(space, spaces.Box) and space.shape == (1,) and not isinstance(value, list):
        value = [value]
    action = _read(space, value)
    if not space.contains(action):
        raise NoAction(f"it must be {described(space)}")
    return action


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _read(space: spaces.Space[Any], value: Any) -> Any:
    match space, value:
        case spaces.Discrete(), int() if not isinstance(value, bool) and abs(value) < 2**62:
            return np.int64(value)
        case ((spaces.MultiDiscrete() | spaces.MultiBinary()), list()):
            return _array(value, int, space)
        case spaces.Box(), list():
            return _array(value, int if np.issubdtype(space.dtype, np.integer) else float, space)
        case spaces.Text(), str():
            return value
        case spaces.Tuple(), list() if len(value) == len(space.spaces):
            return tuple(_read(part, item) for part, item in zip(space.spaces, value, strict=True))
        case spaces.Dict(), dict() if value.keys() == space.spaces.keys():
            return {key: _read(part, value[key]) for key, part in space.spaces.items()}
    raise NoAction(f"it must be {described(space)}")


def _array(value: list[Any], kind: type, space: spaces.Space[Any]) -> Any:
    allowed = (int,) if kind is int else (int, float)
    if not all(type(leaf) in allowed and abs(leaf) < 1e15 for leaf in _leaves(value)):
        raise NoAction(f"it must be {described(space)}")
    try:
        return np.array(value, dtype=space.dtype)
    except (ValueError, OverflowError):  # lists of different lengths
        raise NoAction(f"it must be {described(space)}") from None


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def written(space: spaces.Space[Any], value: Any) -> str:
    """An observation as JSON; numbers have six significant digits."""
    return json.dumps(_plain(space, value), ensure_ascii=False)


def _plain(space: spaces.Space[Any], value: Any) -> Any:
    match space:
        case spaces.Tuple():
            return [_plain(part, item) for part, item in zip(space.spaces, value, strict=True)]
        case spaces.Dict():
            return {key: _plain(part, value[key]) for key, part in space.spaces.items()}
        case spaces.Text():
            return value
    numbers = np.asarray(value)
    if numbers.size > MAX_NUMBERS:
        raise NotImplementedError(f"an observation of {numbers.size} numbers is a picture, which has no text form")
    if np.issubdtype(numbers.dtype, np.floating):
        return _rounded(numbers.tolist())
    return numbers.tolist()


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.6g}")
