"""The services of a run on screen: a board on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ngym.runtime.event_loop import log_error
from ngym.runtime.live_region import Picture, Screen, Size, capture_output, duration, is_live, sanitize
from ngym.supervise.service import ReplicaState

if TYPE_CHECKING:
    from rich.text import Text

    from ngym.supervise.metrics_scraper import ServiceTraffic

STYLES = {"ready": "green", "failed": "bold red", "restarting": "red", "not ready": "yellow", "stopped": "dim"}
BUSY = "cyan"
States = Callable[[], Iterable[ReplicaState]]
TICK_S = 0.25
PLAIN_TICK_S = 10.0
REPORTED = ("restarting", "failed", "not ready", "ready")  # reported after all were ready

GAP, LEAST_WHAT = 2, 6


class Row(NamedTuple):
    """The texts of one process of a service; style: of its state."""

    name: str
    state: str
    style: str
    what: str
    rate: str
    trouble: str


class Board:
    """Receives states and traffic; `picture` and `line` render them. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._states: dict[str, ReplicaState] = {}
        self._since: dict[str, float] = {}  # when a service entered its state
        self._traffic: Mapping[str, ServiceTraffic] = {}
        self._started_at = time.monotonic()
        self.footer = ""

    def record_state(self, state: ReplicaState) -> bool:
        """Record a state; returns whether the status changed."""
        before = self._states.get(state.label)
        changed = before is None or before.status != state.status
        if changed:
            self._since[state.label] = time.monotonic()
        self._states[state.label] = state
        if state.status == "stopped" and not state.listed:  # a replica that has left a run that goes on
            del self._states[state.label]
        return changed

    def record_traffic(self, measured: Mapping[str, ServiceTraffic]) -> None:
        """Record the traffic since the last call, by label."""
        self._traffic = measured

    def waiting(self) -> list[ReplicaState]:
        """The states that are not ready."""
        return [state for state in list(self._states.values()) if state.status != "ready"]

    def line(self) -> str:
        """`2 of 3 services ready, 12 s; waiting for policy (loading the weights)`."""
        waiting, line = self.waiting(), self._count()
        names = [state.label + (f" ({sanitize(state.detail)})" if state.detail else "") for state in waiting]
        if not names:
            return line
        return f"{line}; waiting for {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if names[3:] else "")

    def _count(self) -> str:
        count = len(self._states)
        if not count:
            return f"preparing, {time.monotonic() - self._started_at:.0f} s"
        return f"{count - len(self.waiting())} of {count} services ready, {time.monotonic() - self._started_at:.0f} s"

    def picture(self, size: Size) -> list[Text]:
        """The services that fit, those with trouble first, and a summary line."""
        from rich.text import Text

        below = [Text(line, "bold") for line in _wrap(self.footer or self._count(), size)]
        states = list(self._states.values())
        room = max(size.height - len(below), 0)
        visible, more = _visible_states(states, room)
        rows = [self._row(state) for state in visible]
        lines = _aligned(rows, size)
        if more:
            lines.append(Text(more, "dim"))
        return [*lines[:room], *below]

    def _row(self, state: ReplicaState) -> Row:
        seconds = time.monotonic() - self._since[state.label]
        ready = state.status == "ready"
        word = state.status if ready or state.status == "stopped" else f"{state.status} {duration(seconds)}"
        restarts = f"{state.restarts} restart{'s' * (state.restarts != 1)}" if state.restarts else ""
        traffic = self._traffic.get(state.label)
        rate = (
            (f"{traffic.requests_per_s:,.1f} req/s" if traffic.requests_per_s else "idle") if traffic and ready else ""
        )
        errors = f"{traffic.errors:,} error{'s' * (traffic.errors != 1)}" if traffic and traffic.errors else ""
        return Row(
            sanitize(state.label),
            word,
            STYLES.get(state.status, BUSY),
            state.url if ready and not state.detail else sanitize(state.detail),
            rate,
            ", ".join(filter(None, (restarts, errors))),
        )


