"""Which keys and types does a row have? A file's first rows must show all that come later.

`datasets.load_dataset("json")` takes the columns' types from the first 10 MB; a key or a tool that first appears behind
that breaks it. So one row of each shape is written first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from ngym.export.candidate import Row


class Shapes:
    """Numbers for shapes, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(_shape(value), len(self._numbers))


def leaders_first(rows: Iterable[Row]) -> Iterator[Row]:
    """The first row of each shape, then the others; both in their order."""
    seen: set[tuple[int, ...]] = set()
    others: list[Row] = []
    for row in rows:
        shapes = tuple(candidate.shape for candidate in row.candidates)
        if shapes in seen:
            others.append(row)
        else:
            seen.add(shapes)
            yield row
    yield from others


def _shape(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(sorted((key, _shape(below)) for key, below in value.items()))
    if isinstance(value, list):
        types = set(map(type, value))
        if types & {dict, list}:
            return frozenset(map(_shape, value))
        return frozenset(kind.__name__ for kind in types)  # token ids by the thousand
    return type(value).__name__
