"""Tokens a second that the trainer trains, by model size, compared with a plain loop over transformers.

Supervised steps on the quickstart's demonstrations, AdamW, float32: the same samples, model and batches of 32. The plain loop
(training_plain.py) pads them, eight at once, and does nothing else. Both take their steps in turns. benchmarks/trainer.py
compares with TRL, and other algorithms, too.

    python benchmarks/training.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from lockstep import Side
from parts import play

from ngym.config.shipped_files import shipped
from ngym.runtime.cpu_threads import SPINNING_BRIEFLY
from ngym.schema import Json
from trainer import SMALL, new_model

TINY = {**SMALL, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
MIDDLE = {**SMALL, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
HERE, BATCH, WARM_UP = Path(__file__).parent, 32, 2


def measure(quick: bool) -> Iterator[Json]:
    steps = 4 if quick else 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(shipped() / "data" / "calculator" / "generate.py"), "demonstrations"]
        count = str(BATCH * (steps + WARM_UP + 1))
        subprocess.run(
            [*command, "--count", count, "--output", str(folder / "data.jsonl")], check=True, stdout=sys.stderr
        )
        for shape in [TINY] if quick else [TINY, MIDDLE, SMALL]:
            yield in_turns(folder, shape, steps if shape is not SMALL else 3)


def in_turns(folder: Path, shape: dict[str, Any], steps: int) -> Json:
    model = folder / f"model-{shape['hidden_size']}"
    new_model(model, shape)
    threads = os.cpu_count() or 1
    spec = {"algorithm": "sft", "folder": str(folder / "out"), "model": str(model), "data": str(folder / "data.jsonl")}
    spec |= {"batch": BATCH, "lr": 1e-4, "threads": threads, "micro_batch_tokens": 4096}
    spec |= {"engine": {"zero_stage": 0, "precision": "fp32"}, "micro_batch": 8}
    environment = {**os.environ, **SPINNING_BRIEFLY}  # both sides: threads that spin for longer slow the other side
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                Side([sys.executable, str(HERE / f"{name}.py"), json.dumps(spec)], environment, folder / f"{name}.log")
            )
            for name in ("trainer_ours", "training_plain")
        }
        parameters = sides["trainer_ours"].ready["parameters"]
        turns = [{name: side.step() for name, side in sides.items()} for _ in range(WARM_UP + steps)][WARM_UP:]
    ours, plain = ([turn[name] for turn in turns] for name in sides)
    return {
        "parameters": parameters,
        "tokens_s": median(own["tokens"] / own["seconds"] for own in ours),
        "plain_tokens_s": median(own["tokens"] / one["seconds"] for own, one in zip(ours, plain, strict=True)),
        "rate_of_plain": median(one["seconds"] / own["seconds"] for own, one in zip(ours, plain, strict=True)),
        "cpu_of_plain": sum(own["cpu"] for own in ours) / sum(one["cpu"] for one in plain),
        "loss": ours[-1]["loss"],
        "plain_loss": plain[-1]["loss"],
    }


if __name__ == "__main__":
    play(__doc__, measure)
