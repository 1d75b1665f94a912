"""Draws curves as text, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

from ngym.plot.runs import Axis, Series
from ngym.rollout import printable
from ngym.runtime.live_region import duration

WIDTH, HEIGHT = 60, 12  # characters
MARKS = "·#o+x*%@"
LABEL = 8  # characters of a number next to the plot


class _Frame(NamedTuple):
    """The values that the axes span."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, shown: Sequence[Series]) -> Self:
        along = [x for series in shown for x in series.x]
        values = [y for series in shown for y in series.y]
        low, high = min(0.0, *values), max(values)
        high = 1.0 if 0.5 < high <= 1 else high
        return cls(min(along), max(max(along), min(along) + 1), low, high if high > low else low + 1)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The position from the lower left, both in [0, 1]."""
        return (x - self.first) / (self.last - self.first), (y - self.low) / (self.high - self.low)


def as_text(shown: Sequence[Series], by: Axis = "step") -> str:
    """A text plot with its legend. Every series must have at least one point."""
    frame = _Frame.around(shown)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for number, series in enumerate(shown):
        for point in zip(series.x, series.y, strict=True):
            x, y = frame.place(*point)
            rows[HEIGHT - 1 - round(y * (HEIGHT - 1))][round(x * (WIDTH - 1))] = _mark(number)
    labels = {0: number_text(frame.high), HEIGHT - 1: number_text(frame.low)}
    lines = [f"{labels.get(index, ''):>{LABEL}} |{''.join(row).rstrip()}" for index, row in enumerate(rows)]
    first, last = (f"step {x:.0f}" if by == "step" else duration(x) for x in (frame.first, frame.last))
    margin = " " * (LABEL + 2)
    legend = [
        f"{margin}{_mark(number)} {printable(series.name)}: {number_text(series.y[0])} -> {number_text(series.y[-1])}"
        for number, series in enumerate(shown)
    ]
    return "\n".join([*lines, f"{'':>{LABEL}} +{'-' * WIDTH}", f"{margin}{first}{last:>{WIDTH - len(first)}}", *legend])


def _mark(number: int) -> str:
    return MARKS[number % len(MARKS)]


def number_text(value: float) -> str:
    """`0.125`, `128`, `12,345`, `3.2e-06`: short, with the digits that matter."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.1e}"
    if size >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3f}" if size < 100 else f"{value:.1f}"
