"""Tasks of reasoning-gym: a row is a dataset's name, a seed and an index; of validation none is trained on.

PYTHON data/reasoning_gym/generate.py [FOLDER] [--per-dataset N]

PYTHON: of the server's environment (.ngym/venvs/reasoning_gym-*/bin/python). Writes train, validation, example and gold.jsonl, beside
this script by default; N rows of each dataset for training, 1 by default.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0":  # some tasks depend on the order of sets
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})

from reasoning_gym.factory import DATASETS

from ngym.files.jsonl import write_rows
from ngym.files.task_rows import task_row
from ngym.services.base.app import load

HERE = Path(__file__).resolve().parent
SERVER = HERE.parent
server = load(SERVER / "app.py")
checker = importlib.import_module(f"{server.__name__}.checker")
TRAIN, VALIDATION, GOLD = 2026, 10_000_019, 77  # where seeds begin
EXAMPLES = ("basic_arithmetic", "countdown", "knights_knaves", "mini_sudoku", "rubiks_cube", "word_sorting")
SHOWN_EVERY = 5  # every fifth dataset has a wrong answer in gold.jsonl, too
INSTRUCTIONS = (
    "Think step by step. Then give the final answer alone, as the task asks for it, between <answer> and </answer>."
)


def row(name: str, seed: int) -> dict[str, Any]:
    """The first task of this seed, or of the next one where the right answer is empty, which no model can say."""
    entry = checker.generate_task(name, seed, 0, "{}").entry
    if known(entry) == "":
        return row(name, seed + 1)
    params = {"input": entry["question"], "instructions": INSTRUCTIONS}
    fingerprint = checker.fingerprint(entry)
    return task_row("reasoning_gym_agent", params, dataset=name, seed=seed, fingerprint=fingerprint)


def known(entry: dict[str, Any]) -> str:
    """An answer that is right; three datasets keep it elsewhere."""
    about = entry["metadata"]
    if entry["answer"] is not None:
        return str(entry["answer"])
    if "possible_answer" in about:
        return json.dumps(about["possible_answer"])
    return str(about["example_correct_answer"])


def case(name: str, seed: int) -> dict[str, Any]:
    made = row(name, seed)
    answer = known(checker.generate_task(name, made["seed"], 0, "{}").entry)
    task = {key: made[key] for key in ("dataset", "seed", "fingerprint")}
    return {"case": f"right: {name}", "task": task, "text": f"<answer>{answer}</answer>",
            "expect": {"reward": 1.0, "is_correct": True}}  # fmt: skip


def wrong(right: dict[str, Any]) -> dict[str, Any]:
    return {**right, "case": right["case"].replace("right", "beside the point"), "text": "<answer>no idea</answer>",
            "expect": {"reward": 0.0, "is_correct": False}}  # fmt: skip


def main(folder: Path, per_dataset: int) -> None:
    names = [name for name in sorted(DATASETS) if name not in server.REFUSED]
    gold = [case(name, GOLD) for name in names]
    train = [row(name, TRAIN + number * 100) for number in range(per_dataset) for name in names]
    fingerprints = {line["fingerprint"] for line in train}
    validation = [line for line in (row(name, VALIDATION) for name in names) if line["fingerprint"] not in fingerprints]
    parts = {
        "train": train,
        "validation": validation,
        "example": [row(name, VALIDATION) for name in EXAMPLES],
        "gold": gold + [wrong(right) for right in gold[::SHOWN_EVERY]],
    }
    write_rows(folder, parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE)
    parser.add_argument("--per-dataset", type=int, default=1)
    given = parser.parse_args()
    main(given.folder, given.per_dataset)
