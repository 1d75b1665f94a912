"""The progress of a collection, and the report at its end."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from ngym.collect.aggregate import AgentTally, Aggregates
from ngym.collect.collection_files import CollectionPaths, Progress
from ngym.files.jsonl import read
from ngym.runtime.event_loop import log_error
from ngym.runtime.live_region import Screen, Size, bar, capture_output, clock, is_live, pack_facts, sanitize
from ngym.schema import Json
from ngym.stats import Interval, Subsets

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

PART = "reward_components/"
WINDOW_S = 30.0  # rates are over the last 30 s
LIVE_TICK_S = 0.25
PLAIN_TICK_S = 5.0
UNCHANGED_INTERVAL_S = 30.0
SHOWN_AGENTS = 3
LONG_NUMBER = 1e9  # from here on with an exponent


def tables(aggregates: Aggregates) -> Iterator[Table]:
    """One table per agent (reward, pass@k, lengths, tool calls, failures), and one of its subsets, if it has any. For a
    console without markup: rows of other programs may have any text.
    """
    from rich.table import Table

    for name, tally in aggregates.by_agent.items():
        title = f"{sanitize(name)}: {tally.rollouts:,} rollouts of {tally.scores.tasks:,} tasks"
        table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
        for row in _lines(tally):
            table.add_row(*map(sanitize, row))
        yield table
        if tally.subsets is not None:
            yield subset_table(tally.subsets)


def subset_table(subsets: Subsets) -> Table:
    """A line for each value of the field. For a console without markup."""
    from rich.table import Table

    by_value = sorted(subsets.scores.items())
    names = list(dict.fromkeys(name for _, scores in by_value for name, _ in scores.named_scores()))
    table = Table(title=f"by {subsets.name}", title_justify="left", pad_edge=False)
    for column in (subsets.name, "rollouts", "unscored", "mean", *map(sanitize, names)):
        table.add_column(column, justify="left" if column == subsets.name else "right", overflow="fold")
    for value, scores in by_value:
        means = {name: _number(item.mean) for name, item in scores.named_scores()}
        unscored = f"{scores.unscored:,} ({scores.unscored_share:.1%})"
        counts = (f"{scores.rollouts:,}", unscored, _number(scores.rewards.mean))
        table.add_row(sanitize(value), *counts, *(means.get(name, "-") for name in names))
    return table


def as_json(
    aggregates: Aggregates, paths: CollectionPaths, run_id: str, status: str, seconds: float, rollouts: int
) -> Json:
    """The object that --json prints. rollouts: the number of planned rollouts."""
    return {
        "run_id": run_id,
        "status": status,
        "rollouts": rollouts,
        "done": aggregates.done,
        "given_up": aggregates.given_up,
        "seconds": round(seconds, 3),
        "agents": [tally.summary() for tally in aggregates.by_agent.values()],
        "files": {name: str(path) for name, path in paths._asdict().items() if _has_content(path)},
    }


def first_failures(aggregates: Aggregates, inputs: Sequence[Path]) -> Iterator[str]:
    """A line for each failure class of each agent, with the message of the first failure.

    inputs: a row that the message names by its index is named by its line there.
    """
    for agent, tally in aggregates.by_agent.items():
        for kind, message in tally.first_failures.items():
            yield f"{agent}: first {kind}: {_with_place(' '.join(message.split()), inputs)}"


def _with_place(message: str, inputs: Sequence[Path]) -> str:
    match = _ROW.search(message)
    if match is None:
        return message
    index = int(match[1])
    lines = ((path, line) for path in inputs for line in read(path))
    for position, (path, line) in enumerate(lines):
        if line.row.get("_ng_task_index", position) == index:
            return f"{message[: match.start()]}{path}:{line.number}:{message[match.end() :]}"
    return message


_ROW = re.compile(r"\brow (\d+):")


def files(paths: CollectionPaths, room: int | None = None) -> Iterator[str]:
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
        if _has_content(path):
            yield from [f"{path!s:<{width}}  {text}"] if fits else [str(path), f"  {text}"]


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _lines(tally: AgentTally) -> Iterator[tuple[str, str, str]]:
    """Name, value, remark."""
    rewards, means = tally.rewards, tally.means
    unscored = f"{tally.scores.unscored_share:.1%} unscored"
    yield "mean reward", _number(rewards.mean), ", ".join(filter(None, (_interval(rewards.interval), unscored)))
    for name, item in tally.scores.named_scores():
        fewer = f" over {item.tasks} tasks" if item.tasks < rewards.tasks else ""
        yield name, _number(item.mean), _interval(item.interval) + fewer
    for name, value in means.items():
        if name.startswith(PART):
            yield name.removeprefix(PART), _number(value), "part of the reward"
    yield "output tokens", _number(means.get("output_tokens"), 1), _length(tally)
    yield "turns", _number(means.get("turns"), 2), ""
    errors = means.get("tool_errors")
    yield "tool calls", _number(means.get("tool_calls"), 2), f"{errors:.2f} of them errors" if errors else ""
    yield "seconds", _number(means.get("seconds"), 2), ""
    shares = (f"{name} {100 * count / tally.rollouts:.0f} %" for name, count in _by_count(tally.stops))
    yield "stopped by", "", ", ".join(shares)
    yield from _environment_metrics(tally)
    if tally.unscored:
        yield "unscored", f"{tally.unscored:,}", "left out of the means"
    failed = tally.failures.total()
    yield "failed attempts", f"{failed:,}", _counts(tally.failures)
    yield "given up", f"{tally.given_up.total():,}", _counts(tally.given_up)


def _environment_metrics(tally: AgentTally) -> Iterator[tuple[str, str, str]]:
    """The environment's own metrics of its rollouts."""
    own = tally.own or {}
    for name, value in own.get("metrics", {}).items():
        yield name, _number(value), "the environment's own"
    for error in own.get("errors", ()):
        yield "own metrics", "-", error


