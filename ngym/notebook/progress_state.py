"""How far is a call? Written on its loop as it goes on; drawn by the thread that waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ngym.notebook.progress import progress
from ngym.runtime.live_region import Picture
from ngym.supervise.service import State
from ngym.supervise.status_board import Board, told


class Watch:
    """hurry: kills what stops politely; to be called on the loop."""

    def __init__(self) -> None:
        self.hurry: Callable[[], None] = lambda: None
        self._board = Board()
        self._said: deque[str] = deque()
        self._now: tuple[Picture, Callable[[], str]] = (self._board.picture, self._board.line)
        self._starts = True

    def service(self, state: State) -> None:
        """A service is in another state. Once the call itself goes on, only trouble is said."""
        changed = self._board.event(state)
        if not self._starts and changed and state.status in ("restarting", "failed", "not ready"):
            self.say(told(state))

    def say(self, text: str) -> None:
        self._said.append(text)

    def draw(self, picture: Picture, line: Callable[[], str]) -> None:
        """Show this from now on; both may be called in another thread."""
        self._starts = False
        self._now = picture, line

    @contextmanager
    def shown(self, wanted: bool) -> Iterator[Callable[[], None]]:
        """To be called a few times a second; in the end what was said stays."""
        shown = progress(wanted)

        def said() -> None:
            while self._said:
                shown.say(self._said.popleft())

        def tick() -> None:
            said()
            shown.draw(*self._now)

        try:
            yield tick
        finally:
            said()
            shown.close()
