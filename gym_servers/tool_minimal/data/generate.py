"""Questions about a shop whose least number of calls is known; each question has a world of its own.

python data/tool_minimal/generate.py [FOLDER]  # train, validation, example and gold.jsonl; default: here
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, output_folder, task_row, write_splits
from ngym.services.base.app import load

HERE = Path(__file__).resolve().parent
server = load(HERE.parent / "app.py")
SEED = 2026
TRAIN, VALIDATION, EXAMPLES, GOLD = 160, 40, 5, 24
INSTRUCTIONS = (
    "Use as few tool calls as possible: each one costs, and a question may need none. Give the answer in the last line."
)


class Question(NamedTuple):
    """calls: the shortest way to know `needs`, which is what the answer rests on."""

    text: str
    answer: int | str
    needs: list[str]
    calls: list[tuple[str, str]]


def no_call(rng: random.Random, shop: Any) -> Question:
    ware, boxes, each = rng.choice(list(shop.wares.values())), rng.randint(3, 40), rng.randint(3, 60)
    spare = rng.randint(1, 30)
    text = rng.choice(
        (
            f"We pack {each} of the {ware.name} into a box and have {boxes} full boxes and {spare} loose ones. How many pieces is that?",
            f"A customer ordered {boxes} boxes of the {ware.name}, {each} pieces each, and {spare} single pieces. How many pieces in all?",
        )
    )
    return Question(text, boxes * each + spare, [], [])


def of_sku(rng: random.Random, shop: Any) -> Question:
    ware, column = rng.choice(list(shop.wares.values())), rng.choice(("price", "stock"))
    words = {"price": "What does {} cost?", "stock": "How many pieces of {} are in stock?"}[column]
    return Question(words.format(ware.sku), getattr(ware, column), [f"{column} {ware.sku}"], [("get_ware", ware.sku)])


def of_name(rng: random.Random, shop: Any) -> Question:
    ware, column = rng.choice(list(shop.wares.values())), rng.choice(("price", "stock"))
    words = {"price": "What does the {} cost?", "stock": "How many pieces of the {} do we have?"}[column]
    calls = [("find_ware", ware.name), ("get_ware", ware.sku)]
    return Question(words.format(ware.name), getattr(ware, column), [f"{column} {ware.sku}"], calls)


def two_skus(rng: random.Random, shop: Any) -> Question:
    first, second = rng.sample(list(shop.wares.values()), 2)
    text = f"What do one {first.sku} and one {second.sku} cost together?"
    calls = [("get_ware", first.sku), ("get_ware", second.sku)]
    return Question(text, first.price + second.price, [f"price {first.sku}", f"price {second.sku}"], calls)


def aisle(rng: random.Random, shop: Any) -> Question:
    shelf = rng.choice(list(shop.wares.values())).aisle
    prices = [ware.price for ware in shop.wares.values() if ware.aisle == shelf]
    what, answer = rng.choice(
        (
            ("What is the lowest price in aisle {}?", min(prices)),
            ("What is the highest price in aisle {}?", max(prices)),
            ("What would one of each ware in aisle {} cost together?", sum(prices)),
        )
    )
    return Question(what.format(shelf), answer, [f"aisle {shelf}"], [("list_aisle", shelf)])


def same_supplier(rng: random.Random, shop: Any) -> Question:
    ware = rng.choice(list(shop.wares.values()))
    total = sum(other.stock for other in shop.wares.values() if other.supplier_id == ware.supplier_id)
    text = f"How many pieces do we have in stock of all wares that come from the supplier of {ware.sku}, {ware.sku} included?"
    needs = [f"supplier {ware.sku}", f"supplied {ware.supplier_id}"]
    return Question(text, total, needs, [("get_ware", ware.sku), ("list_supplied", ware.supplier_id)])


def supplier(rng: random.Random, shop: Any) -> Question:
    ware = rng.choice(list(shop.wares.values()))
    firm = shop.suppliers[ware.supplier_id]
    by_name = rng.random() < 0.5
    what, answer, fact = rng.choice(
        (
            ("In which city is the supplier of {}?", firm.city, "city"),
            ("What is the lead time, in days, of the supplier of {}?", firm.lead_days, "lead"),
        )
    )
    calls = [("get_ware", ware.sku), ("get_supplier", firm.supplier_id)]
    if by_name:
        calls.insert(0, ("find_ware", ware.name))
    named = f"the {ware.name}" if by_name else ware.sku
    needs = [f"supplier {ware.sku}", f"{fact} {firm.supplier_id}"]
    return Question(what.format(named), answer, needs, calls)


def freight(rng: random.Random, shop: Any) -> Question:
    ware = rng.choice(list(shop.wares.values()))
    firm = shop.suppliers[ware.supplier_id]
    text = f"What is the freight from the city of the supplier of {ware.sku}?"
    needs = [f"supplier {ware.sku}", f"city {firm.supplier_id}", f"freight {firm.city}"]
    calls = [("get_ware", ware.sku), ("get_supplier", firm.supplier_id), ("get_freight", firm.city)]
    return Question(text, shop.freight[firm.city], needs, calls)


KINDS = (no_call, of_sku, of_name, two_skus, aisle, same_supplier, supplier, freight)


def row(question: Question, world: int) -> dict[str, Any]:
    return task_row(
        "tool_minimal_agent",
        {"input": question.text, "instructions": INSTRUCTIONS},
        world=world,
        needs=question.needs,
        minimal_calls=len(question.calls),
        expected_answer=str(question.answer),
    )


def cases(question: Question, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The shortest way; one call too many; the answer without looking."""
    calls = [[tool, {server.TOOLS[tool]: key}] for tool, key in question.calls]
    own = {key: value for key, value in task.items() if key not in ("responses_create_params", "agent_ref")}
    text = f"It is {question.answer}."
    shortest = {
        "case": f"shortest: {question.text}",
        "calls": calls,
        "text": text,
        "task": own,
        "expect": {"reward": 1.0},
    }
    if not calls:
        return [shortest]
    twice = 0.6 + 0.4 * (len(calls) + 1) / (len(calls) + 2)
    return [
        shortest,
        {
            **shortest,
            "case": f"one call twice: {question.text}",
            "calls": [*calls, calls[0]],
            "expect": {"reward": twice},
        },
        {**shortest, "case": f"guessed: {question.text}", "calls": [], "expect": {"reward": 0.0, "right": True}},
    ]


def main(folder: Path) -> None:
    rng = random.Random(SEED)

    def one(count: int) -> tuple[Question, int]:
        number = rng.randrange(10**9)
        return KINDS[count % len(KINDS)](rng, server.world(number)), number

    questions = draw_distinct(TRAIN + VALIDATION, one, lambda pair: pair[0].text)
    rng.shuffle(questions)
    rows = [row(*pair) for pair in questions]
    gold = [case for (question, _), task in zip(questions[:GOLD], rows, strict=False) for case in cases(question, task)]
    write_splits(folder, rows, VALIDATION, EXAMPLES, gold)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
