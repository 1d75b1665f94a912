"""`ng_profile`: shows which tasks are solved always, never or sometimes, and which have no learning signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import click
import orjson

from ngym.cli.shell.main import command
from ngym.errors import UsageError
from ngym.schema import LARGEST_REWARD, Json, RolloutCopies, agent_name, is_reward, row_problem

if TYPE_CHECKING:
    from ngym.stats import Task

FILE = click.Path(path_type=Path)
BARS = 10
WIDTH = 40
EXIT_CODES = """\
Exit codes: 0  the profile is shown
            1  --output cannot be written
            2  the command or a line of a file is wrong; the lines say where"""


@command("ng_profile", epilog=EXIT_CODES)
@click.argument("sources", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--solved", type=float, default=1.0, show_default=True, metavar="REWARD", help="The lowest reward of a solved task."
)
@click.option("--by", metavar="FIELD", help="Also print a line for each value of this field, such as level.")
@click.option("--output", type=FILE, metavar="FILE", help="Write a JSONL row for each task.")
@click.option("--overwrite", is_flag=True, help="Replace the output.")
@click.option(
    "--json", "as_json", is_flag=True,
    help="Print the rows of --output, one JSON object per line, instead of the table.",
)  # fmt: skip
def main(
    sources: tuple[str, ...], solved: float, by: str | None, output: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Show how often each task of scored rollouts was solved, and which tasks have no learning signal.

    A task has a learning signal for algorithms that compare rollouts of the same task if their rewards differ.

    \b
    Examples: ng_profile out.jsonl
              ng_profile runs/*/out.jsonl --by level --output tasks.jsonl
              ng_profile out.jsonl --json
    """
    from ngym.files.atomic import check_new_output, write_whole
    from ngym.files.jsonl import check_lines, expand_paths
    from ngym.stats import profile

    if not is_reward(solved):
        raise UsageError(f"--solved: must be a number within ±{LARGEST_REWARD:g}, not {solved}")
    inputs = expand_paths(sources, "")
    if output is not None:
        check_new_output(output, inputs, overwrite)
    copies = RolloutCopies()
    tasks = profile((line.row for line in check_lines(inputs, lambda row: _problem(row) or copies.problem(row))), by)
    if not tasks:
        raise UsageError(f"{', '.join(sources)}: no rollouts in it")
    lines = b"".join(orjson.dumps(task.as_json(solved)) + b"\n" for task in tasks)
    if output is not None:
        write_whole(output, lines)
    if as_json:
        click.echo(lines, nl=False)
        return
    for agent in dict.fromkeys(task.agent for task in tasks):
        of_agent = [task for task in tasks if task.agent == agent]
        _show(agent, of_agent, solved)
        if by is not None:
            _show_subsets(by, of_agent, solved)
    if output is not None:
        click.echo(f"{output}: {len(tasks):,} tasks")


def _problem(row: Json) -> str | None:
    if agent_name(row) is None or not isinstance(row.get("_ng_task_index"), int):
        return "not a rollout: a row has 'agent_ref' and '_ng_task_index'"
    if "reward" not in row:
        return "not a rollout: it has no 'reward' (null would mean: could not be scored)"
    return row_problem(row)


def _show(agent: str, tasks: Sequence[Task], solved: float) -> None:
    from ngym.runtime.live_region import sanitize

    verdicts = Counter(task.verdict(solved) for task in tasks)
    nothing = sum(not task.has_learning_signal for task in tasks)
    rates = _rates(tasks, solved)
    mean = f", mean pass rate {fmean(rates):.3f}" if rates else ""
    scored = sum(len(task.rewards) for task in tasks)
    click.echo(
        f"{sanitize(agent)}: {len(tasks):,} tasks, {scored:,} scored rollouts{mean}, {_unscored(tasks):.1%} unscored"
    )
    for verdict in ("always", "mixed", "never", "unscored"):
        if verdicts[verdict]:
            click.echo(f"  {verdict:<9} {verdicts[verdict]:>8,}  {verdicts[verdict] / len(tasks):6.1%}")
    click.echo(f"  no signal {nothing:>8,}  {nothing / len(tasks):6.1%}  (all rewards equal, or fewer than two)")
    counts = Counter(min(BARS - 1, int(rate * BARS)) for rate in rates)
    for bar in range(BARS):
        bar_text = "#" * round(WIDTH * counts[bar] / max(counts.values(), default=1))
        click.echo(f"  {bar / BARS:.1f} - {(bar + 1) / BARS:.1f} {counts[bar]:>8,}  {bar_text}")


def _show_subsets(by: str, tasks: Sequence[Task], solved: float) -> None:
    from ngym.runtime.live_region import sanitize

    names = {value: sanitize(value) for value in sorted({task.subset or "" for task in tasks})}
    width = max(map(len, (by, *names.values(), "x" * 24)))
    click.echo(
        f"  {by:<{width}} {'tasks':>8} {'pass rate':>10} {'always':>8} {'mixed':>8} {'never':>8} {'no signal':>10} {'unscored':>9}"
    )
    for value, name in names.items():
        some = [task for task in tasks if task.subset == value]
        verdicts, rates = Counter(task.verdict(solved) for task in some), _rates(some, solved)
        rate = f"{fmean(rates):.3f}" if rates else "-"
        counts = "".join(f" {verdicts[verdict]:>8,}" for verdict in ("always", "mixed", "never"))
        nothing = sum(not task.has_learning_signal for task in some)
        click.echo(f"  {name:<{width}} {len(some):>8,} {rate:>10}{counts} {nothing:>10,} {_unscored(some):>9.1%}")


def _unscored(tasks: Sequence[Task]) -> float:
    """The share of rollouts without a reward, which the rates leave out."""
    unscored = sum(task.unscored for task in tasks)
    return unscored / (unscored + sum(len(task.rewards) for task in tasks))


def _rates(tasks: Sequence[Task], solved: float) -> list[float]:
    """The share of each task's scored rollouts that solved it."""
    from ngym.stats import reaches

    return [sum(reaches(one, solved) for one in task.rewards) / len(task.rewards) for task in tasks if task.rewards]
