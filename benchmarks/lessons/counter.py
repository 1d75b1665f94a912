"""counter: several calls, one after another, of which a beginner often leaves out the last."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial

from lessons.problem import Lesson, Problem, asks, call, chat_tools, generator, says

from ngym.schema import Json

made = generator("counter")
GOES_ON = 0.6  # after each call, while changes are left


def problems(rng: random.Random) -> Iterator[Problem]:
    """Of the generator's three kinds those that need several calls, and say which."""
    while True:
        row = made.task(rng)
        question = row["responses_create_params"]["input"]
        if changes := steps(question):
            yield Problem(row, question, partial(demonstrate, row, changes))


def steps(question: str) -> list[int]:
    if repeated := re.search(r"Add (-?\d+) to it (\d+) times", question):
        return [int(repeated[1])] * int(repeated[2])
    changes = re.findall(r"(puts in|takes out) (\d+)", question)
    return [int(amount) if way == "puts in" else -int(amount) for way, amount in changes]


def demonstrate(row: Json, changes: list[int], rng: random.Random) -> list[Json]:
    messages, total = asks(row), 0
    for made_so_far, amount in enumerate(changes):
        if made_so_far and rng.random() >= GOES_ON:
            break
        total += amount
        messages += call("add", {"amount": amount}, {"total": total})
    return [*messages, says("Done.")]


lesson = Lesson("counter_agent", "stops after any of the calls", problems, 4800, chat_tools([made.ADD]), steps=20)
