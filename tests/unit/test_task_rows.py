"""Rows for scripts that generate an environment's data."""

import json
from pathlib import Path

import pytest

from ngym.files import task_rows


def test_draws_are_distinct_in_the_order_of_their_first_appearance() -> None:
    items = iter(["b", None, "a", "b", "a", "c", "d"])
    assert task_rows.draw_distinct(3, lambda _: next(items), str) == ["b", "a", "c"]
    assert next(items) == "d"


def test_draws_receive_how_many_there_are() -> None:
    assert task_rows.draw_distinct(3, lambda count: 10 * count, str) == [0, 10, 20]


def test_draws_that_bring_nothing_new_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_rows, "MAX_DRAWS", 50)
    with pytest.raises(ValueError, match="50 draws in a row brought nothing new: 2 of 3 are there"):
        task_rows.draw_distinct(3, lambda count: min(count, 1), str)


@pytest.mark.parametrize("gold", [None, [{"n": 9}]])
def test_the_splits_of_rows(tmp_path: Path, gold: list[dict[str, int]] | None) -> None:
    rows = [task_rows.task_row("solver", {"input": str(number)}, n=number) for number in range(5)]
    task_rows.write_splits(tmp_path, rows, validation=2, examples=1, gold=gold)
    read = {
        file.stem: [json.loads(line)["n"] for line in file.read_text().splitlines()]
        for file in tmp_path.glob("*.jsonl")
    }
    expected = {"train": [2, 3, 4], "validation": [0, 1], "example": [0]}
    assert read == (expected if gold is None else {**expected, "gold": [9]})
    assert task_rows.prompt_of(rows[3]) == "3" and rows[3]["agent_ref"]["name"] == "solver"
