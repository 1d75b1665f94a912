"""Letters to write: rubrics, references and groups with planted defects, so that the right order is known. Seeded.

python data/judge/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 90, 24, 6

EVENTS = (
    "your wedding", "the garden party", "the board meeting", "the concert", "the seminar", "your housewarming",
    "the audition", "the reunion",
)  # fmt: skip
REASONS = (
    "I am abroad",
    "my mother is ill",
    "the trains do not run",
    "I have an exam",
    "I work that night",
    "my car broke down",
)
OFFERS = ("dinner next week", "a call on Sunday", "a visit in spring", "lunch on Friday", "a walk by the lake")
PEOPLE = ("Ada", "Bo", "Chidi", "Dana", "Eero", "Fatima", "Goran", "Hana")
CRITERIA = (
    ("It declines clearly.", 2.0),
    ("It gives the reason that was asked for.", 1.0),
    ("It makes the offer that was asked for.", 1.0),
    ("It is polite and warm.", 1.0),
    ("It has no more than 60 words.", 0.5),
)


def letter(person: str, event: str, reason: str, offer: str, defects: set[str]) -> str:
    """A letter with these of the defects: no_reason, no_offer, rude, unclear."""
    parts = [f"Dear {person},", "thank you for the invitation." if "rude" not in defects else "stop writing to me."]
    parts.append(f"I cannot come to {event}" if "unclear" not in defects else f"I thought about {event}")
    parts[-1] += "." if "no_reason" in defects else f", because {reason}."
    if "no_offer" not in defects:
        parts.append(f"How about {offer}?")
    parts.append("Best wishes" if "rude" not in defects else "Bye")
    return " ".join(parts)


def task(rng: random.Random, mode: str) -> dict[str, Any]:
    person, event, reason, offer = (rng.choice(bank) for bank in (PEOPLE, EVENTS, REASONS, OFFERS))
    question = (
        f"Write a short letter to {person} that declines the invitation to {event}. "
        f"Say as the reason that {reason}, and offer {offer} instead. Stay polite."
    )
    row = task_row("judge_agent", {"input": question}, mode=mode, question=question)
    if mode == "rubric":
        criteria = rng.sample(CRITERIA, rng.randint(2, len(CRITERIA)))
        return {**row, "rubric": [{"text": text, "weight": weight} for text, weight in criteria]}
    names = ["no_reason", "no_offer", "rude", "unclear"]
    flawed = [rng.randint(0, 2)] if mode == "pairwise" else rng.sample(range(5), 3)
    texts = [letter(person, event, reason, offer, set(rng.sample(names, count))) for count in flawed]
    return {**row, "references": texts, "planted": flawed}


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    rows = draw_distinct(
        TRAIN + VALIDATION, lambda count: task(rng, ("rubric", "pairwise", "ranking")[count % 3]), prompt_of
    )
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
