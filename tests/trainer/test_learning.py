"""`benchmarks/learning.py`: its lessons are valid, and (as a soak test) the tiny policy learns one on held-out
tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from ngym.cli.train import main

LESSONS = sorted(
    {path.stem for path in (Path(__file__).parents[2] / "benchmarks" / "lessons").glob("*.py")} - {"problem", "turns"}
)
GAMES = ("blackjack", "tic_tac_toe")
CONTEXT = 1024


@pytest.fixture
def learning(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    return import_module("learning")


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def questions(written: list[Any]) -> set[str]:
    """The user's first words in task rows and in demonstrations."""
    texts = [row["responses_create_params"]["input"] if "agent_ref" in row else first(row) for row in written]
    return set(texts)


def first(demonstration: Any) -> str:
    return next(message["content"] for message in demonstration["messages"] if message["role"] == "user")


@pytest.mark.parametrize("name", sorted({*LESSONS} - {*GAMES}))
def test_held_out_tasks_share_no_question_with_training_and_demonstrations(
    learning: ModuleType, name: str, tmp_path: Path
) -> None:
    lesson = import_module(f"lessons.{name}").lesson._replace(demonstrations=512)
    learning.write(lesson, tmp_path, seed=0)
    held_out, train, demonstrated = (
        questions(rows(tmp_path / f"{part}.jsonl")) for part in ("held_out", "train", "demonstrations")
    )
    assert len(held_out) == learning.HELD_OUT
    assert not held_out & (train | demonstrated)


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_has_tasks_demonstrations_and_recipes(
    learning: ModuleType, name: str, root: Path, tmp_path: Path
) -> None:
    lesson = import_module(f"lessons.{name}").lesson._replace(demonstrations=64)
    learning.write(lesson, tmp_path, seed=3)
    train, held_out = (rows(tmp_path / f"{part}.jsonl") for part in ("train", "held_out"))
    encoded = [{json.dumps(row, sort_keys=True) for row in part} for part in (train, held_out)]
    assert not encoded[0] & encoded[1] and len(encoded[1]) == learning.HELD_OUT
    assert {row["agent_ref"]["name"] for row in train} == {lesson.agent}

    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    from ngym.trainer.data import chat_dataset

    samples = chat_dataset.read_demonstrations(tmp_path / "demonstrations.jsonl", tokenizer)
    # one segment each: what is said first is a beginning of what is said later, as in rollouts
    assert {len(sample.segments) for sample in samples} == {1}
    assert max(len(sample.segments[0].token_ids) for sample in samples) < CONTEXT

    (tmp_path / "sft" / "policy").mkdir(parents=True)
    for recipe, words in (
        ("sft.yaml", learning.sft_overrides(tmp_path, 3)),
        ("grpo.yaml", learning.grpo_overrides(lesson, tmp_path, 3)),
    ):
        result = CliRunner().invoke(main, [recipe, *words, "--dry-run"])
        assert result.exit_code == 0, result.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_tiny_policy_learns_to_tell_what_to_refuse(root: Path, tmp_path: Path) -> None:
    words = ["safety", "--seed", "5", "--folder", str(tmp_path)]
    subprocess.run([sys.executable, root / "benchmarks" / "learning.py", *words], cwd=tmp_path, check=True)
    (run,) = rows(tmp_path / "results.jsonl")
    before, after = run["held_out"][0], run["held_out"][-1]
    for way in ("sampled", "greedy"):
        assert after[way]["low"] > before[way]["high"] + 0.1, (way, before, after)
