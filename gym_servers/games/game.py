"""The interface of a game: rules, a view, moves, and a final score. The seed determines everything random."""

from __future__ import annotations

from typing import Protocol


class IllegalMove(Exception):
    """A move that cannot be made; the text says why. The game has not changed."""


class Game(Protocol):
    """score: from 0 to 1 when the game is over, None until then."""

    rules: str
    score: float | None

    def __init__(self, seed: int) -> None: ...

    def show(self) -> str: ...

    def play(self, move: str) -> str:
        """Make a move (lower case, single spaces). Returns a comment, "" if the view says all. Raises IllegalMove."""
