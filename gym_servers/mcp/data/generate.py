"""Shopping with the tools of gym_servers/mcp/example_server.py: only they know the prices, so an answer needs them.

python data/mcp/generate.py [FOLDER]  # train, validation, example and gold.jsonl; default: here
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson

from ngym.config.import_path import load_file
from ngym.files.task_rows import assistant_message, draw_distinct, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SHOP = HERE.parent / "example_server.py"
SEED = 2026
TRAIN, VALIDATION, EXAMPLES, GOLD = 120, 30, 5, 6


def task(rng: random.Random, costs: dict[str, int]) -> dict[str, Any]:
    """A basket to fill, or a price to ask for."""
    wares = rng.sample(sorted(costs), rng.randint(1, 3))
    pieces = [rng.randint(2, 12) for _ in wares]
    total = sum(costs[ware] * count for ware, count in zip(wares, pieces, strict=True))
    order = " and ".join(f"{count} x {ware}" for ware, count in zip(wares, pieces, strict=True))
    if rng.random() < 0.3:
        return row(f"What would {order} cost, in cents? Buy nothing.", total)
    calls = [{"name": "put", "arguments": {"ware": w, "pieces": n}} for w, n in zip(wares, pieces, strict=True)]
    return row(f"Put {order} into the basket. What does the basket cost, in cents?", total, calls)


def row(question: str, answer: int, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    params = {"input": f"{question} Give the number in the last line."}
    expected = {"expected_tool_calls": calls} if calls else {}
    return task_row("mcp_agent", params, expected_answer=answer, **expected)


def cases(task: dict[str, Any], is_first: bool) -> list[dict[str, Any]]:
    """As it must be, its calls really made if it is the first; a call twice; none; another answer."""
    own = {key: value for key, value in task.items() if key.startswith("expected")}
    made = own.get("expected_tool_calls", [])
    question, answer = task["responses_create_params"]["input"], own["expected_answer"]
    calls = [[call["name"], call["arguments"]] for call in made]
    outcomes = [("right", made, answer, 1.0), ("another answer", made, answer + 1, 0.0)]
    if made:
        outcomes += [("a call twice", [*made, made[0]], answer, 0.0), ("no call", [], answer, 0.0)]
    return [
        {
            "case": f"{case}: {question}",
            "task": own,
            "output": conversation(case_calls, total),
            "expect": {"reward": reward},
        }
        | ({"calls": calls} if is_first and reward else {})
        for case, case_calls, total, reward in outcomes
    ]


def conversation(made: list[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    """The items of a response: the calls, and what was said last."""
    items: list[dict[str, Any]] = [
        {
            "type": "function_call",
            "call_id": f"c{n}",
            "name": call["name"],
            "arguments": orjson.dumps(call["arguments"]).decode(),
        }
        for n, call in enumerate(made)
    ]
    return [*items, assistant_message(f"It costs {total} cents.")]


def main(folder: Path) -> None:
    rng, costs = random.Random(SEED), load_file(SHOP).PRICES
    tasks = draw_distinct(TRAIN + VALIDATION, lambda _: task(rng, costs), prompt_of)
    gold = [case for place, one in enumerate(tasks[:GOLD]) for case in cases(one, is_first=place == 0)]
    write_splits(folder, tasks, VALIDATION, EXAMPLES, gold)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
