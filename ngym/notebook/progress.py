"""Progress display of calls in notebooks, on terminals and in logs."""

from __future__ import annotations

import html
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from ngym.collect.progress_display import ProgressSnapshot
from ngym.runtime.live_region import Picture, Screen, Size, is_live, sanitize
from ngym.supervise.service import ReplicaState
from ngym.supervise.status_display import Board, status_line

PLAIN_INTERVAL_S = 5.0
CELL = Size(100, 20)


class Progress(Protocol):
    """`say` prints a lasting line, `draw` shows the progress, `close` removes it."""

    def say(self, text: str) -> None: ...
    def draw(self, picture: Picture, line: Callable[[], str]) -> None: ...
    def close(self) -> None: ...


def progress(enabled: bool) -> Progress:
    """The display for the environment of this process: notebook, terminal or log."""
    if not enabled:
        return NoDisplay()
    if (display := _notebook_display()) is not None:
        return NotebookDisplay(display)
    return TerminalDisplay(sys.stderr) if is_live(sys.stderr) else LineDisplay(sys.stderr)


class NoDisplay:
    """Shows nothing."""

    def say(self, text: str) -> None: ...
    def draw(self, picture: Picture, line: Callable[[], str]) -> None: ...
    def close(self) -> None: ...


class TerminalDisplay:
    """Shows progress at the bottom of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._screen = Screen(stream)

    def say(self, text: str) -> None:
        self._screen.say(text)

    def draw(self, picture: Picture, line: Callable[[], str]) -> None:
        self._screen.show(picture)

    def close(self) -> None:
        self._screen.close()


class LineDisplay:
    """Prints a line every few seconds, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = time.monotonic() + PLAIN_INTERVAL_S
        self._last_line = ""
        self._now: Callable[[], str] = lambda: ""

    def say(self, text: str) -> None:
        print(sanitize(text), file=self._stream, flush=True)

    def draw(self, picture: Picture, line: Callable[[], str]) -> None:
        self._now = line
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_INTERVAL_S
            self._last_line = line()
            self.say(self._last_line)

    def close(self) -> None:
        """Print the last state, if earlier ones were printed."""
        if self._last_line and self._last_line != (last := self._now()):
            self.say(last)


class NotebookDisplay:
    """One output of the running cell, which is updated in place; printed lines stay in it."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._messages: list[str] = []
        self._html = ""

    def say(self, text: str) -> None:
        self._messages.append(sanitize(text))
        self._show([])

    def draw(self, picture: Picture, line: Callable[[], str]) -> None:
        self._show([text.plain for text in picture(CELL)])

    def close(self) -> None:
        if self._handle is not None:
            self._show([])

    def _show(self, lines: list[str]) -> None:
        text = "\n".join([*self._messages, *lines])
        if text == self._html:
            return
        self._html = text
        bundle = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _notebook_display() -> Any:
    """IPython's `display` in the kernel of a notebook; None elsewhere, also for IPython on a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

    return display


class CallDisplay:
    """The display of a call. hurry: kills services that are stopping; call it on the loop."""

    def __init__(self) -> None:
        self.hurry: Callable[[], None] = lambda: None
        self._board = Board()
        self._pending_messages: deque[str] = deque()
        self._now: tuple[Picture, Callable[[], str]] = (self._board.picture, self._board.line)
        self._starts = True

    def on_state(self, state: ReplicaState) -> None:
        """Record a new state of a service. After startup, only problems are printed."""
        changed = self._board.record_state(state)
        if not self._starts and changed and state.status in ("restarting", "failed", "not ready"):
            self.say(status_line(state))

    def say(self, text: str) -> None:
        self._pending_messages.append(text)

    def draw(self, snapshot: ProgressSnapshot) -> None:
        """Show the progress of a collection from now on; another thread may draw it."""
        self._starts = False
        self._now = snapshot.picture, snapshot.line

    def end(self, snapshot: ProgressSnapshot) -> None:
        self.draw(snapshot)

    @contextmanager
    def open(self, enabled: bool) -> Iterator[Callable[[], None]]:
        """Show the progress during the block; yields a function to call a few times a second. Printed lines stay."""
        output = progress(enabled)

        def print_lines() -> None:
            while self._pending_messages:
                output.say(self._pending_messages.popleft())

        def tick() -> None:
            print_lines()
            output.draw(*self._now)

        try:
            yield tick
        finally:
            print_lines()
            output.close()
