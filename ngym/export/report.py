"""What is told at the end: how many rows, and what became of every rollout that was read."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from ngym.export.options import Options
from ngym.export.tally import Reason, Tally
from ngym.schema import Json

if TYPE_CHECKING:
    from rich.table import Table


def table(tally: Tally, options: Options) -> Table:
    from rich.table import Table

    shown = Table(show_header=False, pad_edge=False)
    shown.add_column()
    shown.add_column(justify="right")
    shown.add_column()
    for line in _lines(tally, options):
        shown.add_row(*line)
    return shown


def as_object(tally: Tally, options: Options, seconds: float) -> Json:
    """The one object that --json prints. output: null where nothing was written."""
    written = tally.rows > 0 and not options.dry_run
    return {
        "format": options.format,
        "output": str(options.output) if written else None,
        **tally.as_json(),
        "seconds": round(seconds, 3),
    }


def _lines(tally: Tally, options: Options) -> Iterator[tuple[str, str, str]]:
    """Name, number, remark."""
    yield "rollouts", f"{tally.read:,}", f"{tally.tasks:,} tasks have some that can be used"
    for reason in Reason:
        if tally.dropped[reason]:
            yield "left out", f"{tally.dropped[reason]:,}", _told(reason, options)
    yield "kept", f"{tally.kept:,}", _kept(tally, options)


def _told(reason: Reason, options: Options) -> str:
    return f"{reason.told}, {options.threshold:g}" if reason is Reason.LOW else reason.told


def _kept(tally: Tally, options: Options) -> str:
    match options.format:
        case "preferences" if tally.rows:
            return f"in {tally.rows:,} pairs; margin {fmean(tally.margins):.3g}, at least {min(tally.margins):.3g}"
        case "kto":
            return f"{tally.labels[True]:,} desirable, {tally.labels[False]:,} not"
    return ""
