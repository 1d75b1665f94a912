"""Programming tasks as chains of steps over numbers or words; the chain itself says what each test must give.

python data/code_exec/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 120, 30, 5
TESTS, SHOWN = 6, 1
WORDS = (
    "amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron", "indigo", "jasper", "kelp", "lotus",
    "maple", "nectar", "onyx", "pearl", "quartz", "raven", "sable", "tulip", "umber", "violet", "willow", "xenon",
    "yarrow", "zephyr", "level", "noon", "radar", "civic", "kayak", "refer",
)  # fmt: skip


class Step(NamedTuple):
    """A step of a program: its description in words, and its function."""

    text: str
    apply: Callable[[list[Any]], Any]


def unique(items: list[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def runs(items: list[Any]) -> list[Any]:
    results: list[Any] = []
    for item in items:
        if results and results[-1][0] == item:
            results[-1][1] += 1
        else:
            results.append([item, 1])
    return results


def running(items: list[int]) -> list[int]:
    return [sum(items[: end + 1]) for end in range(len(items))]


def anywhere(rng: random.Random) -> list[Step]:
    """Steps for lists of anything that can be ordered."""
    k = rng.randint(2, 4)
    return [
        Step("reverse the order", lambda items: items[::-1]),
        Step("drop all but the first occurrence of each item", unique),
        Step(f"keep only the items at positions 0, {k}, {2 * k}, ...", lambda items: items[::k]),
        Step(f"rotate left by {k} places (an empty list stays empty)",
             lambda items: items[k % len(items) :] + items[: k % len(items)] if items else []),
        Step(f"drop the first {k} items", lambda items: items[k:]),
        Step("drop every item that is equal to the one just before it",
             lambda items: [x for i, x in enumerate(items) if i == 0 or items[i - 1] != x]),
        Step("keep only the items that occur more than once", lambda items: [x for x in items if items.count(x) > 1]),
    ]  # fmt: skip


def numeric(rng: random.Random) -> list[Step]:
    a, t, m = rng.randint(2, 9), rng.randint(-5, 12), rng.randint(3, 7)
    return [
        Step(f"multiply each number by {a}", lambda xs: [a * x for x in xs]),
        Step(f"keep only the numbers greater than {t}", lambda xs: [x for x in xs if x > t]),
        Step(f"replace each number by its remainder modulo {m} (never negative)", lambda xs: [x % m for x in xs]),
        Step("replace the list by its running sums", running),
        Step("replace the list by the differences of neighbours (second minus first, and so on)",
             lambda xs: [b - c for b, c in zip(xs[1:], xs[:-1], strict=True)]),
        Step("sort in ascending order", sorted),
        Step("sort in descending order", lambda xs: sorted(xs, reverse=True)),
        Step(f"drop the multiples of {m}", lambda xs: [x for x in xs if x % m]),
        Step(f"add its position (from 0), times {a}, to each number", lambda xs: [x + a * i for i, x in enumerate(xs)]),
        *anywhere(rng),
    ]  # fmt: skip


def verbal(rng: random.Random) -> list[Step]:
    n, letter = rng.randint(4, 6), rng.choice("aelnr")
    return [
        Step("reverse each word", lambda ws: [w[::-1] for w in ws]),
        Step(f"keep only the words of at least {n} letters", lambda ws: [w for w in ws if len(w) >= n]),
        Step(f"keep only the words that contain the letter '{letter}'", lambda ws: [w for w in ws if letter in w]),
        Step("sort alphabetically", sorted),
        Step("sort by length, words of equal length in their old order", lambda ws: sorted(ws, key=len)),
        Step(f"cut each word to its first {n - 1} letters", lambda ws: [w[: n - 1] for w in ws]),
        Step("move the first letter of each word to its end", lambda ws: [w[1:] + w[:1] for w in ws]),
        *anywhere(rng),
    ]


def number_ends(rng: random.Random) -> list[Step]:
    m = rng.randint(11, 97)
    return [
        Step("the list", list),
        Step(f"the sum modulo {m} (0 for an empty list)", lambda xs: sum(xs) % m),
        Step("the largest minus the smallest (0 for an empty list)", lambda xs: max(xs) - min(xs) if xs else 0),
        Step("how many different items there are", lambda xs: len(set(xs))),
        Step("a list of pairs [item, length], one for each run of equal neighbours", runs),
    ]


def word_ends(rng: random.Random) -> list[Step]:
    sign = rng.choice("-+/")
    return [
        Step("the list", list),
        Step(f"the words joined by '{sign}'", sign.join),
        Step("how many letters the words have together", lambda ws: sum(map(len, ws))),
        Step("a dictionary from each word to how often it occurs", lambda ws: {w: ws.count(w) for w in ws}),
    ]


def numbers(rng: random.Random, longest: int) -> list[Any]:
    return [rng.randint(-9, 20) for _ in range(rng.randint(1, longest))]


def words(rng: random.Random, longest: int) -> list[Any]:
    sample = rng.sample(WORDS, 6)
    return [rng.choice(sample) for _ in range(rng.randint(1, longest))]


def task(rng: random.Random, program: bool) -> dict[str, Any]:
    verbally = rng.random() < 0.4
    item, make = ("word", words) if verbally else ("number", numbers)
    steps = rng.sample((verbal if verbally else numeric)(rng), rng.randint(2, 4))
    end = rng.choice((word_ends if verbally else number_ends)(rng)[: 3 if program else None])
    tests = [make(rng, 12) for _ in range(TESTS)] + ([] if program else [[]])
    outputs = [chain(steps, end, list(test_input)) for test_input in tests]
    step_list = "\n".join(f"{number}. {step.text}" for number, step in enumerate(steps, 1))
    if program:
        question = (
            f"Write a Python program that reads one line of {item}s from standard input, separated by spaces, and "
            f"then:\n{step_list}\nIt prints {end.text}; a list is printed on one line, its items separated by spaces."
        )
        cases: list[dict[str, Any]] = [
            {"stdin": printed(test_input) + "\n", "stdout": printed(value) + "\n"}
            for test_input, value in zip(tests, outputs, strict=True)
        ]
        examples = "\n".join(f"For the input\n{c['stdin']}it prints\n{c['stdout']}".rstrip() for c in cases[:SHOWN])
        kind: dict[str, Any] = {}
    else:
        question = f"Write a Python function solve(items) that takes a list of {item}s and:\n{step_list}\nIt returns {end.text}."
        cases = [{"args": [test_input], "expected": value} for test_input, value in zip(tests, outputs, strict=True)]
        examples = "\n".join(f"solve({c['args'][0]!r}) == {c['expected']!r}" for c in cases[:SHOWN])
        kind = {"function": "solve"}
    prompt = f"{question}\n\n{examples}\n\nGive the code in one ```python block."
    return task_row("code_exec_agent", {"input": prompt}, **kind, cases=cases)


def chain(steps: list[Step], end: Step, items: list[Any]) -> Any:
    for step in steps:
        items = step.apply(items)
    return end.apply(items)


def printed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def tells(row: dict[str, Any]) -> bool:
    """Whether no constant answer passes: its tests want at least three different values."""
    return len({str(case.get("expected", case.get("stdout"))) for case in row["cases"]}) >= 3


def main(folder: Path) -> None:
    rng = random.Random(SEED)

    def draw(_: int) -> dict[str, Any] | None:
        row = task(rng, program=rng.random() < 0.4)
        return row if tells(row) else None

    rows = draw_distinct(TRAIN + VALIDATION, draw, lambda row: prompt_of(row).partition("\n\n")[0])
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
