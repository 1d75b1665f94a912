"""Series in, series out: smoothed, and those of several seeds as one with a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ngym.plot.history import Series


def smoothed(series: Series, weight: float) -> Series:
    """The exponential moving average with this weight of the past, in [0, 1), without its bias towards the first values.

    m_n = w m_{n-1} + (1 - w) y_n, shown as m_n / (1 - w^n) (Adam's correction, arXiv 1412.6980, section 3). A band is
    smoothed alike.
    """
    if weight == 0:
        return series
    return replace(
        series, y=_averaged(series.y, weight), low=_averaged(series.low, weight), high=_averaged(series.high, weight)
    )


def _averaged(values: Sequence[float], weight: float) -> tuple[float, ...]:
    mean, missing, averaged = 0.0, 1.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        missing *= weight
        averaged.append(mean / (1 - missing))
    return tuple(averaged)


def together(name: str, seeds: Sequence[Series]) -> Series:
    """The mean of several runs at the x that all of them have, between the lowest and the highest of them."""
    values = [dict(zip(one.x, one.y, strict=True)) for one in seeds]
    common = sorted(set.intersection(*map(set, values))) if values else []
    columns = [[one[x] for one in values] for x in common]
    return Series(
        name,
        tuple(common),
        tuple(map(fmean, columns)),
        tuple(map(min, columns)),
        tuple(map(max, columns)),
    )
