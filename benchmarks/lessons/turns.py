"""A lesson of `games`: whole games, in which a beginner chooses any move without looking for a good one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from lessons.problem import Problem, asks, generator, says, user

from ngym.schema import Json

made: ModuleType = generator("games")
Chooses = Callable[[Any, random.Random], str]


def problems(name: str, chooses: Chooses, rng: random.Random) -> Iterator[Problem]:
    """Levels of one game, each with its own seed."""
    while True:
        seed = rng.randrange(10**6)
        row = made.row(name, seed)
        yield Problem(row, made.level(name, seed), partial(play_game, row, chooses))


def play_game(row: Json, chooses: Chooses, rng: random.Random) -> list[Json]:
    game = made.server.GAMES[row["game"]](row["seed"])
    messages = asks(row)
    observation = f"{game.rules} {made.server.HOW}\n\n{game.show()}"
    while game.score is None:
        move = chooses(game, rng)
        messages += [user(observation), says(move)]
        game.play(move)
        observation = game.show()
    return messages
