r"""Multiple-choice questions with computed answers: units, calendars, orderings. The same seed gives the same bytes.

python data/mcqa/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 200, 50, 5

LETTERS = "ABCD"
PROMPT = "Answer the question. Put the letter of the right option in \\boxed{{}}.\n\n{question}\n{options}"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = (
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("kilograms", "grams", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("dozens", "pieces", 12),
)
FIGURES = {3: "triangle", 4: "square", 5: "pentagon", 6: "hexagon", 8: "octagon", 10: "decagon"}


class Question(NamedTuple):
    """A question, its right answer and three wrong ones."""

    text: str
    right: str
    wrong: list[str]


def units(rng: random.Random) -> Question:
    large, small, factor = rng.choice(UNITS)
    count = rng.randint(2, 60)
    wrong = near(
        rng,
        count * factor,
        (count * factor // 10, count * factor * 10, count * (factor + 10), (count + 1) * factor, count + factor),
    )
    return Question(f"How many {small} are {count} {large}?", str(count * factor), wrong)


def weekday(rng: random.Random) -> Question:
    start, days = rng.randrange(7), rng.randint(8, 400)
    right = DAYS[(start + days) % 7]
    wrong = rng.sample([day for day in DAYS if day != right], 3)
    return Question(f"Today is {DAYS[start]}. Which day of the week is it in {days} days?", right, wrong)


def calendar(rng: random.Random) -> Question:
    start = date(2024, 1, 1) + timedelta(days=rng.randrange(1400))
    days = rng.randint(5, 90)
    texts = [
        day.isoformat()
        for day in (start + timedelta(days=days + shift) for shift in (0, -1, 1, rng.choice((-2, 2, 7))))
    ]
    return Question(f"Which date is {days} days after {start.isoformat()}?", texts[0], texts[1:])


def largest(rng: random.Random) -> Question:
    fractions = rng.sample([(a, b) for b in range(2, 13) for a in range(1, b) if b % a or a == 1], 4)
    while len({a / b for a, b in fractions}) < 4:
        fractions = rng.sample([(a, b) for b in range(2, 13) for a in range(1, b)], 4)
    ordered = [f"{a}/{b}" for a, b in sorted(fractions, key=lambda pair: pair[0] / pair[1], reverse=True)]
    return Question(f"Which of these is the largest: {', '.join(sorted(ordered))}?", ordered[0], ordered[1:])


def perimeter(rng: random.Random) -> Question:
    corners, side = rng.choice(list(FIGURES)), rng.randint(2, 40)
    right = corners * side
    wrong = near(rng, right, (side * side, (corners + 1) * side, (corners - 1) * side, corners + side, right + 2))
    return Question(
        f"What is the perimeter of a regular {FIGURES[corners]} with sides of {side} cm, in cm?", str(right), wrong
    )


def near(rng: random.Random, right: int, tempting: tuple[int, ...]) -> list[str]:
    """Three different wrong numbers, from the usual mistakes first."""
    wrong = sorted(
        {number for number in tempting if number > 0 and number != right} | {right + 1, right + 3, right + 5}
    )
    return [str(number) for number in rng.sample(wrong, 3)]


def task(rng: random.Random) -> dict[str, Any]:
    question = rng.choice((units, weekday, calendar, largest, perimeter))(rng)
    texts = rng.sample([question.right, *question.wrong], 4)
    options = dict(zip(LETTERS, texts, strict=True))
    choices = "\n".join(f"{letter}: {text}" for letter, text in options.items())
    return task_row(
        "mcqa_agent",
        {"input": PROMPT.format(question=question.text, options=choices)},
        options=[{letter: text} for letter, text in options.items()],
        expected_answer=LETTERS[texts.index(question.right)],
    )


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    # no question twice, however its options are ordered
    rows = draw_distinct(TRAIN + VALIDATION, lambda _: task(rng), lambda row: prompt_of(row).split("\n")[2])
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
