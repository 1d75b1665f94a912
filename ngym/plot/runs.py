"""Reads training runs: the history of their metrics, their recipes, and groups of seeds.

If a step was logged twice, the later entry counts; if the steps go back, later entries are dropped, because the run
repeated those steps. An incomplete last line is not read.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import digits
from typing import Any, Literal, NamedTuple, Self

import yaml

from ngym.errors import UsageError
from ngym.files.jsonl import read
from ngym.schema import Json

METRICS = "metrics.jsonl"
SWEEP = "sweep.jsonl"
Axis = Literal["step", "time"]
RECIPE = "recipe.yaml"

STEP, ELAPSED = "step", "time/elapsed"  # seconds since the last start of the run


@dataclass(frozen=True)
class Series:
    """One curve. x: steps, or seconds; ascending. low, high: a band around y, [N] each, or empty."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass
class _Column:
    """rows: the rows of the history that have a value."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def put(self, row: int, value: float) -> None:
        if self.rows and self.rows[-1] == row:
            self.values[-1] = value
        else:
            self.rows.append(row)
            self.values.append(value)

    def cut(self, row: int) -> None:
        length = bisect_left(self.rows, row)
        del self.rows[length:], self.values[length:]


class History:
    """All log entries, a row for each step. resumed: the first step after each restart of the run."""

    def __init__(self) -> None:
        self.steps: array[float] = array("d")
        self.resume_steps: list[float] = []
        self._seconds: array[float] = array("d")
        self._columns: dict[str, _Column] = {}
        self._before = 0.0  # seconds before the last restart
        self._elapsed = 0.0

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, object]]) -> Self:
        history = cls()
        for entry in entries:
            history.add(entry)
        return history

    @property
    def names(self) -> list[str]:
        """The metrics, in order of appearance."""
        return [name for name, column in self._columns.items() if column.rows]

    def add(self, entry: Mapping[str, object]) -> None:
        """Add the next entry; an entry without a step is ignored."""
        step = _number(entry.get(STEP))
        if step is None:
            return
        elapsed = _number(entry.get(ELAPSED))
        self._detect_restart(step, elapsed)
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self._seconds.append(self._before + self._elapsed)
        row = len(self.steps) - 1
        for name, logged in entry.items():
            value = _number(logged)
            if name not in (STEP, ELAPSED) and (value is not None or logged is None):
                column = self._columns.setdefault(name, _Column())
                column.put(row, math.nan if value is None else value)

    def series(self, name: str, by: Axis = "step") -> Series:
        """The finite values of a metric; {name}/low and {name}/high are its band."""
        values = {row: value for row, value in self._values_of(name).items() if math.isfinite(value)}
        along = self.steps if by == "step" else self._seconds
        low, high = self._values_of(f"{name}/low"), self._values_of(f"{name}/high")
        whole = values and all(row in low and row in high for row in values)
        return Series(
            name,
            tuple(along[row] for row in values),
            tuple(values.values()),
            tuple(low[row] for row in values) if whole else (),
            tuple(high[row] for row in values) if whole else (),
        )

    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: self._columns[name].values[-1] for name in self.names}

    def rows(self) -> list[dict[str, float | None]]:
        """A record for each step: the step, its metrics, and the seconds so far, including those before restarts."""
        rows: list[dict[str, float | None]] = [{STEP: int(step)} for step in self.steps]
        for name, column in self._columns.items():
            for row, value in zip(column.rows, column.values, strict=True):
                rows[row][name] = None if math.isnan(value) else value
        if any(self._seconds):
            for row_number, seconds in zip(rows, self._seconds, strict=True):
                row_number[ELAPSED] = seconds
        return rows

    def _values_of(self, name: str) -> dict[int, float]:
        column = self._columns.get(name, _Column())
        return dict(zip(column.rows, column.values, strict=True))

    def _detect_restart(self, step: float, elapsed: float | None) -> None:
        """Detect a restart of the run at this entry."""
        back = bool(self.steps) and step < self.steps[-1]
        if back:
            length = bisect_left(self.steps, step)
            del self.steps[length:], self._seconds[length:]
            for column in self._columns.values():
                column.cut(length)
        if back or (elapsed is not None and self.steps and elapsed < self._elapsed):
            self.resume_steps.append(step)
            self._before = self._seconds[-1] if self._seconds else 0.0
        self._elapsed = elapsed if elapsed is not None else self._elapsed


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def metrics_file(place: Path) -> Path:
    """The file with the metrics of a run. place: the run's folder, or the file itself.

    Raises:
        UsageError: there is no such file.
    """
    file = place / METRICS if place.is_dir() else place
    if not file.is_file():
        raise UsageError(f"{place}: no {METRICS} there; give a run's folder, or a file of metrics")
    return file


def read_history(file: Path) -> History:
    """
    Raises:
        UsageError: the file cannot be read, or a complete line is not an entry.
    """
    history = History()
    for line in read(file):
        if line.problem is not None:
            if line.complete:
                raise UsageError(f"{file}:{line.number}: {line.problem}")
            break
        if STEP not in line.row:
            raise UsageError(f"{file}:{line.number}: not an entry of a run's metrics: it has no {STEP!r}")
        history.add(line.row)
    return history


SEED, OWN = "seed", {"seed", "output"}


class PlottedRecipe(NamedTuple):
    """The resolved recipe of a run. values: by dotted keys; lists are values. text: the file."""

    values: Json
    text: str


@dataclass(frozen=True)
class PlottedRun:
    """name: short and unique. recipe: {} for a file of metrics without a recipe."""

    name: str
    history: History
    recipe: Json


def read_runs(places: Sequence[Path]) -> list[PlottedRun]:
    """The runs in these folders or files of metrics. The folder of a sweep stands for its runs.

    Raises:
        UsageError: a place has no run, or its metrics or recipe cannot be read.
    """
    files = list(dict.fromkeys(metrics_file(run) for place in places for run in _without_sweep(place)))
    if not files:
        raise UsageError(f"{', '.join(map(str, places))}: no run of the sweep has a {METRICS}")
    recipes = [file.with_name(RECIPE) for file in files]
    return [
        PlottedRun(name, read_history(file), read_recipe(recipe).values if recipe.is_file() else {})
        for name, file, recipe in zip(distinct(files), files, recipes, strict=True)
    ]


def _without_sweep(place: Path) -> list[Path]:
    """The runs of a sweep's folder that have metrics. What `runs/rates/*` also matches there, such as logs, is left out."""
    if (place / SWEEP).is_file() and not (place / METRICS).exists():
        return sorted(metrics.parent for metrics in place.glob(f"*/{METRICS}"))
    if (place.parent / SWEEP).is_file() and (place.suffix == ".log" or place.name == SWEEP or not _has_metrics(place)):
        return []
    return [place]


