"""A map from whole numbers to small ones: 4 bytes a key where keys lie close together, as the indices of tasks do."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import merge

SLACK = 1024  # keys that may be missing in the array, plus MISSING for each that is there
MISSING = 4
NONE = -1


class DenseInts:
    """Values are at least 0 and below 2^31. A key far away from the others costs as much as in a dict."""

    def __init__(self) -> None:
        self._base: int | None = None
        self._values = array("i")  # of base, base + 1, ...
        self._others: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        place = key - (self._base or 0)
        if 0 <= place < len(self._values) and self._values[place] != NONE:
            return self._values[place]
        return self._others.get(key)

    def put(self, key: int, value: int) -> None:
        self._count += self.get(key) is None
        if self._base is None:
            self._base = max(0, key - SLACK)
        place = key - self._base
        if key in self._others or not 0 <= place < MISSING * self._count + 2 * SLACK:
            self._others[key] = value
            return
        if place >= len(self._values):
            self._values.extend([NONE] * (place + 1 - len(self._values)))
        self._values[place] = value

    def items(self) -> Iterator[tuple[int, int]]:
        """By key."""
        base = self._base or 0
        near = ((base + place, value) for place, value in enumerate(self._values) if value != NONE)
        return merge(near, sorted(self._others.items()))
