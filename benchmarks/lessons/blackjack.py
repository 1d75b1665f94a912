"""games: a beginner at blackjack mostly takes another card, a little more often when no card can lose the game."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from lessons.problem import Lesson
from lessons.turns import problems

SAFE = 11  # a hand of so much cannot go above 21
HITS, HITS_WHEN_SAFE = 0.65, 0.95


def another_card(game: Any, rng: random.Random) -> str:
    hand = int(game.show().split("(")[1].split(")")[0])
    return "hit" if rng.random() < (HITS_WHEN_SAFE if hand <= SAFE else HITS) else "stand"


# luck decides so much that a step needs more games, and without the bonus the policy stops drawing before it knows when
WORDS = ("rollouts.tasks_per_step=32", "algorithm.loss.entropy_coef=0.01")
lesson = Lesson(
    "games_agent", "mostly takes another card", partial(problems, "blackjack", another_card), 3200, words=WORDS
)
