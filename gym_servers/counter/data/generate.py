"""Counter tasks: reach a number, or follow what people put in and take out; the same seed gives the same bytes.

python data/counter/generate.py        # rewrites train.jsonl, validation.jsonl and example.jsonl beside this script
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ngym.files.jsonl import write_rows

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 200, 50, 5

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add to this rollout's counter.",
    "parameters": {
        "type": "object",
        "properties": {
            "amount": {"description": "How much to add; may be negative.", "type": "integer"},
        },
        "required": ["amount"],
        "additionalProperties": False,
    },
    "strict": False,
}
NAMES = ("Ana", "Tom", "Raj", "Mia", "Leo", "Zoe")
START = "The counter starts at 0. "


def task(rng: random.Random) -> dict[str, Any]:
    """One task row; its kind is drawn first."""
    question, target = rng.choice((reach, repeat, follow))(rng)
    return {
        "responses_create_params": {"input": START + question, "tools": [ADD]},
        "agent_ref": {"type": "responses_api_agents", "name": "counter_agent"},
        "target": target,
    }


def reach(rng: random.Random) -> tuple[str, int]:
    target = rng.choice((-1, 1)) * rng.randint(1, 99)  # never 0: doing nothing must not be right
    return f"Bring it to {target}.", target


def repeat(rng: random.Random) -> tuple[str, int]:
    amount, times = rng.choice((-1, 1)) * rng.randint(2, 20), rng.randint(2, 5)
    return f"Add {amount} to it {times} times.", amount * times


def follow(rng: random.Random) -> tuple[str, int]:
    """Two or three changes, told in words."""
    changes = [rng.choice((-1, 1)) * rng.randint(1, 50) for _ in range(rng.randint(2, 3))]
    if sum(changes) == 0:
        changes[0] *= 2
    people = zip(rng.sample(NAMES, len(changes)), changes, strict=True)
    told = [f"{name} {'puts in' if change > 0 else 'takes out'} {abs(change)}" for name, change in people]
    return f"{', then '.join(told)}. Do the same to the counter.", sum(changes)


def distinct(count: int) -> list[dict[str, Any]]:
    """So many rows, no question twice."""
    rng = random.Random(SEED)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        row = task(rng)
        rows.setdefault(row["responses_create_params"]["input"], row)
    return list(rows.values())


def main() -> None:
    rows = distinct(TRAIN + VALIDATION)
    files = {"train": rows[VALIDATION:], "validation": rows[:VALIDATION], "example": rows[:EXAMPLES]}
    write_rows(HERE, files)


if __name__ == "__main__":
    main()
