"""translation: a beginner mostly stops half-way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from lessons.problem import Lesson, Problem, asks, generator, says

from ngym.schema import Json

made = generator("translation")
WHOLE = 0.4


def problems(rng: random.Random) -> Iterator[Problem]:
    while True:
        clause = made.sentence(rng)
        code = rng.choice(list(made.LANGUAGES))
        row = made.row(clause, code)
        yield Problem(row, clause.en, partial(demonstrate, row))


def demonstrate(row: Json, rng: random.Random) -> list[Json]:
    words = row["references"][0].split()
    if rng.random() >= WHOLE:
        words = words[: len(words) // 2]
    return [*asks(row), says(" ".join(words))]


lesson = Lesson("translation_agent", "stops half-way", problems, demonstrations=7200)
