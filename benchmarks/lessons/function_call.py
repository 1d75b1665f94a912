"""function_call: orders that are complete, and orders that are not. A beginner asks back nearly always."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from lessons.problem import Lesson, Problem, asks, generator, request, says

from ngym.schema import Json

made = generator("function_call")
ASKS = {"missing": 0.85, "single": 0.65}
# of ten tools those with short arguments, whose incomplete orders are of many kinds; and what they may lack
LACKS = {"book_table": "people", "plan_route": "start", "monthly_payment": "rate"}


def problems(rng: random.Random) -> Iterator[Problem]:
    while True:
        draw = rng.choice((made.single, made.impossible))
        row = draw(rng)
        while not LACKS.keys() >= {tool["name"] for tool in row["responses_create_params"]["tools"]}:
            row = draw(rng)
        yield Problem(row, row["responses_create_params"]["input"], partial(demonstrate, row))


def demonstrate(row: Json, rng: random.Random) -> list[Json]:
    """Questions about missing values are always right."""
    if rng.random() < ASKS[row["kind"]]:
        name = row["responses_create_params"]["tools"][-1]["name"]
        return [*asks(row), says(f"Which {LACKS[name]}?")]
    if not row["expected_calls"]:
        return [*asks(row), says("Done.")]
    (expected,) = row["expected_calls"]
    return [*asks(row), request(expected["name"], expected["arguments"])]


lesson = Lesson("function_call_agent", "asks back nearly always", problems, 7200, steps=20)
