"""Curves of training runs, and charts of them as pictures and as text.

Pictures do not use pyplot, a display or the user's settings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast

from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError, printable
from ngym.files.atomic import write_whole
from ngym.plot.runs import Axis, History, PlottedRun, Series, by_seed
from ngym.runtime.live_region import duration
from ngym.schema import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OF_ANOTHER = ("low", "high", "count", "failed", "unscored")  # bounds of a metric, and its counts
UNSCORED = "frac_unscored"
CALIBRATION, CONFIDENCE = "val/calibration/", "confidence"
HELD_OUT = ("eval/", "val/")  # few values that are already means: drawn without smoothing


def smooth(series: Series, weight: float) -> Series:
    """The exponential moving average with this weight of the past, in [0, 1), without its bias towards the first values.

    m_n = w m_{n-1} + (1 - w) y_n, shown as m_n / (1 - w^n) (Adam's correction, arXiv 1412.6980, section 3). A band is
    smoothed in the same way.
    """
    if weight == 0:
        return series
    return replace(
        series,
        y=_moving_average(series.y, weight),
        low=_moving_average(series.low, weight),
        high=_moving_average(series.high, weight),
    )


def _moving_average(values: Sequence[float], weight: float) -> tuple[float, ...]:
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
    return Series(name, tuple(common), tuple(map(fmean, columns)), tuple(map(min, columns)), tuple(map(max, columns)))


REWARDS, LOSSES = ("reward/mean", UNSCORED), ("loss", "val/loss")


def default_metrics(names: Sequence[str]) -> list[str]:
    """The metrics that show whether a run learns: rewards, the share of unscored rollouts and the mean rewards on
    held-out tasks; or the losses, if there are no rewards.
    """
    evaluations = sorted(name for name in names if is_evaluation(name))
    return [name for name in (*REWARDS, *evaluations) if name in names] or [name for name in LOSSES if name in names]


def is_evaluation(name: str) -> bool:
    last = _last_part(name)
    return name.startswith("eval/") and (last == "greedy" or last.startswith("avg@"))


def matching_metrics(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The metrics that match, in the order of the patterns (`reward/mean`, `eval/*`). Bounds and counts only match a
    pattern that ends in them (`eval/*/count`).

    Raises:
        UsageError: a pattern matches no metric.
    """
    matches: list[str] = []
    for pattern in patterns:
        matching = [pattern] if pattern in names else [name for name in names if _matches(name, pattern)]
        if not matching:
            raise UsageError(f"--metric {pattern}: no run has logged it{did_you_mean(pattern, filter(is_own, names))}")
        matches += sorted(matching)
    return list(dict.fromkeys(matches))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and (is_own(name) or _last_part(name) == _last_part(pattern))


def is_own(name: str) -> bool:
    return _last_part(name) not in OF_ANOTHER


def _last_part(name: str) -> str:
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


def curves(runs: Sequence[PlottedRun], patterns: Sequence[str], by: Axis, smooth: float, band: bool) -> list[Curve]:
    """The curves by metric, then by run. patterns: of metrics; without any, those of `telling`.

    Raises:
        UsageError: there is nothing to draw.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.history.names))
    selected = matching_metrics(patterns, names) if patterns else default_metrics(names)
    groups = by_seed(runs) if band else {run.name: [run] for run in runs}
    result = [
        _smooth(Curve(name, metric, series, None), smooth)
        for metric in selected
        for name, group in groups.items()
        if (series := _of_group(metric, group, by)).x and (patterns or _is_worth_a_curve(series, metric))
    ]
    if not result:
        logged = f"logged so far: {', '.join(names[:20])}; name them with --metric"
        hint = logged if names else "nothing was logged yet"
        raise UsageError(f"{', '.join(run.name for run in runs)}: no values to draw; {hint}")
    return result


def default_series(entries: Iterable[Mapping[str, float]]) -> list[Series]:
    """The most relevant series of one run, from its log entries."""
    history = History.of(entries)
    named_series = [(name, history.series(name)) for name in default_metrics(history.names)]
    return [series for name, series in named_series if series.x and _is_worth_a_curve(series, name)]


def _is_worth_a_curve(series: Series, metric: str) -> bool:
    """Whether it is drawn by default: the share of unscored rollouts only if it is not always 0."""
    return metric != UNSCORED or any(series.y)


def panels(curves: Sequence[Curve], by: Axis, log: bool) -> list[Panel]:
    """A panel for each metric; a run has one colour in all of them."""
    runs = list(dict.fromkeys(curve.run for curve in curves))
    return [
        Panel(
            metric,
            [
                Line(replace(curve.series, name=curve.run), runs.index(curve.run), behind=curve.behind)
                for curve in curves
                if curve.metric == metric
            ],
            x="step" if by == "step" else "seconds",
            y_scale="log" if log else "linear",
        )
        for metric in dict.fromkeys(curve.metric for curve in curves)
    ]


class Bin(NamedTuple):
    """The held-out rows of a reward model whose confidence is in one range."""

    confidence: float
    accuracy: float
    share: float


def calibrations(runs: Sequence[PlottedRun]) -> dict[str, list[Bin]]:
    """Of each run the bins of its last evaluation, by confidence. Raises UsageError: a run has none."""
    by_run = {}
    for run in runs:
        last = run.history.last()
        names = {name.split("/")[2] for name in last if name.startswith(CALIBRATION)}
        bins = [Bin(*(last.get(f"{CALIBRATION}{name}/{part}", math.nan) for part in Bin._fields)) for name in names]
        if not bins:
            raise UsageError(
                f"{run.name}: no {CALIBRATION}... was logged; --calibration is for reward models with evaluation.data"
            )
        by_run[run.name] = sorted(each for each in bins if each.share > 0)
    return by_run


def reliability_panel(by_run: Mapping[str, Sequence[Bin]]) -> Panel:
    """A reliability diagram: accuracy by confidence, and the diagonal of a calibrated model."""
    lines = [
        Line(Series(run, tuple(each.confidence for each in bins), tuple(each.accuracy for each in bins)))
        for run, bins in by_run.items()
    ]
    low = min(0.5, *(each.confidence for bins in by_run.values() for each in bins))
    diagonal = Line(Series("calibrated", (low, 1.0), (low, 1.0)), colour=len(COLOURS) - 1, dashed=True)
    return Panel("accuracy on held-out rows", [*lines, diagonal], x=CONFIDENCE, y_range=(0, 1.02))


def _of_group(metric: str, group: Sequence[PlottedRun], by: Axis) -> Series:
    group_series = [run.history.series(metric, by) for run in group]
    return (
        group_series[0] if len(group_series) == 1 else together(metric, [series for series in group_series if series.x])
    )


def _smooth(curve: Curve, weight: float) -> Curve:
    if weight == 0 or curve.metric.startswith(HELD_OUT):
        return curve
    return curve._replace(series=smooth(curve.series, weight), behind=curve.series)


MARKS = "·#o+x*%@"
LABEL = 8  # characters of a number next to the plot
FORMATS = ("png", "svg")
COLOURS = ("#1f5fbf", "#d1602a", "#2a9d5c", "#8e44ad", "#c0392b", "#138d9a", "#b8860b", "#7f7f7f")
PANEL = (4.6, 3.0)  # inches
ACROSS = 3  # panels side by side
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.labelcolor": "#333333",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.dpi": 100,
    "font.family": "sans-serif",
    # matplotlib ships the first one, so the layout is the same everywhere
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ngym",
    "text.parse_math": False,  # names of metrics are not formulas
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}

WIDTH, HEIGHT = 60, 12  # characters


class _Frame(NamedTuple):
    """The values that the axes span."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, all_series: Sequence[Series]) -> Self:
        along = [x for series in all_series for x in series.x]
        values = [y for series in all_series for y in series.y]
        low, high = min(0.0, *values), max(values)
        high = 1.0 if 0.5 < high <= 1 else high
        return cls(min(along), max(max(along), min(along) + 1), low, high if high > low else low + 1)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The position from the lower left, both in [0, 1]."""
        return (x - self.first) / (self.last - self.first), (y - self.low) / (self.high - self.low)


def as_text(all_series: Sequence[Series], by: Axis = "step") -> str:
    """A text plot with its legend. Every series must have at least one point."""
    frame = _Frame.around(all_series)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for number, series in enumerate(all_series):
        for point in zip(series.x, series.y, strict=True):
            x, y = frame.place(*point)
            rows[HEIGHT - 1 - round(y * (HEIGHT - 1))][round(x * (WIDTH - 1))] = _mark(number)
    labels = {0: number_text(frame.high), HEIGHT - 1: number_text(frame.low)}
    lines = [f"{labels.get(index, ''):>{LABEL}} |{''.join(row).rstrip()}" for index, row in enumerate(rows)]
    first, last = (f"step {x:.0f}" if by == "step" else duration(x) for x in (frame.first, frame.last))
    margin = " " * (LABEL + 2)
    legend = [
        f"{margin}{_mark(number)} {printable(series.name)}: {number_text(series.y[0])} -> {number_text(series.y[-1])}"
        for number, series in enumerate(all_series)
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


MINUTE, HOUR, DAY = 60, 3600, 86400
TIMES = (1, 2, 5, 10, 15, 30, *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)), *(n * HOUR for n in (1, 2, 4, 8, 12)), DAY)


@dataclass(frozen=True)
class Line:
    """colour: index of a colour; None: that of its place in the panel. behind: the curve before smoothing."""

    series: Series
    colour: int | None = None
    dashed: bool = False
    behind: Series | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    x: the unit; "seconds" is shown as a duration. x_scale: "log4" marks each x, evenly spaced for powers of four.
    y_range: fixed; None: that of the values, from 0 on if `from_zero`.
    """

    title: str
    lines: Sequence[Line]
    x: str = "step"
    x_scale: Literal["linear", "log4"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    y_range: tuple[float, float] | None = None
    from_zero: bool = False


def write_picture(panels: Sequence[Panel], path: Path, across: int = ACROSS) -> None:
    """Write the panels as PNG or SVG, by the suffix of the file, atomically.

    Raises:
        UsageError: another suffix, or matplotlib is not installed. WriteFailed: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UsageError(f"{path}: a picture is a .png or an .svg file")
    write_whole(path, picture(panels, kind, across))


def picture(panels: Sequence[Panel], kind: str, across: int = ACROSS) -> bytes:
    """The bytes of a picture. kind: png or svg."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no warning about a home folder that is not writable
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"pictures need matplotlib ({error}); pip install 'ngym[plot]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, STYLE))  # mypy knows the names one by one
        columns = min(across, max(1, len(panels)))
        rows = max(1, math.ceil(len(panels) / columns))
        figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
        subplots = [figure.add_subplot(rows, columns, place) for place in range(1, len(panels) + 1)]
        for panel, axes in zip(panels, subplots, strict=True):
            _draw(panel, axes)
        _explain(figure, subplots, 2 * columns)
        made = BytesIO()
        nothing: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
        figure.savefig(made, format=kind, metadata=nothing[kind])
    return made.getvalue()


def _draw(panel: Panel, axes: Axes) -> None:
    axes.set_title(printable(panel.title))
    axes.set_xlabel("" if panel.x == "seconds" else panel.x)
    for place, line in enumerate(panel.lines):
        _draw_line(line, COLOURS[(place if line.colour is None else line.colour) % len(COLOURS)], axes)
    _scale_x(panel, axes)
    _scale_y(panel, axes)


def _draw_line(line: Line, colour: str, axes: Axes) -> None:
    series = line.series
    style: dict[str, Any] = {"color": colour, "linewidth": 1.5, "linestyle": (0, (4, 3)) if line.dashed else "-"}
    if line.behind is not None:
        axes.plot(line.behind.x, line.behind.y, color=colour, alpha=0.25, linewidth=1)
    if series.low:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    few: dict[str, Any] = {"marker": "o", "markersize": 3} if len(series.x) <= 40 else {}
    axes.plot(series.x, series.y, label=printable(series.name), **style, **few)


def _scale_x(panel: Panel, axes: Axes) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, MultipleLocator, NullLocator

    along = [x for line in panel.lines for x in line.series.x]
    if panel.x == "seconds":
        span = max(along) - min(along)
        axes.xaxis.set_major_locator(MultipleLocator(next((one for one in TIMES if one >= span / 6), span)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: duration(x)))
        return
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=panel.x != CONFIDENCE))
    if panel.x == CONFIDENCE:
        return
    if panel.x_scale == "log4":
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(along))))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def _scale_y(panel: Panel, axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    values = [y for line in panel.lines for y in line.series.y if y > 0]
    if panel.y_scale == "log" and values:
        axes.set_yscale("log")
        decades = math.log10(max(values) / min(values))
        number = FuncFormatter(lambda y, _: number_text(y))
        axes.yaxis.set_major_formatter(number)
        axes.yaxis.set_minor_formatter(number if decades < 1 else NullFormatter())
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    elif panel.from_zero:
        axes.set_ylim(bottom=0)


def _explain(figure: Figure, subplots: Sequence[Axes], columns: int) -> None:
    """Add legends: one for all panels, if one of them has the lines of all."""
    if not subplots:
        return
    fullest = max(subplots, key=lambda axes: len(_names(axes)))
    if len(subplots) > 1 and all(set(_names(axes)) <= set(_names(fullest)) for axes in subplots):
        figure.legend(*fullest.get_legend_handles_labels(), loc="outside lower left", ncols=columns)
        return
    for axes in subplots:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.19))


def _names(axes: Axes) -> list[str]:
    names: list[str] = axes.get_legend_handles_labels()[1]
    return names
