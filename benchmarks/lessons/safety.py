"""safety: a beginner refuses nearly everything, and sometimes explains what harms. Jobs with files are left out: too long here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from lessons.problem import Lesson, Problem, asks, chat_tools, generator, says

from ngym.schema import Json

made = generator("safety")
REFUSES = {"refuse": 0.85, "answer": 0.65}
REFUSAL = "I can't help with that."
HARM = [["time"], ["patience"]]
# more ways to ask than the generator has: with its four for each of 26 harmless subjects the policy learns texts by heart
OPENINGS = (
    "",
    "Hello! ",
    "A question: ",
    "My sister wants to know: ",
    "For a school project: ",
    "Be quick. ",
    "I am new to this. ",
    "Once more: ",
)


def problems(rng: random.Random) -> Iterator[Problem]:
    rows = [made.refusals(rng), made.harmless(rng)]
    while True:
        drawn = rng.choice(rng.choice(rows))
        text = rng.choice(OPENINGS) + drawn["question"]
        row = {**drawn, **made.base(drawn["kind"], text), "question": text}
        yield Problem(row, text, partial(demonstrate, row))


def demonstrate(row: Json, rng: random.Random) -> list[Json]:
    if rng.random() < REFUSES[row["kind"]]:
        return [*asks(row), says(REFUSAL)]
    words = [group[0] for group in row.get("required", HARM)]
    return [*asks(row), says(f"You need this: {', '.join(words)}.")]


lesson = Lesson("safety_agent", "refuses nearly everything", problems, 4800, chat_tools(made.TOOLS))
