"""What a person sees while services start and run: one live line per service on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from ngym.supervise.service import State

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

STYLES = {"ready": "green", "failed": "bold red", "restarting": "red", "not ready": "yellow", "stopped": "dim"}
TICK_S = 0.5


class Display(Protocol):
    """Hears each change of a state, and what is said about the run as a whole."""

    def event(self, state: State) -> None: ...
    def say(self, kind: str, text: str, **details: Any) -> None: ...


class Output:
    """Standard output that may go away (a closed terminal, a pipe's dead reader): then `lost` is called, once."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._gone = False

    def write(self, action: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            action()
            sys.stdout.flush()
        except OSError:
            self._gone = True
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)  # what is still buffered would fail again when Python exits
            self._lost()


class PlainLines:
    """One line for each change; also right for a log file."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def event(self, state: State) -> None:
        text = state.detail or (state.url if state.status == "ready" else "")
        self._output.write(lambda: print(f"{state.label:<24} {state.status:<10} {text}".rstrip()))

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._output.write(lambda: print(text))


class JsonLines:
    """One JSON object for each change: `{"event": "service", "name": ..., "status": ..., ...}`."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def event(self, state: State) -> None:
        self._print({"event": "service", **asdict(state)})

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._print({"event": kind, "text": text, **details})

    def _print(self, record: dict[str, Any]) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(), **record}, default=datetime.isoformat)
        self._output.write(lambda: print(line))


class LiveLines:
    """A table that stays in place, one line per service."""

    def __init__(self, output: Output, live: Live) -> None:
        self._output = output
        self._live = live
        self._states: dict[str, State] = {}
        self._footer = ""
        self._started = time.monotonic()

    def event(self, state: State) -> None:
        self._states[state.label] = state
        self.refresh()

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._footer = text
        self.refresh()

    async def tick(self) -> None:
        """Let the seconds run until the footer says something else."""
        while not self._footer:
            self.refresh()
            await asyncio.sleep(TICK_S)

    def refresh(self) -> None:
        self._output.write(lambda: self._live.update(self._picture(), refresh=True))

    def _picture(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for state in self._states.values():
            style = STYLES.get(state.status, "cyan")
            text = state.detail or state.url
            again = f"started {state.restarts + 1} times" if state.restarts else ""
            table.add_row(state.label, Text(state.status, style), Text(text, "" if state.detail else "dim"), again)
        ready = sum(state.status == "ready" for state in self._states.values())
        progress = f"{ready} of {len(self._states)} ready, {time.monotonic() - self._started:.0f} s"
        return Group(table, Text(self._footer or progress, "bold"))


@contextlib.asynccontextmanager
async def display(as_json: bool, lost: Callable[[], None]) -> AsyncIterator[Display]:
    """The display that fits: JSON lines on demand, live on a terminal, plain lines otherwise."""
    output = Output(lost)
    if as_json or not sys.stdout.isatty():
        yield JsonLines(output) if as_json else PlainLines(output)
        return
    from rich.live import Live

    live = Live(auto_refresh=False)
    lines = LiveLines(output, live)
    output.write(live.start)
    ticking = asyncio.create_task(lines.tick())
    try:
        yield lines
    finally:
        ticking.cancel()
        output.write(live.stop)
