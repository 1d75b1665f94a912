"""weather: a beginner mostly says some weather without looking."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from zlib import crc32

from lessons.problem import Lesson, Problem, asks, call, generator, says

from ngym.config.shipped_files import shipped
from ngym.schema import Json
from ngym.services.base.app import load

made = generator("weather")
server = load(shipped() / "gym_servers" / "weather" / "app.py")
GUESSES = 0.6


def problems(rng: random.Random) -> Iterator[Problem]:
    """All 288 questions; a held-out one is in other words than those about the same city in training."""
    while True:
        city = rng.choice(made.CITIES)
        row = made.task(city, rng.choice(made.PHRASINGS))
        yield Problem(row, row["responses_create_params"]["input"], partial(demonstrate, row, city))


def demonstrate(row: Json, city: str, rng: random.Random) -> list[Json]:
    if rng.random() < GUESSES:
        return [*asks(row), says(f"It is {rng.choice(server.SKIES)}.")]
    sky = server.SKIES[crc32(server.place(city).encode()) % len(server.SKIES)]
    weather = {"city": city, "weather_description": f"The weather in {city} is {sky}."}
    return [*asks(row), *call("get_weather", {"city": city}, weather), says(f"It is {sky}.")]


lesson = Lesson("weather_agent", "mostly guesses", problems, 3200, steps=20)
