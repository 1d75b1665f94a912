"""long_context: questions about needles, chains of variables, counts and final states in a generated document.

A page is generated when it is read, in time that does not depend on the document's length.

    needle     many gates with codes; asks for the code of one
    variables  chains of copies; asks which variables have one value
    counting   couriers from several towns; asks how many came from one
    state      a key that is moved between rooms; asks where it is at the end
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, model_validator

from ngym import ServiceOptions, Session, ToolError, VerifyRequest, gym_server
from ngym.grading.answers import short
from ngym.grading.reward_parts import Shaping, shaped
from ngym.grading.text_match import exact
from ngym.schema import Json
from ngym.stats import means_by

Kind = Literal["needle", "variables", "counting", "state"]
KINDS: tuple[Kind, ...] = ("needle", "variables", "counting", "state")
SENTENCES_A_PAGE = 16
COLOURS = [
    "amber", "azure", "black", "blue", "bronze", "brown", "copper", "crimson", "golden", "green", "grey", "indigo",
    "ivory", "olive", "orange", "purple", "red", "silver", "violet", "white",
]  # fmt: skip
THINGS = ["gate", "tower", "bridge", "door", "vault", "tunnel", "stair", "lift", "hatch", "bunker"]
TOWNS = ["Lima", "Oslo", "Kyoto", "Accra", "Quito", "Turin", "Perth", "Hanoi", "Leeds", "Izmir"]
ROOMS = [
    "attic", "cellar", "kitchen", "library", "stable", "pantry", "workshop", "chapel", "laundry", "study",
    "greenhouse",
]  # fmt: skip
WHO = (
    "The gardener", "A neighbour", "The old clerk", "Somebody", "The baker", "A traveller", "The twins",
    "The captain",
)  # fmt: skip
DID = ("looked at", "painted", "forgot", "described", "bought", "repaired", "carried", "sold", "measured", "cleaned")
WHAT = (
    "a bench", "two chairs", "the fence", "a lantern", "some rope", "a clock", "the old map", "a kettle",
    "three boxes", "a drum",
)  # fmt: skip
WHEN = (
    "in the morning", "before lunch", "at dusk", "on the way home", "without a word", "in the rain", "once more",
    "for a friend",
)  # fmt: skip


class DocumentSpec(NamedTuple):
    kind: Kind
    seed: int
    pages: int
    facts: int


class Document:
    def __init__(self, spec: DocumentSpec) -> None:
        self.spec = spec

    @property
    def question(self) -> str:
        return self._plan[0]

    @property
    def answer(self) -> str:
        return self._plan[1]

    def page(self, page: int) -> str:
        """The text of a page, counted from 1."""
        rng = self._rng(f"page {page}")
        sentences = [
            f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHAT)} {rng.choice(WHEN)}."
            for _ in range(SENTENCES_A_PAGE)
        ]
        facts = self._place.get(page, [])
        places = sorted(rng.randrange(len(sentences) + 1) for _ in facts)
        for place, fact in reversed(list(zip(places, facts, strict=True))):
            sentences.insert(place, fact)
        return f"Page {page} of {self.spec.pages}. {' '.join(sentences)}"

    def _rng(self, use: str) -> random.Random:
        return random.Random(f"{self.spec.seed} {self.spec.kind} {self.spec.pages} {self.spec.facts} {use}")

    @cached_property
    def _plan(self) -> tuple[str, str, list[str]]:
        """The question, the answer, and the facts in the order of the document."""
        rng = self._rng("plan")
        return {"needle": needle, "variables": variables, "counting": counting, "state": state}[self.spec.kind](
            rng, self.spec.facts
        )

    @cached_property
    def _place(self) -> dict[int, list[str]]:
        rng = self._rng("places")
        facts = self._plan[2]
        placed: dict[int, list[str]] = defaultdict(list)
        for page, fact in zip(sorted(rng.randint(1, self.spec.pages) for _ in facts), facts, strict=True):
            placed[page].append(fact)
        return placed


def needle(rng: random.Random, facts: int) -> tuple[str, str, list[str]]:
    gates = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], facts)
    codes = [str(code) for code in rng.sample(range(10_000, 100_000), facts)]
    sentences = [f"The code of the {gate} is {code}." for gate, code in zip(gates, codes, strict=True)]
    number = rng.randrange(facts)
    return f"What is the code of the {gates[number]}?", codes[number], sentences


def variables(rng: random.Random, facts: int) -> tuple[str, str, list[str]]:
    names = rng.sample([f"{a}{b}{n}" for a in "BCDFGHKM" for b in "PQRSTVWX" for n in range(10)], facts)
    values = [str(value) for value in rng.sample(range(10_000, 100_000), 2)]
    chains: tuple[list[str], list[str]] = ([], [])
    sentences = []
    for place, name in enumerate(names):
        side = place % 2 if place < 2 else rng.randrange(2)
        source = rng.choice(chains[side]) if chains[side] else ""
        sentences.append(f"Variable {name} is set to {f'the value of variable {source}' if source else values[side]}.")
        chains[side].append(name)
    return f"Which variables have the value {values[0]}? Name all of them.", ", ".join(chains[0]), sentences


def counting(rng: random.Random, facts: int) -> tuple[str, str, list[str]]:
    towns = rng.sample(TOWNS, 3)
    visits = [towns[0]] * rng.randint(facts // 4, facts // 2)
    visits += rng.choices(towns[1:], k=facts - len(visits))
    rng.shuffle(visits)
    count = visits.count(towns[0])
    return (
        f"How many couriers came from {towns[0]}?",
        str(count),
        [f"A courier from {town} came to the house." for town in visits],
    )


def state(rng: random.Random, facts: int) -> tuple[str, str, list[str]]:
    rooms = [rng.choice(ROOMS)]
    while len(rooms) < facts:
        rooms.append(rng.choice([room for room in ROOMS if room != rooms[-1]]))
    sentences = [f"The {rng.choice(('key', 'key', 'lamp'))} was brought to the {room}." for room in rooms]
    sentences[-2] = f"The key was brought to the {rooms[-2]}."
    keys = [room for room, fact in zip(rooms, sentences, strict=True) if fact.startswith("The key")]
    return "In which room is the key at the end?", keys[-1], sentences


def variables_in(text: str) -> frozenset[str]:
    """The variables that a text names."""
    return frozenset(re.findall(r"\b[A-Z]{2}\d\b", text))


class LongOptions(ServiceOptions):
    shaping: Shaping = Shaping()


class LongTask(VerifyRequest):
    kind: Kind
    seed: int
    pages: int = Field(ge=2, le=100_000)  # about 140 words each
    facts: int = Field(default=12, ge=4, le=200)  # relevant sentences and distractors

    @property
    def document(self) -> Document:
        return Document(DocumentSpec(self.kind, self.seed, self.pages, self.facts))

    @model_validator(mode="after")
    def _can_be_made(self) -> LongTask:
        if self.seed < 0:
            raise ValueError("seed must be 0 or more")
        return self


class ReadPage(BaseModel):
    page: int = Field(description="Which page, counted from 1.")


async def read_page(body: ReadPage, session: Session) -> str:
    """Read one page of the document."""
    if "document" not in session:
        session["document"] = LongTask.model_validate({**session["task"], "response": {}}).document
    document: Document = session["document"]
    if not 1 <= body.page <= document.spec.pages:
        raise ToolError(f"there is no page {body.page}; the pages are 1 to {document.spec.pages}")
    return document.page(body.page)


async def verify(task: LongTask, options: LongOptions) -> dict[str, Any]:
    expected = task.document.answer
    answer: Any
    if task.kind == "variables":
        answer = variables_in(short(task.text) or "")
        right = answer == variables_in(expected)
        answer = sorted(answer)
    elif task.kind == "state":
        answer = short(task.text)
        right = answer is not None and exact(answer, [expected, f"in the {expected}", f"the key is in the {expected}"])
    else:
        numbers = re.findall(r"\d[\d,]*", short(task.text) or "")
        answer = numbers[0].replace(",", "").strip(",") if len(numbers) == 1 else None
        right = answer == expected
    outcome = {"reward": float(right), "right": right, "extracted_answer": answer, "expected_answer": expected}
    return shaped(outcome, task.response, options.shaping)


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """The share of right answers by the kind of question, and by the document's pages, in powers of two."""
    sized = [{**row, "length": f"pages<={1 << (row['pages'] - 1).bit_length()}"} for row in rows]
    return {**means_by(rows, "kind", "right"), **means_by(sized, "length", "right")}


app = gym_server(tools=[read_page], verify=verify, options=LongOptions, compute_metrics=compute_metrics)
