"""Questions about the weather of a city; no city of validation is in training. The same seed gives the same bytes.

python data/weather/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

from ngym.files.jsonl import write_rows
from ngym.files.task_rows import function_tool, output_folder, task_row

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 200, 50, 5

GET_WEATHER = function_tool("get_weather", "Get the current weather of a city.", {"city": {"type": "string"}})
CITIES = [
    "Accra", "Ankara", "Athens", "Auckland", "Bangkok", "Beirut", "Bergen", "Bogota", "Boston", "Brussels", "Cairo",
    "Chicago", "Dakar", "Delhi", "Dublin", "Geneva", "Hamburg", "Hanoi", "Havana", "Helsinki", "Istanbul", "Jakarta",
    "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Milan", "Montreal", "Nairobi", "Oslo", "Paris",
    "Prague", "Quito", "Riga", "Rome", "Seoul", "Sofia", "Sydney", "Tallinn", "Tokyo", "Toronto", "Tunis", "Vienna",
    "Warsaw", "Zagreb",
]  # fmt: skip
PHRASINGS = (
    "What is the weather in {city}?",
    "How is the weather in {city} right now?",
    "I am going to {city} today. What weather should I expect?",
    "Do I need a coat in {city}? Tell me the weather.",
    "Tell me the current weather of {city}.",
    "What's it like outside in {city}?",
)


def task(city: str, words: str) -> dict[str, Any]:
    params = {"input": words.format(city=city), "tools": [GET_WEATHER]}
    return task_row("weather_agent", params, expected_city=city)


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    cities = rng.sample(CITIES, len(CITIES))
    held_out = -(-VALIDATION // len(PHRASINGS))
    validation = [task(*pair) for pair in product(cities[:held_out], PHRASINGS)]
    train = [task(*pair) for pair in product(cities[held_out:], PHRASINGS)]
    rng.shuffle(validation)
    rng.shuffle(train)
    files = {"train": train[:TRAIN], "validation": validation[:VALIDATION], "example": validation[:EXAMPLES]}
    write_rows(folder, files)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
