"""Questions over small made-up worlds of towns and people; no name of validation is in training. Seeded.

python data/qa_short/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import output_folder, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 160, 40, 5

PROMPT = '{facts}\n\n{question} Answer with {form} only, in the form "Answer: ...".'
FORMS = {"text": "the name", "number": "the number", "date": "the full date"}
STARTS = (
    "Bra", "Cel", "Dor", "Fen", "Gal", "Hol", "Ist", "Jor", "Kel", "Lun", "Mar", "Nor", "Ost", "Pel", "Ras", "Sil",
)  # fmt: skip
MIDDLES = ("a", "e", "i", "o", "u", "ani", "eri", "olo", "umi")
TOWN_ENDS = ("ford", "gate", "holm", "mere", "stad", "vik", "borough")
LAND_ENDS = ("land", "stan", "onia")
PERSON_ENDS = ("s", "n", "r", "ssen", "tti", "vic", "dottir")
FIRST = (
    "Ada", "Bo", "Chidi", "Dana", "Eero", "Fatima", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lea", "Mina", "Noor",
    "Omar", "Petra",
)  # fmt: skip
JOBS = ("painter", "botanist", "composer", "architect", "chemist", "novelist", "sailor", "judge")
RIVERS = ("Aln", "Bezh", "Corra", "Duin", "Ebra", "Firth", "Gand", "Isk")


class Town(NamedTuple):
    name: str
    land: str
    river: str
    people: int
    founded: date


class Person(NamedTuple):
    name: str
    job: str
    home: Town
    born: date


class Question(NamedTuple):
    text: str
    answer: str
    kind: str = "text"
    aliases: tuple[str, ...] = ()


class Names:
    """Made-up names, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def new(self, ends: tuple[str, ...], before: tuple[str, ...] = ()) -> str:
        while True:
            name = self._rng.choice(STARTS) + self._rng.choice(MIDDLES) + self._rng.choice(ends)
            if name not in self._used:
                self._used.add(name)
                return f"{self._rng.choice(before)} {name}" if before else name


def spelled(day: date) -> str:
    return f"{day.day} {day:%B %Y}"


def world(rng: random.Random, names: Names) -> tuple[list[Town], list[Person]]:
    """Three towns in two lands, three people; every river, job and number occurs once, so that questions have one answer."""
    lands = [names.new(LAND_ENDS) for _ in range(2)]
    rivers, jobs = rng.sample(RIVERS, 3), rng.sample(JOBS, 3)
    sizes = rng.sample(range(20, 900), 3)
    towns = [
        Town(names.new(TOWN_ENDS), lands[i % 2], rivers[i], sizes[i] * 100 + 10 * i, day_between(rng, 1100, 1800))
        for i in range(3)
    ]
    homes = rng.sample(towns, 3)
    people = [Person(names.new(PERSON_ENDS, FIRST), jobs[i], homes[i], day_between(rng, 1880, 1990)) for i in range(3)]
    return towns, people


def day_between(rng: random.Random, first: int, last: int) -> date:
    return date(first, 1, 1) + timedelta(days=rng.randrange((last - first) * 365))


def facts_text(rng: random.Random, towns: list[Town], people: list[Person]) -> str:
    facts = [f"{t.name} is a town in {t.land} on the river {t.river}." for t in towns]
    facts += [f"{t.name} has {t.people:,} inhabitants and was founded on {spelled(t.founded)}." for t in towns]
    facts += [f"{p.name}, {article(p.job)} {p.job}, was born in {p.home.name} on {p.born.isoformat()}." for p in people]
    return " ".join(rng.sample(facts, len(facts)))


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def questions(rng: random.Random, towns: list[Town], people: list[Person]) -> Iterator[Question]:
    person, town = rng.choice(people), rng.choice(towns)
    last = person.name.split()[1]
    yield Question(f"In which town was the {person.job} born?", person.home.name)
    yield Question(f"In which country was {person.name} born?", person.home.land)
    yield Question(f"Who was born in the town on the river {person.home.river}?", person.name, aliases=(last,))
    yield Question(f"What is the profession of the person born in {person.home.name}?", person.job)
    yield Question(
        f"How many inhabitants does the birthplace of {person.name} have?", str(person.home.people), "number"
    )
    one, other = rng.sample(towns, 2)
    yield Question(
        f"How many more inhabitants does the larger of {one.name} and {other.name} have than the smaller?",
        str(abs(one.people - other.people)),
        "number",
    )
    yield Question(f"On which day was {town.name} founded?", town.founded.isoformat(), "date")
    yield Question(f"On which day was the {person.job} born?", person.born.isoformat(), "date")
    oldest = min(people, key=lambda p: p.born)
    yield Question("Which of the three people was born first?", oldest.name, aliases=(oldest.name.split()[1],))
    largest = max(towns, key=lambda t: t.people)
    yield Question(
        "On which river is the town with the most inhabitants?", largest.river, aliases=(f"river {largest.river}",)
    )


def task(rng: random.Random, names: Names) -> dict[str, Any]:
    towns, people = world(rng, names)
    question = rng.choice(list(questions(rng, towns, people)))
    text = PROMPT.format(facts=facts_text(rng, towns, people), question=question.text, form=FORMS[question.kind])
    return task_row(
        "qa_short_agent",
        {"input": text},
        expected_answer=question.answer,
        aliases=list(question.aliases),
        answer_kind=question.kind,
    )


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    names = Names(rng)
    write_splits(folder, [task(rng, names) for _ in range(TRAIN + VALIDATION)], VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
