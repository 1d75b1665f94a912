"""`ng_train grpo.yaml` in a separate process, against a stub of the services."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from typing import Any

from forked import ForkedCommand
from small_model import SHAPE
from stub_policy import Stub

TASKS, GROUP = 8, 4  # of a step
HELD: list[socket.socket] = []


def new_policy(root: Path, folder: Path) -> Path:
    """A folder with a new policy."""
    from transformers import AutoTokenizer

    from ngym.trainer.model import policy as model
    from ngym.trainer.recipe import recipe as config

    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    options = config.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    model.load_policy(options, tokenizer, 0).network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tasks(path: Path, count: int) -> Path:
    draw = random.Random(0)
    tasks = [
        {"responses_create_params": {"input": f"task {n}"}, "prompt": [draw.randrange(20, 1000) for _ in range(4)]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), "utf-8")
    return path


def arguments(folder: Path, policy: Path, stub: Stub, steps: int) -> list[str]:
    """The command line of a run in this folder."""
    stanzas = {
        "policy": {"kind": "model", "url": stub.url},
        "agent": {"kind": "agent", "url": stub.url, "model": "policy"},
    }
    (folder / "services.yaml").write_text(json.dumps(stanzas), "utf-8")
    tasks = write_tasks(folder / "tasks.jsonl", 20)
    overrides = {
        "output": "run",
        "model.path": policy,
        "rollouts.agent": "agent",
        "rollouts.tasks": tasks,
        "rollouts.services": folder / "services.yaml",
        "rollouts.tasks_per_step": TASKS,
        "rollouts.group_size": GROUP,
        "max_steps": steps,
        "micro_batch_tokens": 120,
        "optimizer.lr": 3e-2,
        "optimizer.max_grad_norm": "null",
        "optimizer.eps": 1e-5,
        "schedule.name": "constant",
        "schedule.warmup_steps": 0,
        "evaluation.tasks": tasks,
        "evaluation.limit": 10,
        "evaluation.every": 4,
    }
    return ["grpo.yaml", *(f"{key}={value}" for key, value in overrides.items())]


def train(folder: Path, words: list[str], *, vllm: bool = False, **environment: str) -> ForkedCommand:
    """`ng_train WORDS` in this folder. vllm: it starts a model server."""
    return ForkedCommand(["train", *words], folder, {**os.environ, **environment}, vllm=vllm)


def on_two_ranks(folder: Path, words: list[str]) -> list[ForkedCommand]:
    """A command (see ForkedCommand) on each of two ranks, which no launcher watches."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [ForkedCommand(words, folder, {**os.environ, **meeting, **place}) for place in places]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]


def free_port() -> str:
    """For ranks to meet at. It is held until the tests end, so that no other program is given it meanwhile."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # with this, who asks for it by number gets it
    holder.bind(("127.0.0.1", 0))
    HELD.append(holder)
    return str(holder.getsockname()[1])
