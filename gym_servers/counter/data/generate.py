"""Counter tasks: reach a number, or follow what people put in and take out; the same seed gives the same bytes.

python data/counter/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ngym.files.task_rows import draw_distinct, function_tool, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 200, 50, 5

AMOUNT = {"description": "How much to add; may be negative.", "type": "integer"}
ADD = function_tool("add", "Add to this rollout's counter.", {"amount": AMOUNT})
NAMES = ("Ana", "Tom", "Raj", "Mia", "Leo", "Zoe")
START = "The counter starts at 0. "


def task(rng: random.Random) -> dict[str, Any]:
    """One task row; its kind is drawn first."""
    question, target = rng.choice((reach, repeat, follow))(rng)
    return task_row("counter_agent", {"input": START + question, "tools": [ADD]}, target=target)


def reach(rng: random.Random) -> tuple[str, int]:
    target = rng.choice((-1, 1)) * rng.randint(1, 99)  # never 0: doing nothing must not be right
    return f"Bring it to {target}.", target


def repeat(rng: random.Random) -> tuple[str, int]:
    amount, times = rng.choice((-1, 1)) * rng.randint(2, 20), rng.randint(2, 5)
    return f"Add {amount} to it {times} times.", amount * times


def follow(rng: random.Random) -> tuple[str, int]:
    """Two or three changes, in words."""
    changes = [rng.choice((-1, 1)) * rng.randint(1, 50) for _ in range(rng.randint(2, 3))]
    if sum(changes) == 0:
        changes[0] *= 2
    people = zip(rng.sample(NAMES, len(changes)), changes, strict=True)
    sentences = [f"{name} {'puts in' if change > 0 else 'takes out'} {abs(change)}" for name, change in people]
    return f"{', then '.join(sentences)}. Do the same to the counter.", sum(changes)


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    rows = draw_distinct(TRAIN + VALIDATION, lambda _: task(rng), prompt_of)
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
