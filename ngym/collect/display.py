"""Progress display of a collection: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from ngym.collect.aggregate import Aggregates
from ngym.collect.files import Progress
from ngym.runtime.live_region import Screen, Size, bar, captured, clock, harmless, is_live, packed

if TYPE_CHECKING:
    from rich.text import Text

WINDOW_S = 30.0  # rates are over the last 30 s
LIVE_TICK_S = 0.25
PLAIN_TICK_S = 5.0
STILL_S = 30.0
SHOWN_AGENTS = 3


class _Sample(NamedTuple):
    at: float
    rollouts: int
    tokens: int


@dataclass
class Meter:
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

    def standing(self) -> Standing:
        """A snapshot of the progress, which any thread may draw."""
        rollouts, _ = self.rates()
        total, complete = self.before.total, self.before.complete
        left = total - self.settled
        seconds = left / rollouts if complete and left and rollouts > 0 else None
        elapsed = time.monotonic() - self.started
        pauses = tuple(f"paused: {harmless(reason)}; it continues by itself" for reason in self.reasons.values())
        return Standing(self.settled, total, elapsed, seconds, tuple(self._facts()), pauses, complete)

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
        shown = []
        for name, tally in list(self.aggregates.by_agent.items())[:SHOWN_AGENTS]:
            mean, interval = tally.rewards.mean, tally.rewards.interval
            if mean is not None:
                half = f" ±{(interval.high - interval.low) / 2:.3f}" if interval else ""
                unscored = f" ({tally.scores.unscored_share:.1%} unscored)" if tally.unscored else ""
                shown.append(f"{name} reward {mean:.3f}{half}{unscored}")
        return shown

    def _sample(self) -> _Sample:
        return _Sample(time.monotonic(), self.aggregates.done, self.aggregates.output_tokens)


@dataclass(frozen=True)
class Standing:
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
        drawn = bar(self.settled, self.total, size.width - len(count) - 2)
        first = drawn.append("  ").append(count) if drawn else Text(count)
        pauses = [Text(line, "bold yellow") for pause in self.pauses for line in wrap(pause, size.width)]
        facts = [Text(line, "dim") for line in packed(self.facts, size.width)]
        return [first, *pauses, *facts]


class Show(Protocol):
    """A display: `say` prints a line, `draw` shows the progress, `end` shows the final state."""

    def say(self, text: str) -> None: ...
    def draw(self, standing: Standing) -> None: ...
    def end(self, standing: Standing) -> None: ...


class _Plain:
    """Prints a line when something has changed, and every STILL_S seconds when nothing has."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: Standing | None = None

    def say(self, text: str) -> None:
        print(harmless(text), file=self._stream, flush=True)

    def draw(self, standing: Standing) -> None:
        last = self._last
        still = last is not None and (last.settled, last.pauses) == (standing.settled, standing.pauses)
        if last is None or not still or standing.elapsed_s - last.elapsed_s >= STILL_S:
            self._last = standing
            self.say(standing.line())

    def end(self, standing: Standing) -> None:
        if self._last is None or self._last.settled != standing.settled:
            self.say(standing.line())


class _Live:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def say(self, text: str) -> None:
        self._screen.say(text)

    def draw(self, standing: Standing) -> None:
        self._screen.show(standing.picture)

    def end(self, standing: Standing) -> None:
        self._screen.close()


@asynccontextmanager
async def display(meter: Meter, stream: TextIO, lost: Callable[[], None]) -> AsyncIterator[Show]:
    """Draw the progress regularly while the block runs.

    Args:
        lost: called when the stream is closed, such as a closed terminal; nothing is drawn afterwards.
    """
    if not is_live(stream):
        async with drawing(meter, _Plain(stream), PLAIN_TICK_S, lost) as show:
            yield show
        return
    screen = Screen(stream)
    with captured(screen):
        async with drawing(meter, _Live(screen), LIVE_TICK_S, lost) as show:
            yield show


@asynccontextmanager
async def drawing(
    meter: Meter, show: Show, tick_s: float, lost: Callable[[], None] = lambda: None
) -> AsyncIterator[Show]:
    """Measure and draw every `tick_s` seconds while the block runs, and once more at its end. lost: see `display`."""

    async def draw() -> None:
        while True:
            await asyncio.sleep(tick_s)
            meter.tick()
            try:
                show.draw(meter.standing())
            except OSError:
                lost()
                return

    ticking = asyncio.create_task(draw(), name="display")
    try:
        yield show
    finally:
        ticking.cancel()
        meter.tick()
        with suppress(OSError):  # the stream is closed: `lost` was called, or the next write fails
            show.end(meter.standing())
