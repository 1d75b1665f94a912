"""The final report of a collection: a table per environment and the list of files, as text or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ngym.collect.aggregate import AgentTally, Aggregates
from ngym.collect.files import Paths
from ngym.schema import Json
from ngym.stats.pass_at_k import Interval
from ngym.stats.score_summary import Subsets

if TYPE_CHECKING:
    from rich.table import Table

PART = "reward_components/"


def tables(aggregates: Aggregates) -> Iterator[Table]:
    """One table per agent (reward, pass@k, lengths, tool calls, failures), and one of its subsets, if it has any."""
    from rich.table import Table

    for name, tally in aggregates.by_agent.items():
        title = f"{name}: {tally.rollouts:,} rollouts of {tally.rewards.tasks:,} tasks"
        table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
        for row in _lines(tally):
            table.add_row(*row)
        yield table
        if tally.subsets is not None:
            yield subset_table(tally.subsets)


def subset_table(subsets: Subsets) -> Table:
    """A line for each value of the field."""
    from rich.table import Table

    by_value = sorted(subsets.scores.items())
    names = list(dict.fromkeys(name for _, scores in by_value for name, _ in scores.named()))
    table = Table(title=f"by {subsets.name}", title_justify="left", pad_edge=False)
    for column in (subsets.name, "rollouts", "unscored", "mean", *names):
        table.add_column(column, justify="left" if column == subsets.name else "right")
    for value, scores in by_value:
        found = {name: _number(item.mean) for name, item in scores.named()}
        unscored = f"{scores.unscored:,} ({scores.unscored_share:.1%})"
        counts = (f"{scores.rollouts:,}", unscored, _number(scores.rewards.mean))
        table.add_row(value, *counts, *(found.get(name, "-") for name in names))
    return table


def as_json(aggregates: Aggregates, paths: Paths, run_id: str, status: str, seconds: float, rollouts: int) -> Json:
    """The object that --json prints. rollouts: the number of planned rollouts."""
    return {
        "run_id": run_id,
        "status": status,
        "rollouts": rollouts,
        "done": aggregates.done,
        "given_up": aggregates.given_up,
        "seconds": round(seconds, 3),
        "agents": [tally.summary() for tally in aggregates.by_agent.values()],
        "files": {name: str(path) for name, path in paths._asdict().items() if _holds(path)},
    }


def first_failures(aggregates: Aggregates) -> Iterator[str]:
    """A line for each failure class of each agent, with the message of the first failure."""
    for agent, tally in aggregates.by_agent.items():
        for kind, message in tally.first_failures.items():
            yield f"{agent}: first {kind}: {' '.join(message.split())}"


def files(paths: Paths, room: int | None = None) -> Iterator[str]:
    """Each existing file and its contents: in one line, or in two if a line exceeds `room` characters."""
    what = {
        paths.output: "scored rollouts",
        paths.failures: "failed attempts, one row each",
        paths.materialized: "what was sent to the agents",
        paths.aggregates: "the numbers above, and more, as JSON",
        paths.run: "which run this is: digests, versions, commands",
    }
    width = max(len(str(path)) for path in what)
    fits = room is None or width + 2 + max(map(len, what.values())) <= room
    for path, text in what.items():
        if _holds(path):
            yield from [f"{path!s:<{width}}  {text}"] if fits else [str(path), f"  {text}"]


def _holds(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _lines(tally: AgentTally) -> Iterator[tuple[str, str, str]]:
    """Name, value, remark."""
    rewards, means = tally.rewards, {name: sum(values) / len(values) for name, values in tally.numbers.items()}
    unscored = f"{tally.scores.unscored_share:.1%} unscored"
    yield "mean reward", _number(rewards.mean), ", ".join(filter(None, (_interval(rewards.interval), unscored)))
    for name, item in tally.scores.named():
        fewer = f" over {item.tasks} tasks" if item.tasks < rewards.tasks else ""
        yield name, _number(item.mean), _interval(item.interval) + fewer
    for name, value in sorted(means.items()):
        if name.startswith(PART):
            yield name.removeprefix(PART), _number(value), "part of the reward"
    yield "output tokens", _number(means.get("output_tokens"), 1), _length(tally)
    yield "turns", _number(means.get("turns"), 2), ""
    errors = means.get("tool_errors")
    yield "tool calls", _number(means.get("tool_calls"), 2), f"{errors:.2f} of them errors" if errors else ""
    yield "seconds", _number(means.get("seconds"), 2), ""
    shares = (f"{name} {100 * count / tally.rollouts:.0f} %" for name, count in _ranked(tally.stops))
    yield "stopped by", "", ", ".join(shares)
    yield from _own(tally)
    if tally.unscored:
        yield "unscored", f"{tally.unscored:,}", "left out of the means"
    failed = tally.failures.total()
    yield "failed attempts", f"{failed:,}", _counts(tally.failures)
    yield "given up", f"{tally.given_up.total():,}", _counts(tally.given_up)


def _own(tally: AgentTally) -> Iterator[tuple[str, str, str]]:
    """The environment's own metrics of its rollouts."""
    own = tally.own or {}
    for name, value in own.get("metrics", {}).items():
        yield name, _number(value), "the environment's own"
    for error in own.get("errors", ()):
        yield "own metrics", "-", error


def _length(tally: AgentTally) -> str:
    values = sorted(tally.numbers.get("output_tokens", ()))
    if not values:
        return "unknown: the model reports no usage"
    return f"median {values[len(values) // 2]:.0f}, longest {values[-1]:.0f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f"95 % in [{interval.low:.3f}, {interval.high:.3f}]"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in _ranked(counts))


def _ranked(counts: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
