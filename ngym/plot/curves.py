"""Selects the metrics to draw, smooths their curves, and aggregates runs that differ only in their seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import NamedTuple

from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError
from ngym.plot.picture import Line, Panel
from ngym.plot.runs import Axis, History, Run, Series, by_seed
from ngym.schema import Json

OF_ANOTHER = ("low", "high", "count", "failed", "unscored")  # bounds of a metric, and its counts
UNSCORED = "frac_unscored"
HELD_OUT = ("eval/", "val/")  # few values that are already means: drawn without smoothing


def smoothed(series: Series, weight: float) -> Series:
    """The exponential moving average with this weight of the past, in [0, 1), without its bias towards the first values.

    m_n = w m_{n-1} + (1 - w) y_n, shown as m_n / (1 - w^n) (Adam's correction, arXiv 1412.6980, section 3). A band is
    smoothed in the same way.
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
    """The mean of several runs at their common x, with a band from the lowest to the highest value."""
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


REWARDS, LOSSES = ("reward/mean", UNSCORED), ("loss", "val/loss")


def telling(names: Sequence[str]) -> list[str]:
    """The metrics that show whether a run learns: rewards, the share of unscored rollouts and the mean rewards on
    held-out tasks; or the losses, if there are no rewards.
    """
    evaluations = sorted(name for name in names if is_evaluation(name))
    return [name for name in (*REWARDS, *evaluations) if name in names] or [name for name in LOSSES if name in names]


def is_evaluation(name: str) -> bool:
    last = _last(name)
    return name.startswith("eval/") and (last == "greedy" or last.startswith("avg@"))


def asked(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The metrics that match, in the order of the patterns (`reward/mean`, `eval/*`). Bounds and counts only match a
    pattern that ends in them (`eval/*/count`).

    Raises:
        UsageError: a pattern matches no metric.
    """
    found: list[str] = []
    for pattern in patterns:
        matching = [pattern] if pattern in names else [name for name in names if _matches(name, pattern)]
        if not matching:
            raise UsageError(f"--metric {pattern}: no run has logged it{did_you_mean(pattern, filter(is_own, names))}")
        found += sorted(matching)
    return list(dict.fromkeys(found))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and (is_own(name) or _last(name) == _last(pattern))


def is_own(name: str) -> bool:
    return _last(name) not in OF_ANOTHER


def _last(name: str) -> str:
    return name.rpartition("/")[2]


class Curve(NamedTuple):
    """One metric of one run, or of several seeds. behind: the curve before smoothing, if it is smoothed."""

    run: str
    metric: str
    series: Series
    behind: Series | None

    def as_json(self, by: Axis) -> Json:
        points = list(zip(self.series.x, self.series.y, strict=True))
        band = {"low": self.series.low, "high": self.series.high} if self.series.low else {}
        return {"run": self.run, "metric": self.metric, "x": by, "points": points, **band}


def curves(runs: Sequence[Run], patterns: Sequence[str], by: Axis, smooth: float, band: bool) -> list[Curve]:
    """The curves by metric, then by run. patterns: of metrics; without any, those of `telling`.

    Raises:
        UsageError: there is nothing to draw.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.history.names))
    wanted = asked(patterns, names) if patterns else telling(names)
    groups = by_seed(runs) if band else {run.name: [run] for run in runs}
    found = [
        _smooth(Curve(name, metric, series, None), smooth)
        for metric in wanted
        for name, group in groups.items()
        if (series := _of_group(metric, group, by)).x and (patterns or _is_worth_a_curve(series, metric))
    ]
    if not found:
        said = f"logged so far: {', '.join(names[:20])}" if names else "nothing was logged yet"
        raise UsageError(f"{', '.join(run.name for run in runs)}: no values to draw; {said}; name them with --metric")
    return found


def told(entries: Iterable[Mapping[str, float]]) -> list[Series]:
    """The most relevant series of one run, from its log entries."""
    history = History.of(entries)
    found = [(name, history.series(name)) for name in telling(history.names)]
    return [series for name, series in found if series.x and _is_worth_a_curve(series, name)]


def _is_worth_a_curve(series: Series, metric: str) -> bool:
    """Whether it is drawn by default: the share of unscored rollouts only if it is not always 0."""
    return metric != UNSCORED or any(series.y)


def panels(found: Sequence[Curve], by: Axis, log: bool) -> list[Panel]:
    """A panel for each metric; a run has one colour in all of them."""
    runs = list(dict.fromkeys(curve.run for curve in found))
    return [
        Panel(
            metric,
            [
                Line(replace(curve.series, name=curve.run), runs.index(curve.run), behind=curve.behind)
                for curve in found
                if curve.metric == metric
            ],
            x="step" if by == "step" else "seconds",
            y_scale="log" if log else "linear",
        )
        for metric in dict.fromkeys(curve.metric for curve in found)
    ]


def _of_group(metric: str, group: Sequence[Run], by: Axis) -> Series:
    found = [run.history.series(metric, by) for run in group]
    return found[0] if len(found) == 1 else together(metric, [series for series in found if series.x])


def _smooth(curve: Curve, weight: float) -> Curve:
    if weight == 0 or curve.metric.startswith(HELD_OUT):
        return curve
    return curve._replace(series=smoothed(curve.series, weight), behind=curve.series)
