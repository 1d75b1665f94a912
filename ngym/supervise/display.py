"""What a person sees while services start and run: a board of services on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Protocol

from ngym.runtime.live_region import Picture, Screen, captured, harmless, is_live
from ngym.supervise.service import State
from ngym.supervise.status_board import Board, told

States = Callable[[], Iterable[State]]

TICK_S = 0.25
PLAIN_TICK_S = 10.0
TOLD = ("restarting", "failed", "not ready", "ready")  # once all were ready


class Display(Protocol):
    """Hears each change of a state, and what is said about the run as a whole; `watch` looks at what the services do."""

    async def watch(self, states: States, token: str | None) -> None: ...
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
        self._board = Board()
        self._output = output
        self._starts = True
        self._said = self._said_before = 0  # lines

    async def watch(self, states: States, token: str | None) -> None: ...

    def event(self, state: State) -> None:
        self._board.event(state)
        text = harmless(state.detail) or (state.url if state.status == "ready" else "")
        self._print(f"{state.label:<24} {state.status:<10} {text}".rstrip())

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._starts = False
        self._print(text)

    def refresh(self) -> None:
        """While services start, and nothing has been said for a while: what is waited for."""
        if self._starts and self._said == self._said_before:
            self._print(self._board.line())
        self._said_before = self._said

    def _print(self, text: str) -> None:
        self._said += 1
        self._output.write(lambda: print(text))


class JsonLines:
    """One JSON object for each change: `{"event": "service", "name": ..., "status": ..., ...}`."""

    def __init__(self, output: Output) -> None:
        self._output = output

    async def watch(self, states: States, token: str | None) -> None: ...

    def event(self, state: State) -> None:
        self._print({"event": "service", **asdict(state)})

    def say(self, kind: str, text: str, **details: Any) -> None:
        self._print({"event": kind, "text": text, **details})

    def refresh(self) -> None: ...

    def _print(self, record: dict[str, Any]) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(), **record}, default=datetime.isoformat)
        self._output.write(lambda: print(line))


class LiveBoard:
    """A board that stays at the bottom of the terminal, from which what happens to a service that was ready goes up."""

    def __init__(self, output: Output, screen: Screen) -> None:
        self._board = Board()
        self._output = output
        self._screen = screen
        self._is_up = False
        self._last: Picture | None = None  # what is left when all is over

    async def watch(self, states: States, token: str | None) -> None:
        from ngym.supervise.metric_poller import look_for_ever

        await look_for_ever(states, token, self._board.traffic)

    def event(self, state: State) -> None:
        if self._board.event(state) and self._is_up and state.status in TOLD:
            now = datetime.now().strftime("%H:%M:%S")
            self._output.write(lambda: self._screen.say(f"{now}  {told(state)}"))
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
    """The display that fits: JSON lines on demand, a live board on a terminal, plain lines otherwise."""
    output = Output(lost)
    if as_json or plain or not is_live(sys.stdout):
        lines = JsonLines(output) if as_json else PlainLines(output)
        async with _every(PLAIN_TICK_S, lines.refresh):
            yield lines
        return
    screen = Screen(sys.stdout)
    live = LiveBoard(output, screen)
    try:
        with captured(screen):
            async with _every(TICK_S, live.refresh):
                yield live
    finally:
        live.close()


@contextlib.asynccontextmanager
async def _every(seconds: float, do: Callable[[], None]) -> AsyncIterator[None]:
    async def again() -> None:
        while True:
            await asyncio.sleep(seconds)
            do()

    ticking = asyncio.create_task(again(), name="display")
    try:
        yield
    finally:
        ticking.cancel()
