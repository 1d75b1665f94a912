"""`ng_export`: converts rollouts to the files that trainers read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from ngym.cli.shell.main import EXIT_DONE, EXIT_FAILED, Choice, command, count
from ngym.export.options import FORMATS, STRATEGIES, Options

EXIT_CODES = """\
Exit codes: 0    the output is written (with --dry-run: it would be)
            1    no rollout is left to export, or the output cannot be written
            2    the command or a line of the input is wrong; the lines say where
            130  interrupted; nothing is written"""
TICK_S = 2.0
FILE = click.Path(path_type=Path)


@command("ng_export", epilog=EXIT_CODES)
@click.option(
    "--format", "format", type=Choice(FORMATS), required=True,
    help="demonstrations: for SFT; preferences: for DPO; rollouts: unchanged copies.",
)  # fmt: skip
@click.option(
    "--input", "sources", multiple=True, metavar="FILE...",
    help="Rollouts, JSONL, also .gz or .zst; files or patterns, or repeat it.",
)  # fmt: skip
@click.option("--output", type=FILE, required=True, metavar="FILE", help="JSONL.")
@click.option(
    "--min-reward", type=float, metavar="REWARD",
    help="Lowest reward of a kept rollout.  [default: 1; preferences, rollouts: any]",
)  # fmt: skip
@count("--best", "The N best rollouts of each task.")
@click.option("--pairs", type=Choice(STRATEGIES), help="How rollouts of a task are paired.  [default: best-worst]")
@click.option(
    "--margin", type=click.FloatRange(0), metavar="REWARD", help="Least difference of a pair's rewards.  [default: any]"
)
@count("--max-pairs", "Pairs of each task.  [default: best-worst 1, else all]")
@click.option("--dedupe", is_flag=True, help="Keep only one copy of each conversation.")
@click.option("--keep-reasoning/--drop-reasoning", default=True, help="The model's reasoning.  [default: keep]")
@click.option("--keep-truncated", is_flag=True, help="Also keep rollouts that the step limit stopped.")
@count("--limit", "At most N rows, drawn at random.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="For ties and for --limit.")
@click.option("--overwrite", is_flag=True, help="Replace the output.")
@click.option("--dry-run", is_flag=True, help="Show the numbers and the first row, and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
@click.argument("more", nargs=-1, metavar="")
@click.pass_context
def main(ctx: click.Context, /, sources: tuple[str, ...], more: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Turn scored rollouts into demonstrations, preference pairs, KTO or ShareGPT rows, or a filtered copy.

    Failed and unscored rollouts are never used, and a rollout that was cut off in mid-turn is not exported as finished.
    A table shows how many rollouts were kept, and why the others were left out.

    \b
    Examples: ng_export --format demonstrations --input out.jsonl --output sft.jsonl --best 2 --dedupe
              ng_export --format kto --input out.jsonl --output kto.jsonl --dry-run --json
              ng_export --format preferences --input runs/*/out.jsonl --output dpo.jsonl --pairs all --margin 0.5
    """
    from ngym.files.jsonl import expand_paths

    inputs = expand_paths((*sources, *more))
    ctx.exit(_export(Options(inputs=inputs, **options), as_json))


def _export(options: Options, as_json: bool) -> int:
    import orjson
    from rich.console import Console

    from ngym.export.exporter import as_object, export, table
    from ngym.runtime.live_region import sanitize

    started = time.monotonic()
    stream = sys.stderr if as_json else sys.stdout

    def show(line: bytes) -> None:
        click.echo(sanitize(orjson.dumps(orjson.loads(line), option=orjson.OPT_INDENT_2).decode()), file=stream)

    tally = export(options, show, _Ticker() if sys.stderr.isatty() else lambda lines: None)
    Console(file=stream, markup=False).print(table(tally, options))
    for place in tally.not_representable:
        click.echo(f"left out: {place}", file=stream)
    if not tally.rows:
        click.echo(f"no rollout is left to export; {options.output} is not written", err=True)
    elif not options.dry_run:
        click.echo(f"{options.output}: {tally.rows:,} rows", file=stream)
    if as_json:
        click.echo(orjson.dumps(as_object(tally, options, time.monotonic() - started)))
    return EXIT_DONE if tally.rows else EXIT_FAILED


class _Ticker:
    """Reports the progress of reading every TICK_S seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + TICK_S

    def __call__(self, lines: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TICK_S
            click.echo(f"reading: {lines:,} rollouts", err=True)
