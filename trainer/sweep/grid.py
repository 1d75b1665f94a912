"""`optimizer.lr=1e-6,3e-6` and `seed=0,1` -> four combinations, each with a name that a folder can have."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import yaml

from ngym.errors import UsageError

UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
LONGEST_VALUE, LONGEST_NAME = 40, 160  # characters; a file name may have 255 bytes


class Axis(NamedTuple):
    """A key of the recipe and the values that it takes, as they were written."""

    key: str
    values: list[str]


class Combination(NamedTuple):
    """One run of a sweep."""

    name: str
    values: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]


def axes(sweeps: Sequence[str]) -> list[Axis]:
    """What was written as `key=value,value`.

    Raises:
        UsageError: it is not of that form, or a key or value stands twice; one line for each mistake.
    """
    found: list[Axis] = []
    wrong: list[str] = []
    for sweep in sweeps:
        try:
            found.append(_axis(sweep))
        except UsageError as error:
            wrong.append(str(error))
    keys = Counter(axis.key for axis in found)
    wrong += [f"--sweep {key}: given {count} times; list all values once" for key, count in keys.items() if count > 1]
    if wrong:
        raise UsageError("\n".join(wrong))
    return found


def combinations(of: Sequence[Axis]) -> list[Combination]:
    """Their cartesian product; the last axis changes fastest."""
    labels = _labels([axis.key for axis in of])
    words = [_words(axis.values) for axis in of]
    found = []
    for places in product(*(range(len(axis.values)) for axis in of)):
        parts = [f"{label}={word[place]}" for label, word, place in zip(labels, words, places, strict=True)]
        values = {axis.key: axis.values[place] for axis, place in zip(of, places, strict=True)}
        found.append(Combination(_at_most(LONGEST_NAME, ",".join(parts)), values))
    return found


def _axis(sweep: str) -> Axis:
    key, equals, listed = sweep.partition("=")
    if not equals or not key:
        raise UsageError(f"--sweep {sweep!r} is not of the form key=value,value, such as optimizer.lr=1e-6,3e-6")
    text = f"[{listed}]"
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "it cannot be read"
        raise UsageError(f"--sweep {sweep!r}: not a list of YAML values: {reason}; quote what is no word") from None
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(text) or not node.value:
        raise UsageError(f"--sweep {sweep!r}: give at least one value, such as {key}=1,2")
    values = [text[value.start_mark.index : value.end_mark.index].strip() for value in node.value]
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise UsageError(f"--sweep {sweep!r}: the value {twice[0]} stands twice")
    return Axis(key, values)


def _labels(keys: Sequence[str]) -> list[str]:
    """The last word of each key; the whole key where two would be called the same."""
    words = Counter(key.rpartition(".")[2] for key in keys)
    return [word if words[word := key.rpartition(".")[2]] == 1 else key for key in keys]


def _words(values: Sequence[str]) -> list[str]:
    """Each value as a word; those that would be the same word get a hash of their own."""
    words = [_at_most(LONGEST_VALUE, UNSAFE.sub("-", value.strip("\"'[]{} "))) for value in values]
    count = Counter(words)
    return [word if count[word] == 1 else f"{word}-{_hash(value)}" for word, value in zip(words, values, strict=True)]


def _at_most(length: int, word: str) -> str:
    """Its end, which is what tells paths apart, and a hash of the whole where it is too long."""
    return word if len(word) <= length else f"{_hash(word)}-{word[9 - length :]}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