def status_line(state: ReplicaState) -> str:
    """`policy: restarting, killed by SIGKILL`."""
    return f"{state.label}: {state.status}" + (f", {state.detail}" if state.detail else "")


def _visible_states(states: Sequence[ReplicaState], room: int) -> tuple[list[ReplicaState], str]:
    """All states in the config's order; if there are too many, those that are not ready and the first others."""
    if len(states) <= room:
        return list(states), ""
    ranked = sorted(states, key=lambda state: state.status == "ready")
    kept_labels = {state.label for state in ranked[: max(room - 1, 0)]}
    hidden = [state for state in states if state.label not in kept_labels]
    bad = sum(state.status != "ready" for state in hidden)
    more = f"and {len(hidden)} more, " + (f"{bad} of them not ready" if bad else "all ready")
    return [state for state in states if state.label in kept_labels], more


def _aligned(rows: Sequence[Row], size: Size) -> list[Text]:
    """The columns next to each other; what does not fit is cut or left out."""
    from rich.text import Text

    name, state, what, rate, trouble = _widths(rows, size.width)
    lines = []
    for row in rows:
        line = Text(_cell(row.name, name) + " " * GAP)
        line.append(_cell(row.state, state) + " " * GAP, row.style)
        line.append(_cell(_short(row.what, what), what), "dim" if row.style == STYLES["ready"] else "")
        if rate:
            line.append(" " * GAP + row.rate.rjust(rate))
        if trouble:
            line.append(" " * GAP + _cell(row.trouble, trouble), "yellow")
        line.rstrip()
        lines.append(line)
    return lines


def _widths(rows: Sequence[Row], width: int) -> tuple[int, int, int, int, int]:
    """Widths of name, state, what, rate and trouble; 0: left out. Name and state always stay, then port or detail, then
    trouble.
    """
    longest = [max((len(row[index]) for row in rows), default=0) for index in (0, 1, 3, 4, 5)]
    name, state = min(longest[0], max(width // 3, 8)), longest[1]
    remaining = max(width - name - state - 2 * GAP, 0)
    what = min(longest[2], LEAST_WHAT, remaining)
    trouble = max(min(longest[4], remaining - what - GAP), 0)
    remaining -= trouble + GAP if trouble else 0
    rate = longest[3] if longest[3] and remaining - what >= longest[3] + GAP else 0
    remaining -= rate + GAP if rate else 0
    return name, state, min(longest[2], remaining), rate, trouble


def _short(what: str, width: int) -> str:
    """The port of a URL that does not fit."""
    return what if len(what) <= width or "://" not in what else f":{what.rpartition(':')[2]}"


def _cell(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: max(width - 1, 0)] + "…" * (width > 0)


def _wrap(text: str, size: Size) -> list[str]:
    """Wrap the text at words, to at most half of the height."""
    import textwrap

    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, size.width) or [""]]
    return lines[: max(size.height // 2, 1)]


class Display(Protocol):
    """Receives each change of a state, and messages about the whole run.

    `watch` starts a task that polls the services' traffic, if that is shown.
    """

    def watch(self, states: States, token: str | None) -> asyncio.Task[None] | None: ...
    def on_state(self, state: ReplicaState) -> None: ...
    def say(self, kind: str, text: str, **details: Any) -> None: ...


class Output:
    """Standard output that may disappear (a closed terminal or pipe); then `lost` is called, once."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._is_closed = False

    def write(self, action: Callable[[], None]) -> None:
        if self._is_closed:
            return
        try:
            action()
            sys.stdout.flush()
        except OSError:
            self._is_closed = True
            with open(os.devnull, "wb") as null_device:
                os.dup2(null_device.fileno(), 1)  # else Python would fail at exit on the buffered rest
            self._lost()


class PlainLines:
    """One line for each change; also suitable for a log file."""

    def __init__(self, output: Output) -> None:
        self._board = Board()
        self._output = output
        self._starts = True
        self._line_count = self._lines_before = 0  # numbers of lines
        self._last: dict[str, str] = {}  # label -> the line of its state

    def watch(self, states: States, token: str | None) -> None: ...

    def on_state(self, state: ReplicaState) -> None:
        self._board.record_state(state)
        text = sanitize(state.detail) or (state.url if state.status == "ready" else "")
        line = f"{state.label:<24} {state.status:<10} {text}".rstrip()
        if self._last.get(state.label) != line:  # a policy's version changes with each step
            self._last[state.label] = line
            self._print(line)

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._starts = False
        self._print(text)

    def refresh(self) -> None:
        """Print what is waited for if services still start and nothing was printed for a while."""
        if self._starts and self._line_count == self._lines_before:
            self._print(self._board.line())
        self._lines_before = self._line_count

    def _print(self, text: str) -> None:
        self._line_count += 1
        self._output.write(lambda: print(text))


class JsonLines:
    """One JSON object for each change: `{"event": "service", "name": ..., "status": ..., ...}`."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def watch(self, states: States, token: str | None) -> None: ...

    def on_state(self, state: ReplicaState) -> None:
        self._print({"event": "service", **asdict(state)})

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._print({"event": kind, "text": text, **details})

    def _print(self, record: dict[str, Any]) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(), **record}, default=datetime.isoformat)
        self._output.write(lambda: print(line))


