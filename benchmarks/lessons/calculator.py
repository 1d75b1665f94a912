"""calculator: the quickstart's own demonstrations. A beginner can use the tool, and prefers to guess."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from lessons.problem import Lesson, Problem, generator

from ngym.schema import Json

made = generator("calculator")


def problems(rng: random.Random) -> Iterator[Problem]:
    for problem in made.problems(rng):
        yield Problem(made.task(problem), problem.sum.ordered.expression, partial(demonstrate, problem))


def demonstrate(problem: Any, rng: random.Random) -> list[Json]:
    """A fifth shows a larger sum instead, as the generator's demonstrations do; no task has one."""
    if rng.random() < made.LARGER:
        problem = next(made.problems(rng, larger=1.0))
    messages: list[Json] = made.demonstration(problem, rng)["messages"]
    return messages


lesson = Lesson("calculator_agent", "mostly guesses", problems, 7200, (made.CHAT_TOOL,), steps=20)
