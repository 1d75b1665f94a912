"""games: a beginner at tic-tac-toe knows which squares are free, and nothing of the game."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from lessons.problem import Lesson
from lessons.turns import problems


def any_square(game: Any, rng: random.Random) -> str:
    return rng.choice([str(square + 1) for square in range(9) if game.board[square] == " "])


lesson = Lesson(
    "games_agent",
    "takes any free square",
    partial(problems, "tic_tac_toe", any_square),
    2400,
    words=("rollouts.tasks_per_step=32",),
    steps=60,
)
