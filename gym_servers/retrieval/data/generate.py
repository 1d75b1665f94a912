"""Questions whose answer is in one to three documents of a library; each question has its own library.

python data/retrieval/generate.py [FOLDER]  # train, validation, example and gold.jsonl; default: here
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, output_folder, task_row, write_splits
from ngym.services.base.app import load

HERE = Path(__file__).resolve().parent
server = load(HERE.parent / "app.py")
SEED = 2026
TRAIN, VALIDATION, EXAMPLES, GOLD = 160, 40, 5, 16
INSTRUCTIONS = (
    "Answer from the library only: search it and open documents. Say in short sentences what you found, each with the document that it "
    "stands in, such as [d123]. Cite no document that the answer does not rest on. End with a line: Answer: ..."
)

# What is asked, and the facts that lead there, from what the question names to the answer.
CHAINS = {
    "Who founded {}?": ("founder",),
    "In which town was {} born?": ("birthplace",),
    "On which river is the town of {}?": ("river",),
    "Who is the mayor of the town in which {} has its seat?": ("seat", "mayor"),
    "In which year was the founder of {} born?": ("founder", "born"),
    "In which year was the town founded in which {} was born?": ("birthplace", "founded"),
    "In which town is the seat of the company that {} works for?": ("employer", "seat"),
    "How many employees does the company have that {} works for?": ("employer", "staff"),
    "On which river is the town in which the founder of {} was born?": ("founder", "birthplace", "river"),
    "In which year was the mayor of the town in which {} has its seat born?": ("seat", "mayor", "born"),
    "Who is the mayor of the town in which the company that {} works for has its seat?": ("employer", "seat", "mayor"),
    "In which year was the company founded that the mayor of {} works for?": ("mayor", "employer", "year"),
}


class Question(NamedTuple):
    text: str
    facts: list[Any]

    @property
    def answer(self) -> str:
        return str(self.facts[-1].value)


def draw(rng: random.Random, shelf: Any, words: str) -> Question:
    relations = CHAINS[words]
    subject = rng.choice([name for name, relation in shelf.facts if relation == relations[0]])
    start, facts = subject, []
    for relation in relations:
        facts.append(shelf.facts[subject, relation])
        subject = facts[-1].value
    return Question(words.format(start), facts)


def row(question: Question, library: int) -> dict[str, Any]:
    params = {"input": question.text, "instructions": INSTRUCTIONS}
    support = sorted({fact.doc_id for fact in question.facts})
    return task_row("retrieval_agent", params, library=library, expected_answer=question.answer, support=support)


def cases(question: Question, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Found and cited; nothing opened; not cited; another answer."""
    own = {key: task[key] for key in ("library", "expected_answer", "support")}
    opened = [["open_document", {"doc_id": doc_id}] for doc_id in own["support"]]
    answer_text = " ".join(
        f"The document about {fact.subject} leads to {fact.value}. [{fact.doc_id}]" for fact in question.facts
    )
    text = f"{answer_text}\n\nAnswer: {question.answer}"
    claims = {"claims": len(question.facts), "unsupported_claims": 0}
    return [
        {"case": f"gold: {question.text}", "task": own, "calls": opened, "text": text, "expect": {"reward": 1.0, **claims}},
        {"case": f"nothing opened: {question.text}", "task": own, "text": text, "expect": {"reward": 0.6}},
        {"case": f"not cited: {question.text}", "task": own, "calls": opened, "text": f"Answer: {question.answer}", "expect": {"reward": 0.6}},
        {"case": f"wrong: {question.text}", "task": own, "calls": opened, "text": f"{answer_text}\nAnswer: 42", "expect": {"reward": 0.0}},
    ]  # fmt: skip


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    chains = itertools.cycle(CHAINS)

    def one(_: int) -> tuple[Question, int]:
        library = rng.randrange(10**9)
        return draw(rng, server.library(library), next(chains)), library

    questions = draw_distinct(TRAIN + VALIDATION, one, lambda pair: pair[0].text)
    rng.shuffle(questions)
    rows = [row(*pair) for pair in questions]
    gold = [case for (question, _), task in zip(questions[:GOLD], rows, strict=False) for case in cases(question, task)]
    write_splits(folder, rows, VALIDATION, EXAMPLES, gold)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
