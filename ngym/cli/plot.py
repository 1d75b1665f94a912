"""`ng_plot`: draws the curves of training runs as text or as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from ngym.cli.shell.main import Choice, command
from ngym.errors import UsageError

if TYPE_CHECKING:
    from ngym.plot.figure import Curve
    from ngym.plot.runs import Axis, PlottedRun

PATH = click.Path(path_type=Path)
MAX_IN_ONE = 6  # curves of one run in one text plot
EXIT_CODES = """\
Exit codes: 0  the curves are drawn
            1  --output cannot be written
            2  the command is wrong, or a path is not a run; the line says where"""


@command("ng_plot", epilog=EXIT_CODES)
@click.argument("places", nargs=-1, required=True, type=PATH, metavar="RUN...")
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME,...",
    help="Metrics to draw; `*` matches anything.  [default: rewards and evaluations, or losses]",
)  # fmt: skip
@click.option("--output", type=PATH, metavar="FILE", help="Write a .png or .svg instead of text.")
@click.option("--smooth", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="Weight of the past, 0 to 1.")
@click.option("--x", "by", type=Choice(["step", "time"]), default="step", show_default=True)
@click.option("--log", is_flag=True, help="A logarithmic axis, in a picture.")
@click.option("--band", is_flag=True, help="Draw runs that differ only in their seed as one: mean, lowest and highest.")
@click.option("--calibration", is_flag=True, help="Reward models: accuracy by confidence on held-out rows, at the end.")
@click.option("--json", "as_json", is_flag=True, help="The points on standard output, a line for each curve.")
def main(
    places: tuple[Path, ...],
    metrics: tuple[str, ...],
    output: Path | None,
    smooth: float,
    by: str,
    log: bool,
    band: bool,
    calibration: bool,
    as_json: bool,
) -> None:
    """Draw the curves of training runs: folders of ng_train, or their metrics.jsonl. Several runs share a plot. The folder of
    a sweep stands for its runs.

    \b
    Examples: ng_plot runs/grpo
              ng_plot runs/rates --metric reward/mean,eval/* --smooth 0.8 --output rates.png
              ng_plot runs/seed-* --band --output curve.svg
              ng_plot runs/grpo --metric 'time/*' --x time --json
              ng_plot runs/reward_model --calibration --output calibration.svg
    """
    from ngym.plot.figure import curves, panels
    from ngym.plot.runs import read_runs

    axis: Axis = "time" if by == "time" else "step"
    if calibration and (metrics or smooth or log or band or axis == "time"):
        raise UsageError("--calibration draws one diagram of the last evaluation; it goes with --output or --json only")
    if band and axis == "time":
        raise UsageError("--band compares runs at the same steps; leave --x time or --band out")
    patterns = [name for option_value in metrics for name in option_value.split(",") if name]
    runs = read_runs(places)
    if calibration:
        _calibration(runs, output, as_json)
        return
    drawn_curves = curves(runs, patterns, axis, smooth, band)
    if as_json:
        click.echo(b"".join(orjson.dumps(curve.as_json(axis)) + b"\n" for curve in drawn_curves), nl=False)
    if output is not None:
        from ngym.plot.figure import write_picture

        write_picture(panels(drawn_curves, axis, log), output)
        click.echo(f"{output}: {len(drawn_curves):,} curves of {len(runs):,} runs", err=as_json)
    if output is None and not as_json:
        click.echo("\n\n".join([*_plots(drawn_curves, axis), *_table(runs, patterns)]))


def _calibration(runs: Sequence[PlottedRun], output: Path | None, as_json: bool) -> None:
    """The reliability diagram of reward models, as a picture, JSON or a table."""
    from ngym.errors import printable
    from ngym.plot.figure import calibrations, reliability_panel, write_picture

    by_run = calibrations(runs)
    if as_json:
        lines = [{"run": run, "bins": [each._asdict() for each in bins]} for run, bins in by_run.items()]
        click.echo(b"".join(orjson.dumps(line) + b"\n" for line in lines), nl=False)
    if output is not None:
        write_picture([reliability_panel(by_run)], output)
        click.echo(f"{output}: the calibration of {len(by_run):,} runs", err=as_json)
    if output is None and not as_json:
        for run, bins in by_run.items():
            click.echo(f"{printable(run)}\nconfidence  accuracy   share")
            for each in bins:
                click.echo(f"{each.confidence:10.3f}{each.accuracy:10.3f}{each.share:8.1%}")


def _plots(curves: Sequence[Curve], axis: Axis) -> Iterator[str]:
    """All curves of one run in one plot; for several runs a plot for each metric."""
    from ngym.errors import printable
    from ngym.plot.figure import as_text

    if len({curve.run for curve in curves}) == 1 and len(curves) <= MAX_IN_ONE:
        yield as_text([curve.series for curve in curves], axis)
        return
    for metric in dict.fromkeys(curve.metric for curve in curves):
        drawn_series = [replace(curve.series, name=curve.run) for curve in curves if curve.metric == metric]
        yield f"{printable(metric)}\n{as_text(drawn_series, axis)}"


def _table(runs: Sequence[PlottedRun], patterns: Sequence[str]) -> Iterator[str]:
    """The last values of each run."""
    from ngym.errors import printable
    from ngym.plot.figure import is_own, matching_metrics, number_text

    names = list(dict.fromkeys(name for run in runs for name in run.history.names))
    selected = matching_metrics(patterns, names) if patterns else [name for name in names if is_own(name)]
    last = [run.history.last() for run in runs]
    heads = ["last value", *(printable(run.name) for run in runs)]
    steps = ["step", *(f"{run.history.steps[-1]:,.0f}" if run.history.steps else "-" for run in runs)]
    cells = [[printable(name), *(number_text(values.get(name, nan)) for values in last)] for name in selected]
    lines = [heads, steps, *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    yield "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
