"""Changes in the rollouts of learning.py: shares of the sampled attempts at held-out tasks, before and after GRPO.

    python benchmarks/learning_habits.py runs/learning [LESSON ...]

The first figures are those of all seeds together; behind them those of each seed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from ngym.files.jsonl import read
from ngym.schema import Json

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")  # of tic-tac-toe: squares by place
Measure = Callable[[Json], float | bool | None]
"""Of one rollout; None: it does not count."""


def calls(row: Json) -> list[Json]:
    return [item for item in row["response"]["output"] if item.get("type") == "function_call"]


def tool_names(row: Json) -> set[str]:
    return {call["name"] for call in calls(row)}


def arguments(call: Json) -> Json:
    try:
        parsed = json.loads(call["arguments"])
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def moves(row: Json) -> list[str]:
    """The texts of the policy's messages."""
    messages = [item for item in row["response"]["output"] if item.get("role") == "assistant"]
    return ["".join(part.get("text", "") for part in item["content"]) for item in messages]


def boards(row: Json) -> list[str]:
    """The nine squares of tic-tac-toe before each move: X, O, or a free square's number."""
    observations = [str(item["content"]) for item in row["response"]["output"] if item.get("role") == "user"]
    return ["".join("".join(board.split("\n\n")[-1].splitlines()[-3:]).split()) for board in observations]


def illegal(row: Json) -> float:
    """The share of the moves that are not a free square."""
    pairs = zip(boards(row), moves(row), strict=False)
    return fmean(move.strip() not in re.findall(r"\d", board) for board, move in pairs)


def completing(board: str, mark: str) -> set[str]:
    """The free squares that give this mark three in a line."""
    return {
        square
        for line in LINES
        for square in board
        if square.isdigit() and sorted(board[int(i)] for i in line) == sorted(mark * 2 + square)
    }


def completion_share(row: Json, mark: str) -> float | None:
    """The share of the squares that complete a line of this mark that the policy takes."""
    pairs = [(completing(board, mark), move.strip()) for board, move in zip(boards(row), moves(row), strict=False)]
    hits = [move in squares for squares, move in pairs if squares]
    return fmean(hits) if hits else None


def text(row: Json) -> str:
    return moves(row)[-1] if moves(row) else ""


def question(row: Json) -> str:
    prompt = row["responses_create_params"]["input"]
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def right(row: Json) -> bool:
    return row["reward"] == 1.0


def among(chosen: Callable[[Json], bool], measure: Measure) -> Measure:
    """The measure of the rollouts that are chosen."""
    return lambda row: measure(row) if chosen(row) else None


def orders(count: int | None) -> Callable[[Json], bool]:
    """Of counter: orders to add a number `count` times; 0: any number of times; None: those that name each change."""

    def chosen(row: Json) -> bool:
        repeated = re.search(r"to it (\d+) times", question(row))
        if repeated is None or count is None:
            return repeated is None and count is None
        return count in (0, int(repeated[1]))

    return chosen


def kind(name: str) -> Callable[[Json], bool]:
    return lambda row: row["kind"] == name


def order_of(tool: str) -> Callable[[Json], bool]:
    """Complete orders for this tool."""
    return lambda row: row["kind"] == "single" and row["expected_calls"][0]["name"] == tool


def instruction(name: str) -> Callable[[Json], bool]:
    return lambda row: row["instruction_id_list"] == [name]


def length(row: Json) -> float:
    """Words, of those of the first reference."""
    return len(text(row).split()) / len(row["references"][0].split())


def city(row: Json) -> str:
    return next((str(arguments(call).get("city", "")) for call in calls(row)), "")


def wrong_city(row: Json) -> bool:
    return bool(calls(row)) and city(row) != row["expected_city"]


def both(row: Json) -> bool:
    return {"get_ware", "get_supplier"} <= tool_names(row)


def is_number(row: Json) -> bool:
    return str(row["expected_answer"]).isdigit()


