"""tool_minimal: two tools in one rollout. A beginner often guesses, or reads reviews without need."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from lessons.problem import Lesson, Problem, asks, call, chat_tools, generator, says

from ngym.schema import Json

made = generator("tool_minimal")
GUESSES, READS_REVIEWS = 0.35, 0.5
TOOLS = [
    {"name": name, "parameters": {"type": "object", "properties": {key: {"type": "string"}}}}
    for name, key in made.server.TOOLS.items()
]


def problems(rng: random.Random) -> Iterator[Problem]:
    """City or lead time of a ware's supplier: two tools. Wares are named by their number, so that no text repeats."""
    while True:
        world = rng.randrange(10**9)
        question = made.supplier(rng, made.server.world(world))
        if question.calls[0][0] == "get_ware":
            yield Problem(made.row(question, world), question.text, partial(demonstrate, question, world))


def demonstrate(question: Any, world: int, rng: random.Random) -> list[Json]:
    messages = asks(made.row(question, world))
    if rng.random() < GUESSES:
        guess = rng.randint(2, 99) if isinstance(question.answer, int) else rng.choice(made.server.CITIES)
        return [*messages, says(f"It is {guess}.")]
    calls = list(question.calls)
    if rng.random() < READS_REVIEWS:
        calls.insert(rng.randint(1, len(calls)), ("get_reviews", calls[0][1]))
    for name, key in calls:
        result = made.server.world(world).call(name, key)
        messages += call(name, {made.server.TOOLS[name]: key}, result.output)
    return [*messages, says(f"It is {question.answer}.")]


lesson = Lesson("tool_minimal_agent", "guesses, or reads reviews, too", problems, 6400, chat_tools(TOOLS), steps=20)
