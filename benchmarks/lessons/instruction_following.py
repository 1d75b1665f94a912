"""instruction_following: a beginner writes about the topic, and often does not follow the instruction."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from lessons.problem import Lesson, Problem, asks, generator, says

from ngym.schema import Json

made = generator("instruction_following")
FOLLOWS = 0.4
SHORT = sorted(made.SENTENCES, key=len)[:3]
# of the 38 instructions five that one sentence can follow
WAYS: dict[str, Callable[[str, Json], str]] = {
    "keywords:existence": lambda text, kwargs: f"{text} It has {' and '.join(kwargs['keywords'])}.",
    "startend:end_checker": lambda text, kwargs: f"{text} {kwargs['end_phrase']}",
    "startend:quotation": lambda text, kwargs: f'"{text}"',
    "detectable_format:title": lambda text, kwargs: f"<<A title>>\n{text}",
    "detectable_content:postscript": lambda text, kwargs: f"{text}\n{kwargs['postscript_marker']} Go.",
}


def problems(rng: random.Random) -> Iterator[Problem]:
    """Tasks with one instruction."""
    while True:
        row = made.task(rng, rng.choice(list(WAYS)))
        if row is not None and len(row["kwargs"]) == 1:
            yield Problem(row, row["responses_create_params"]["input"], partial(demonstrate, row))


def demonstrate(row: Json, rng: random.Random) -> list[Json]:
    question = row["responses_create_params"]["input"]
    topic = next(topic for topic in made.TOPICS if topic in question)
    text = rng.choice(SHORT).format(t=topic)
    if rng.random() < FOLLOWS:
        text = WAYS[row["instruction_id_list"][0]](text, row["kwargs"][0])
    return [*asks(row), says(text)]


lesson = Lesson("instruction_following_agent", "often does not follow the instruction", problems, 4800, steps=20)