def _length(tally: AgentTally) -> str:
    values = sorted(tally.numbers.get("output_tokens", ()))
    if not values:
        return "unknown: the rollouts report no usage" if tally.rollouts else ""
    return f"median {values[len(values) // 2]:.0f}, longest {values[-1]:.0f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if abs(value) < LONG_NUMBER else f"{value:.4g}"


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f"95 % in [{_number(interval.low)}, {_number(interval.high)}]"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in _by_count(counts))


def _by_count(counts: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


class _Sample(NamedTuple):
    at: float
    rollouts: int
    tokens: int


@dataclass
class ProgressMeter:
    """Measures the progress of a run. reasons: why it is paused, if it is."""

    aggregates: Aggregates
    before: Progress
    in_flight: Callable[[], int]
    reasons: Mapping[str, str]

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self._samples: deque[_Sample] = deque([self._sample()])

    @property
    def settled(self) -> int:
        return self.aggregates.done + self.aggregates.given_up

    def tick(self) -> None:
        """Take a sample for the rates; call it regularly."""
        self._samples.append(self._sample())
        while len(self._samples) > 2 and self._samples[0].at < self._samples[-1].at - WINDOW_S:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """Rollouts and output tokens a second."""
        first, last = self._samples[0], self._samples[-1]
        seconds = max(last.at - first.at, 1e-3)
        return (last.rollouts - first.rollouts) / seconds, (last.tokens - first.tokens) / seconds

    def snapshot(self) -> ProgressSnapshot:
        """A snapshot of the progress, which any thread may draw."""
        rollouts, _ = self.rates()
        total, complete = self.before.total, self.before.complete
        remaining = total - self.settled
        seconds = remaining / rollouts if complete and remaining and rollouts > 0 else None
        elapsed = time.monotonic() - self.started
        pauses = tuple(f"paused: {sanitize(reason)}; it continues by itself" for reason in self.reasons.values())
        return ProgressSnapshot(self.settled, total, elapsed, seconds, tuple(self._facts()), pauses, complete)

    def _facts(self) -> list[str]:
        """Rewards, failures, rates, and what is in flight."""
        rollouts, tokens = self.rates()
        facts = self._rewards()
        failed = sum((tally.failures for tally in self.aggregates.by_agent.values()), start=Counter[str]())
        if failed:
            share = 100 * failed.total() / (self.aggregates.done + failed.total())
            classes = ", ".join(f"{name} {count:,}" for name, count in failed.most_common(3))
            facts.append(f"failed attempts {share:.1f} % ({classes})")
        return [*facts, f"{rollouts:,.1f} rollouts/s", f"{tokens:,.0f} tokens/s", f"{self.in_flight():,} in flight"]

    def _rewards(self) -> list[str]:
        texts = []
        for name, tally in list(self.aggregates.by_agent.items())[:SHOWN_AGENTS]:
            mean, interval = tally.rewards.mean, tally.rewards.interval
            if mean is not None:
                half = f" ±{(interval.high - interval.low) / 2:.3f}" if interval else ""
                unscored = f" ({tally.scores.unscored_share:.1%} unscored)" if tally.unscored else ""
                texts.append(f"{name} reward {mean:.3f}{half}{unscored}")
        return texts

    def _sample(self) -> _Sample:
        return _Sample(time.monotonic(), self.aggregates.done, self.aggregates.output_tokens)


@dataclass(frozen=True)
class ProgressSnapshot:
    """A snapshot of the progress. left_s: None while unknown. complete: whether `total` is final, see `Progress`."""

    settled: int
    total: int
    elapsed_s: float
    left_s: float | None
    facts: tuple[str, ...]
    pauses: tuple[str, ...]
    complete: bool = True

    @property
    def count(self) -> str:
        return f"{self.settled:,}/{self.total:,}{'' if self.complete else '+'}"

    def line(self) -> str:
        to_go = () if self.left_s is None else (f"{clock(self.left_s)} to go",)
        return " | ".join([self.count, *self.facts, *to_go, *self.pauses])

    def picture(self, size: Size) -> list[Text]:
        """A bar, the reasons of a pause, and the facts."""
        from rich.text import Text

        count = f"{self.count}  {clock(self.elapsed_s)}"
        if self.left_s is not None:
            count += f"  {clock(self.left_s)} to go"
        progress_bar = bar(self.settled, self.total, size.width - len(count) - 2)
        first = progress_bar.append("  ").append(count) if progress_bar else Text(count)
        pauses = [Text(line, "bold yellow") for pause in self.pauses for line in wrap(pause, size.width)]
        facts = [Text(line, "dim") for line in pack_facts(self.facts, size.width)]
        return [first, *pauses, *facts]


class ProgressDisplay(Protocol):
    """A display: `say` prints a line, `draw` shows the progress, `end` shows the final state."""

    def say(self, text: str) -> None: ...
    def draw(self, snapshot: ProgressSnapshot) -> None: ...
    def end(self, snapshot: ProgressSnapshot) -> None: ...


class _Plain:
    """Prints a line when something has changed, and every UNCHANGED_INTERVAL_S seconds when nothing has."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: ProgressSnapshot | None = None

    def say(self, text: str) -> None:
        print(sanitize(text), file=self._stream, flush=True)

    def draw(self, snapshot: ProgressSnapshot) -> None:
        last = self._last
        unchanged = last is not None and (last.settled, last.pauses) == (snapshot.settled, snapshot.pauses)
        if last is None or not unchanged or snapshot.elapsed_s - last.elapsed_s >= UNCHANGED_INTERVAL_S:
            self._last = snapshot
            self.say(snapshot.line())

    def end(self, snapshot: ProgressSnapshot) -> None:
        if self._last is None or self._last.settled != snapshot.settled:
            self.say(snapshot.line())


class _Live:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def say(self, text: str) -> None:
        self._screen.say(text)

    def draw(self, snapshot: ProgressSnapshot) -> None:
        self._screen.show(snapshot.picture)

    def end(self, snapshot: ProgressSnapshot) -> None:
        self._screen.close()


@asynccontextmanager
async def display(meter: ProgressMeter, stream: TextIO, lost: Callable[[], None]) -> AsyncIterator[ProgressDisplay]:
    """Draw the progress regularly while the block runs.

    Args:
        lost: called when the stream is closed, such as a closed terminal; nothing is drawn afterwards.
    """
    if not is_live(stream):
        async with drawing(meter, _Plain(stream), PLAIN_TICK_S, lost) as show:
            yield show
        return
    screen = Screen(stream)
    with capture_output(screen):
        async with drawing(meter, _Live(screen), LIVE_TICK_S, lost) as show:
            yield show


@asynccontextmanager
async def drawing(
    meter: ProgressMeter, show: ProgressDisplay, tick_s: float, lost: Callable[[], None] = lambda: None
) -> AsyncIterator[ProgressDisplay]:
    """Measure and draw every `tick_s` seconds while the block runs, and once more at its end. lost: see `display`."""

    async def draw() -> None:
        while True:
            await asyncio.sleep(tick_s)
            meter.tick()
            try:
                show.draw(meter.snapshot())
            except OSError:
                lost()
                return

    ticking = asyncio.create_task(draw(), name="the display")
    ticking.add_done_callback(log_error)
    try:
        yield show
    finally:
        ticking.cancel()
        meter.tick()
        with suppress(OSError):  # the stream is closed: `lost` was called, or the next write fails
            show.end(meter.snapshot())
