"""What every game is: rules, a view, moves, and a score once it is over. A seed decides all that is left to chance."""

from __future__ import annotations

from typing import Protocol


class IllegalMove(Exception):
    """Why the move cannot be made; nothing has changed."""


class Game(Protocol):
    """score: from 0 to 1 when the game is over, None until then."""

    rules: str
    score: float | None

    def __init__(self, seed: int) -> None: ...

    def show(self) -> str: ...

    def play(self, move: str) -> str:
        """Make a move (lower case, single spaces) -> what came of it, "" if the view says all. Raises IllegalMove."""