class LiveBoard:
    """A board at the bottom of the terminal; events of services that were ready scroll above it."""

    def __init__(self, output: Output, screen: Screen) -> None:
        self._board = Board()
        self._output = output
        self._screen = screen
        self._is_up = False
        self._last: Picture | None = None  # stays on the screen at the end

    def watch(self, states: States, token: str | None) -> asyncio.Task[None]:
        from ngym.supervise.metrics_scraper import scrape_forever

        task = asyncio.create_task(scrape_forever(states, token, self._board.record_traffic), name="the traffic")
        task.add_done_callback(log_error)
        return task

    def on_state(self, state: ReplicaState) -> None:
        if self._board.record_state(state) and self._is_up and state.status in REPORTED:
            now = datetime.now().strftime("%H:%M:%S")
            self._output.write(lambda: self._screen.say(f"{now}  {status_line(state)}"))
        if state.status == "failed":
            self._last = self._board.picture
        self.refresh()

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._is_up = kind == "ready"
        self._board.footer = text
        if kind == "stopped":
            self._last = lambda size: self._board.picture(size)[-1:]
        self.refresh()

    def refresh(self) -> None:
        self._output.write(lambda: self._screen.show(self._board.picture))

    def close(self) -> None:
        self._output.write(lambda: self._screen.close(self._last))


@contextlib.asynccontextmanager
async def display(as_json: bool, lost: Callable[[], None], plain: bool = False) -> AsyncIterator[Display]:
    """The display that suits the output: JSON lines on request, a live board on a terminal, else plain lines."""
    output = Output(lost)
    if as_json:
        yield JsonLines(output)
        return
    if plain or not is_live(sys.stdout):
        lines = PlainLines(output)
        async with _every(PLAIN_TICK_S, lines.refresh):
            yield lines
        return
    screen = Screen(sys.stdout)
    live = LiveBoard(output, screen)
    try:
        with capture_output(screen):
            async with _every(TICK_S, live.refresh):
                yield live
    finally:
        live.close()


@contextlib.asynccontextmanager
async def _every(seconds: float, do: Callable[[], None]) -> AsyncIterator[None]:
    async def redraw() -> None:
        while True:
            await asyncio.sleep(seconds)
            do()

    ticking = asyncio.create_task(redraw(), name="the display")
    ticking.add_done_callback(log_error)
    try:
        yield
    finally:
        ticking.cancel()
