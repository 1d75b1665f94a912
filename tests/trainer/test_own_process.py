"""`ng_train` in a process of its own, with the options of docs/training.md.

The other tests fork from a process that has imported all of torch, which hides what ng_train does not import.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_model import SHAPE
from trainer_service import new_policy

Row = dict[str, Any]
FEW = ["max_steps=2", "batch_size=4", "output=run"]


def question(number: int) -> list[Row]:
    return [{"role": "user", "content": f"Tom has {number} coins and buys 7 more. How many coins does Tom have?"}]


def answer(text: str) -> list[Row]:
    return [{"role": "assistant", "content": text}]


def rollout(number: int) -> Row:
    draw = random.Random(number)
    segment = {
        "token_ids": [draw.randrange(20, 1000) for _ in range(12)],
        "mask": [[5, 12]],
        "logprobs": [-draw.random() for _ in range(7)],
        "policy_version": [[5, 12, 0]],
    }
    parts = {"right": float(number % 2), "short": draw.random()}
    trace = {"task_id": f"t{number // 4}", "status": "ok", "segments": [segment], "reward_components": parts}
    return {
        "responses_create_params": {"input": "?", "temperature": 1.0},
        "response": {"output": []},
        "reward": sum(parts.values()),
        "_ng_task_index": number // 4,
        "_ng_rollout_index": number % 4,
        "ng": trace,
    }


ROWS = {
    "sft": [{"messages": [*question(n), *answer(f"The answer is {n + 7}.")]} for n in range(32)],
    "pairs": [
        {"prompt": question(n), "chosen": answer(f"The answer is {n + 7}."), "rejected": answer("Perhaps.")}
        for n in range(32)
    ],
    "labels": [
        {"prompt": question(n), "completion": answer(f"It is {n + 7}." if n % 2 else "Perhaps."), "label": bool(n % 2)}
        for n in range(32)
    ],
    "rollouts": [rollout(n) for n in range(32)],
}
NEW = ["sft.yaml", "data.path=sft.jsonl", f"model.from_scratch={json.dumps(SHAPE)}"]
DPO = ["dpo.yaml", "data.path=pairs.jsonl", "model.path=start"]
FROM_ROLLOUTS = ["data.path=rollouts.jsonl", "model.path=start"]
FOREIGN = "algorithm.max_mismatch=1e9"
RUNS = {
    "zero 1, bf16, recomputed, tensorboard, held-out": [
        *NEW, "optimizer.name=adamw", "engine={zero_stage: 1, precision: bf16, activation_checkpointing: true}",
        "logging.tensorboard=true", "evaluation={data: sft.jsonl, every: 1}",
    ],
    "zero 2, fp16, adam": [*NEW, "optimizer.name=adam", "engine={zero_stage: 2, precision: fp16}"],
    "zero 3, adamw, offloaded": [
        *NEW, "optimizer.name=adamw", "engine={zero_stage: 3, offload: {optimizer: cpu, parameters: cpu}}",
    ],
    "adamw in 8 bits": [*NEW, "optimizer.name=adamw_8bit", "schedule={warmup_steps: null, warmup_ratio: 0.5}"],
    "dpo, lora": [*DPO, "model.lora.rank=4"],
    "dpo, qlora, zero 1, bf16": [
        *DPO, "model.lora={rank: 4, base_4bit: nf4}", "engine={zero_stage: 1, precision: bf16}",
    ],
    "kto": ["kto.yaml", "data.path=labels.jsonl", "model.path=start"],
    "reward model, lora": ["reward_model.yaml", "data.path=pairs.jsonl", "model.path=start", "model.lora.rank=4", "evaluation=null"],
    "gdpo, lora, kl": ["grpo.yaml", *FROM_ROLLOUTS, "algorithm={name: gdpo, kl: {coef: 0.1}, max_mismatch: 1e9}", "model.lora.rank=4"],
    "ppo": ["ppo.yaml", *FROM_ROLLOUTS, FOREIGN],
    "online dpo": ["online_dpo.yaml", *FROM_ROLLOUTS],
    "distillation": [
        "grpo.yaml", *FROM_ROLLOUTS, "algorithm={name: distillation, max_mismatch: 1e9, teacher: {path: start}}",
    ],
}  # fmt: skip


def ng_train(folder: Path, words: list[str], *before: str) -> subprocess.CompletedProcess[str]:
    """before: a command that gets this one as its arguments."""
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*before, sys.executable, "-m", "ngym", "train", *words, *FEW],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_a_run_with_these_options_trains_and_saves(root: Path, tmp_path: Path, words: list[str]) -> None:
    if any("8bit" in word or "4bit" in word for word in words):
        pytest.importorskip("bitsandbytes")
    new_policy(root, tmp_path / "start")
    done = ng_train(tmp_path, words)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [row for row in metrics if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2] and all(row["global_valid_toks"] > 0 for row in steps)
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists()


def test_weights_that_do_not_fit_on_the_disk_end_the_run_with_a_line(tmp_path: Path) -> None:
    done = ng_train(tmp_path, NEW, "bash", "-c", 'ulimit -f 50 && exec "$@"', "bash")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step-000002: cannot be written: File too large; --resume continues after step 0" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("*partial"))
