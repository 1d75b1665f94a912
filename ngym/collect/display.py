"""What a person sees while rollouts are collected: a bar that stays in place on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from ngym.collect.aggregate import Aggregates
from ngym.collect.files import Progress

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

WINDOW_S = 30.0  # rates are over the last 30 s
LIVE_TICK_S = 0.5
PLAIN_TICK_S = 5.0
SHOWN_AGENTS = 3


class _Sample(NamedTuple):
    at: float
    rollouts: int
    tokens: int


@dataclass
class Meter:
    """Where a run stands, in words. reasons: why it pauses, if it does."""

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
        """Take a sample for the rates; called regularly."""
        self._samples.append(self._sample())
        while len(self._samples) > 2 and self._samples[0].at < self._samples[-1].at - WINDOW_S:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """Rollouts and output tokens a second."""
        first, last = self._samples[0], self._samples[-1]
        seconds = max(last.at - first.at, 1e-3)
        return (last.rollouts - first.rollouts) / seconds, (last.tokens - first.tokens) / seconds

    def facts(self) -> list[str]:
        """Rates, rewards, failures, what is in flight, and how long it will take."""
        rollouts, tokens = self.rates()
        facts = [f"{rollouts:,.1f} rollouts/s", f"{tokens:,.0f} tokens/s"]
        facts += self._rewards()
        failed = sum((tally.failures for tally in self.aggregates.by_agent.values()), start=Counter[str]())
        if failed:
            share = 100 * failed.total() / (self.aggregates.done + failed.total())
            classes = ", ".join(f"{name} {count}" for name, count in failed.most_common(3))
            facts.append(f"failed attempts {share:.1f} % ({classes})")
        facts.append(f"{self.in_flight()} in flight")
        left = self.before.total - self.settled
        if left and rollouts > 0:
            facts.append(f"{clock(left / rollouts)} to go")
        return facts

    def pauses(self) -> list[str]:
        return [f"paused: {reason}; it goes on by itself" for reason in self.reasons.values()]

    def _rewards(self) -> list[str]:
        shown = []
        for name, tally in list(self.aggregates.by_agent.items())[:SHOWN_AGENTS]:
            mean, interval = tally.rewards.mean, tally.rewards.interval
            if mean is not None:
                half = f" ±{(interval.high - interval.low) / 2:.3f}" if interval else ""
                shown.append(f"{name} reward {mean:.3f}{half}")
        return shown

    def _sample(self) -> _Sample:
        return _Sample(time.monotonic(), self.aggregates.done, self.aggregates.output_tokens)


class Show(Protocol):
    """Says things above, and redraws when told."""

    def say(self, text: str) -> None: ...
    def draw(self) -> None: ...


class _Plain:
    def __init__(self, meter: Meter, stream: TextIO) -> None:
        self._meter = meter
        self._stream = stream

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def draw(self) -> None:
        meter = self._meter
        parts = [f"{meter.settled}/{meter.before.total}", *meter.facts(), *meter.pauses()]
        self.say(" | ".join(parts))


class _Live:
    def __init__(self, meter: Meter, live: Live) -> None:
        self._meter = meter
        self._live = live

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def draw(self) -> None:
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        meter = self._meter
        bar = Table.grid(padding=(0, 1))
        elapsed = clock(time.monotonic() - meter.started)
        total = meter.before.total
        bar.add_row(ProgressBar(total, meter.settled, width=40), f"{meter.settled:,}/{total:,}", elapsed)
        whole = Table.grid()
        whole.add_row(bar)
        whole.add_row(Text("  ".join(meter.facts()), "dim"))
        for pause in meter.pauses():
            whole.add_row(Text(pause, "bold yellow"))
        return whole


@asynccontextmanager
async def display(meter: Meter, stream: TextIO, lost: Callable[[], None]) -> AsyncIterator[Show]:
    """Draws by itself while the block runs.

    Args:
        lost: called when the stream is gone (a closed terminal); nothing is drawn from then on.
    """
    if not stream.isatty():
        plain = _Plain(meter, stream)
        async with _drawing(meter, plain, PLAIN_TICK_S, lost):
            yield plain
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        shown = _Live(meter, live)
        async with _drawing(meter, shown, LIVE_TICK_S, lost):
            yield shown


@asynccontextmanager
async def _drawing(meter: Meter, show: Show, tick_s: float, lost: Callable[[], None]) -> AsyncIterator[None]:
    async def draw() -> None:
        while True:
            await asyncio.sleep(tick_s)
            meter.tick()
            try:
                show.draw()
            except OSError:
                lost()
                return

    drawing = asyncio.create_task(draw(), name="display")
    try:
        yield
    finally:
        drawing.cancel()


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
