"""How did the runs of a sweep end? A line of sweep.jsonl for each, and a table."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import orjson

from ngym.files import jsonl

Status = Literal["finished", "failed", "interrupted"]
FILE = "sweep.jsonl"
WIDEST = 1000  # characters of a plain line: it is for a file, which does not wrap
METRICS = ("loss", "reward/mean", "frac_unscored")
NOT_SHOWN = ("low", "high", "count", "failed", "pass")


class Outcome(NamedTuple):
    """One run that was started.

    values: of the swept keys. metrics: the last value of each that decides between runs. problem: of a failed one, the
    last line that it said.
    """

    run: str
    values: dict[str, str]
    status: Status
    exit_code: int
    seconds: float
    problem: str | None
    metrics: dict[str, float]


def read(folder: Path) -> dict[str, Outcome]:
    """The outcomes of an earlier sweep, by the name of the run; {} if there was none.

    Raises:
        UsageError: a line is none of ours.
    """
    if not (folder / FILE).exists():
        return {}

    def wrong(row: dict[str, object]) -> str | None:
        return None if set(row) == set(Outcome._fields) else "no outcome of a run; is this file of a sweep?"

    rows = [line.row for line in jsonl.checked(folder / FILE, wrong)]
    return {row["run"]: Outcome(**row) for row in rows}


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """The whole file, anew."""
    jsonl.write_whole(folder / FILE, b"".join(orjson.dumps(outcome._asdict()) + b"\n" for outcome in outcomes))


def last_metrics(file: Path) -> dict[str, float]:
    """Of a run's metrics.jsonl: the last loss, the last reward and the last held-out evaluation."""
    found: dict[str, float] = {}
    if file.exists():
        for line in jsonl.read(file):
            found |= {name: _number(value) for name, value in line.row.items() if _decides(name)}
    return found


def show(outcomes: Sequence[Outcome], waiting: Sequence[str]) -> None:
    """The table of a sweep; `waiting` are the names of runs that were not started."""
    from rich.console import Console
    from rich.table import Table

    names = sorted({name for outcome in outcomes for name in outcome.metrics}, key=_order)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("run", "status", *names, "seconds", ""):
        table.add_column(heading, justify="right" if heading in (*names, "seconds") else "left", overflow="fold")
    for outcome in outcomes:
        values = [f"{outcome.metrics[name]:.4g}" if name in outcome.metrics else "-" for name in names]
        status = outcome.status if outcome.status != "failed" else f"failed ({outcome.exit_code})"
        table.add_row(outcome.run, status, *values, f"{outcome.seconds:.0f}", outcome.problem or "")
    for run in waiting:
        table.add_row(run, "not started", *("-" for _ in names), "-", "")
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDEST).print(table)


def _decides(name: str) -> bool:
    last = name.rpartition("/")[2].partition("@")[0]
    return name in METRICS or (name.startswith(("eval/", "val/")) and last not in NOT_SHOWN)


def _order(name: str) -> tuple[int, str]:
    return (METRICS.index(name) if name in METRICS else len(METRICS), name)


def _number(value: float | None) -> float:
    """JSON has no word for what is no number, and writes null."""
    return math.nan if value is None else value