def _has_metrics(place: Path) -> bool:
    return place.is_file() or (place / METRICS).is_file()


def read_recipe(file: Path) -> PlottedRecipe:
    """
    Raises:
        UsageError: the file is not YAML.
    """
    try:
        text = file.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: not a recipe of ng_train: {' '.join(str(error).split())}") from None
    return PlottedRecipe(flat(values) if isinstance(values, dict) else {}, text)


def flat(values: Mapping[str, Any], prefix: str = "") -> Json:
    """`{"engine": {"zero_stage": 2}}` as `{"engine.zero_stage": 2}`."""
    result: Json = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return result


def distinct(files: Sequence[Path]) -> list[str]:
    """A unique name for each file: its folder, with as many parent folders as needed."""
    parts = [file.resolve().parent.parts for file in files]
    deepest = max((len(one) for one in parts), default=1)
    for depth in range(1, deepest + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(file) for file in files]


def by_seed(runs: Sequence[PlottedRun]) -> dict[str, list[PlottedRun]]:
    """The runs that differ only in their seed, by a common name.

    Two recipes match if they are equal without `seed` and `output`; different texts, such as a `model.path`, are
    compared without the seed's number. Runs without a recipe match if their names are equal except for a number at the
    end.
    """
    groups: list[list[PlottedRun]] = []
    for run in runs:
        alike = next((group for group in groups if all(_same_but_seed(run, other) for other in group)), None)
        if alike is None:
            groups.append([run])
        else:
            alike.append(run)
    names = [_common(group) for group in groups]
    return {
        name if names.count(name) == 1 else ", ".join(run.name for run in group): group
        for name, group in zip(names, groups, strict=True)
    }


def _same_but_seed(one: PlottedRun, other: PlottedRun) -> bool:
    if not (one.recipe and other.recipe):
        return one.recipe == other.recipe and one.name.rstrip(digits) == other.name.rstrip(digits)
    keys = one.recipe.keys() - OWN
    return keys == other.recipe.keys() - OWN and all(
        one.recipe[key] == other.recipe[key] or _unseeded(one.recipe, key) == _unseeded(other.recipe, key)
        for key in keys
    )


def _unseeded(recipe: Json, key: str) -> Any:
    value = recipe[key]
    return re.sub(rf"(?<!\d){re.escape(str(recipe.get(SEED)))}(?!\d)", "#", value) if isinstance(value, str) else value


def _common(group: Sequence[PlottedRun]) -> str:
    if len(group) == 1:
        return group[0].name
    first, *others = (run.name for run in group)
    length = next(
        (place for place, letter in enumerate(first) if any(name[place : place + 1] != letter for name in others)),
        len(first),
    )
    stem = re.sub(r"[\W_]*(seed)?[\W_]*$", "", first[:length]) or first
    return f"{stem} ({len(group)} seeds)"