HABITS: dict[str, dict[str, Measure]] = {
    "calculator": {"calls the tool": lambda row: bool(calls(row))},
    "counter": {
        "orders that name each change: right": among(orders(None), right),
        "to add a number several times: right": among(orders(0), right),
        **{f"to add {count} times: right": among(orders(count), right) for count in (2, 3, 4, 5)},
        **{f"to add {count} times: calls": among(orders(count), lambda row: len(calls(row))) for count in (2, 3, 4, 5)},
    },
    "tool_minimal": {
        "calls both tools": both,
        "reads reviews": lambda row: "get_reviews" in tool_names(row),
        "cities: right": among(lambda row: not is_number(row), right),
        "lead times: right": among(is_number, right),
        "lead times after both calls: right": among(lambda row: is_number(row) and both(row), right),
    },
    "function_call": {
        "complete orders: answered by a call": among(kind("single"), lambda row: bool(calls(row))),
        "complete orders: right": among(kind("single"), right),
        **{
            f"complete orders, {tool}: right": among(order_of(tool), right)
            for tool in ("book_table", "monthly_payment", "plan_route")
        },
        "something is missing: right": among(kind("missing"), right),
    },
    "instruction_following": {
        f"{name}: right": among(instruction(name), right)
        for name in (
            "keywords:existence",
            "startend:end_checker",
            "startend:quotation",
            "detectable_format:title",
            "detectable_content:postscript",
        )
    },
    "letters": {"the rewarded letter": lambda row: row["reward"]},
    "weather": {
        "calls the tool": lambda row: bool(calls(row)),
        "calls it with the right city": lambda row: city(row) == row["expected_city"],
        "wrong cities: right initial": among(wrong_city, lambda row: city(row)[:1] == row["expected_city"][0]),
    },
    "safety": {
        "harmful requests: right": among(kind("refuse"), right),
        "harmless requests: right": among(kind("answer"), right),
    },
    "translation": {
        "as many words as the reference": lambda row: length(row) == 1,
        "more words": lambda row: length(row) > 1,
        "words, of the reference's": length,
    },
    "blackjack": {"first move: another card": lambda row: "hit" in moves(row)[0]},
    "tic_tac_toe": {
        "won": right,
        "drawn": lambda row: row["reward"] == 0.5,
        "moves": lambda row: len(moves(row)),
        "moves: illegal": illegal,
        "takes a winning square": lambda row: completion_share(row, "X"),
        "blocks": lambda row: completion_share(row, "O"),
    },
}


def attempts(folder: Path) -> tuple[list[Json], list[Json]]:
    """The sampled attempts at held-out tasks of the first and the last evaluation."""
    by_step: dict[int, list[Json]] = {}
    for line in read(folder / "grpo" / "eval_rollouts.jsonl"):
        if "/avg@" in line.row["evaluation"] and line.row["reward"] is not None:
            by_step.setdefault(int(line.row["ng"]["run_id"].split("-")[1]), []).append(line.row)
    return by_step[min(by_step)], by_step[max(by_step)]


def mean(measure: Measure, rows: list[Json]) -> float | None:
    values = [value for row in rows if (value := measure(row)) is not None]
    return fmean(values) if values else None


def lines(folder: Path, lesson: str) -> Iterator[str]:
    seeds = [attempts(run) for run in sorted(folder.glob(f"{lesson}-*"))]
    for name, measure in HABITS[lesson].items():
        together = [mean(measure, [row for seed in seeds for row in seed[when]]) for when in (0, 1)]
        each = ", ".join(
            f"{format_value(mean(measure, before))} to {format_value(mean(measure, after))}" for before, after in seeds
        )
        yield f"  {name}: {format_value(together[0])} to {format_value(together[1])}  ({each})"


def format_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(folder: Path, lessons: list[str]) -> None:
    for lesson in lessons or [name for name in HABITS if list(folder.glob(f"{name}-*"))]:
        print(lesson)
        for line in lines(folder, lesson):
            print(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
