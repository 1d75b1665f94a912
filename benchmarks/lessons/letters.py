"""letters: a beginner writes any letters, of which one is rewarded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from lessons.problem import Lesson, Problem, asks, generator, says

from ngym.schema import Json

made = generator("letters")
ALPHABET, MOST = "abcdefgh", 8


def problems(rng: random.Random) -> Iterator[Problem]:
    while True:
        row = made.task(rng)
        yield Problem(row, row["responses_create_params"]["input"], partial(demonstrate, row))


def demonstrate(row: Json, rng: random.Random) -> list[Json]:
    return [*asks(row), says("".join(rng.choices(ALPHABET, k=rng.randint(1, MOST))))]


lesson = Lesson("letters_agent", "writes any letters", problems, 1600, steps=20)
