"""Word problems for the calculator, and demonstrations of how to solve them or not; a seed always gives the same bytes.

    python data/calculator/generate.py tasks                        # rewrites the shipped files beside this script
    python data/calculator/generate.py demonstrations --output runs/demonstrations.jsonl --count 7200

The demonstrations are a deliberate mixture. Of those with numbers of two digits, as all tasks have, 40 % call the tool
rightly, 57 % guess a number near the answer without the tool, 3 % call the tool with the wrong operation. A policy
trained on them can do everything that the task needs and prefers a bad habit, so that reinforcement learning has
something to discover. A fifth multiplies a number of three digits by one digit and always calls the tool. The results
have three or four digits, as the longest of the tasks, and teach to copy these. With results of five and six digits,
the policy copied those of four less surely.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
TASKS_SEED = 2026
VALIDATION, TRAIN, EXAMPLES = 256, 512, 5

GUESSES, WRONG, LARGER = 0.57, 0.03, 0.2
DIGITS_1, DIGITS_2, DIGITS_3 = (2, 9), (10, 99), (100, 999)

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
CALCULATOR = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": PARAMETERS}
RESPONSES_TOOL = {"type": "function", **CALCULATOR, "strict": False}
CHAT_TOOL = {"type": "function", "function": CALCULATOR}

NAMES = ("Tom", "Ana", "Raj", "Mia", "Leo", "Zoe", "Sam", "Eva")
ITEMS = ("apples", "books", "coins", "pens", "stamps", "cards", "shells", "beads")
PHRASINGS = {
    "+": (
        "{name} has {a} {item} and buys {b} more. How many {item} does {name} have?",
        "{name} found {a} {item} on Monday and {b} on Friday. How many {item} in total?",
        "There are {a} {item} in a box and {b} on a desk. How many {item} altogether?",
    ),
    "-": (
        "{name} had {a} {item} and gave away {b}. How many {item} are left?",
        "Of {a} {item}, {name} lost {b}. How many {item} remain?",
        "{name} has {a} {item}. {b} of them are sold. How many {item} does {name} still have?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {item} each. How many {item} is that?",
        "Each of {a} bags holds {b} {item}. How many {item} does {name} have?",
        "{name} packs {a} crates with {b} {item} in each. How many {item} are packed?",
    ),
}


class Sum(NamedTuple):
    """The numbers of a problem: two of two digits, or one of three times one digit."""

    a: int
    operation: str
    b: int

    @property
    def expression(self) -> str:
        return f"{self.a}{self.operation}{self.b}"

    @property
    def value(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operation]

    @property
    def ordered(self) -> Sum:
        """The same for 37+58 and 58+37."""
        return Sum(max(self.a, self.b), self.operation, min(self.a, self.b))


class Problem(NamedTuple):
    """A sum of two numbers and the words around it."""

    sum: Sum
    question: str


def problems(rng: random.Random, without: frozenset[Sum] = frozenset(), larger: float = 0.0) -> Iterator[Problem]:
    """Random problems without end, none of them on the sums `without`, however they are phrased.

    larger: the share that multiplies a number of three digits by one digit; the others have numbers of two digits.
    """
    while True:
        operation = rng.choice("+-*")
        first = second = DIGITS_2
        if larger and rng.random() < larger:
            operation, first, second = "*", DIGITS_3, DIGITS_1
        a, b = rng.randint(*first), rng.randint(*second)
        if operation == "-" and b > a:
            a, b = b, a
        words = rng.choice(PHRASINGS[operation])
        question = words.format(name=rng.choice(NAMES), item=rng.choice(ITEMS), a=a, b=b)
        problem = Problem(Sum(a, operation, b), question)
        if problem.sum.ordered not in without:
            yield problem


def take(count: int, source: Iterable[Problem]) -> list[Problem]:
    """The first `count` problems with different questions."""
    problems: dict[str, Problem] = {}
    for problem in source:
        problems.setdefault(problem.question, problem)
        if len(problems) == count:
            break
    return list(problems.values())


def validation_problems() -> list[Problem]:
    return take(VALIDATION, problems(random.Random(f"{TASKS_SEED} validation")))


def held_out_sums() -> frozenset[Sum]:
    return frozenset(problem.sum.ordered for problem in validation_problems())


def task(problem: Problem) -> dict[str, Any]:
    """A task row (wire format, section 2)."""
    return {
        "responses_create_params": {"input": problem.question, "tools": [RESPONSES_TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": "calculator_agent"},
        "expected_answer": str(problem.sum.value),
    }


def demonstration(problem: Problem, rng: random.Random, wrong: float = WRONG) -> dict[str, Any]:
    """One conversation of the mixture (wire format, section 5)."""
    fate, uses_tool = rng.random(), 1 - GUESSES - wrong
    if fate < uses_tool or problem.sum.a >= DIGITS_3[0]:
        output = _with_tool(problem.sum)
    elif fate < uses_tool + GUESSES:
        near = max(1, abs(problem.sum.value) // 5)
        output = [_answer(problem.sum.value + rng.randint(-near, near))]
    else:
        output = _with_tool(
            problem.sum._replace(operation=rng.choice([x for x in "+-*" if x != problem.sum.operation]))
        )
    return {"messages": [{"role": "user", "content": problem.question}, *output], "tools": [CHAT_TOOL]}


def demonstrations(count: int, seed: int, larger: float = LARGER, wrong: float = WRONG) -> Iterator[dict[str, Any]]:
    """Conversations on problems whose sums are in no validation task."""
    rng = random.Random(f"{seed} demonstrations")
    for problem in take(count, problems(rng, held_out_sums(), larger)):
        yield demonstration(problem, rng, wrong)


def _with_tool(sum_: Sum) -> list[dict[str, Any]]:
    arguments = json.dumps({"expression": sum_.expression})
    call = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": str(sum_.value)},
        _answer(sum_.value),
    ]


def _answer(value: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"The answer is {value}."}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A whole JSONL file or none: a run that is stopped leaves no half file under this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    aside.replace(path)


def write_tasks(folder: Path) -> None:
    """train.jsonl, validation.jsonl and example.jsonl (the first validation tasks)."""
    held_out = validation_problems()
    train = take(TRAIN, problems(random.Random(f"{TASKS_SEED} train"), held_out_sums()))
    write(folder / "train.jsonl", map(task, train))
    write(folder / "validation.jsonl", map(task, held_out))
    write(folder / "example.jsonl", map(task, held_out[:EXAMPLES]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="write train.jsonl, validation.jsonl and example.jsonl")
    tasks.add_argument("--folder", type=Path, default=HERE)
    subparser = commands.add_parser("demonstrations", help="write conversations for supervised fine-tuning")
    subparser.add_argument("--output", type=Path, required=True)
    subparser.add_argument("--count", type=int, default=7200)
    subparser.add_argument("--seed", type=int, default=0)
    subparser.add_argument("--larger", type=float, default=LARGER, help="the share with a number of three digits")
    subparser.add_argument("--wrong", type=float, default=WRONG, help="the share of wrong operations among the others")
    arguments = parser.parse_args()
    if arguments.command == "tasks":
        write_tasks(arguments.folder)
    else:
        rows = demonstrations(arguments.count, arguments.seed, arguments.larger, arguments.wrong)
        write(arguments.output, rows)


if __name__ == "__main__":
    main()
