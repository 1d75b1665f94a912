"""Runs and metrics in, curves out: for each metric that is wanted one of each run, or one of each group of seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ngym.errors import UsageError
from ngym.plot.choice import UNSCORED, asked, telling
from ngym.plot.history import Axis, History, Series
from ngym.plot.picture import Line, Panel
from ngym.plot.runs import Run, by_seed
from ngym.plot.series import smoothed, together
from ngym.schema import Json

HELD_OUT = ("eval/", "val/")  # few, and means already: they are drawn as they are


class Curve(NamedTuple):
    """One metric of one run, or of several seeds. behind: the same before it was smoothed, if it was."""

    run: str
    metric: str
    series: Series
    behind: Series | None

    def as_json(self, by: Axis) -> Json:
        points = list(zip(self.series.x, self.series.y, strict=True))
        band = {"low": self.series.low, "high": self.series.high} if self.series.low else {}
        return {"run": self.run, "metric": self.metric, "x": by, "points": points, **band}


def curves(runs: Sequence[Run], patterns: Sequence[str], by: Axis, smooth: float, band: bool) -> list[Curve]:
    """By metric, then by run. patterns: of metrics; those that tell most without one.

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
    """What tells most of one run, from what it logged."""
    history = History.of(entries)
    found = [(name, history.series(name)) for name in telling(history.names)]
    return [series for name, series in found if series.x and _is_worth_a_curve(series, name)]


def _is_worth_a_curve(series: Series, metric: str) -> bool:
    """Whether it is drawn without being asked for: the share of unscored rollouts only where there are any."""
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
