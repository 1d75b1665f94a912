"""A program for a launcher: `faults_on_ranks.py DATA OUTPUT WAYS...`: steps in which one rank meets a non-finite
number.

A way is a ZeRO stage, and perhaps a precision: `2` or `2-fp16`. At the end rank 1 is killed. Each rank writes
OUTPUT/rank-<n>.json: of each way, the weights after each step and how it ended.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from steps_on_ranks import OPTIMIZER, SHAPE, TOKENIZER
from transformers import AutoTokenizer

from ngym.config.shipped_files import shipped
from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import file_batches, samples
from ngym.trainer.engine import distributed, engine, sanity_checks
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe

RANK = 1  # where it goes wrong


class Faulty(sft.Sft):
    """An algorithm in which `logprob` or `loss` is no number on one rank."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self._kind = kind if rank == RANK else "none"

    def loss(self, scores: Any, packed: Any) -> Any:
        if self._kind == "logprob":
            worst = torch.zeros_like(scores.logprobs_N)
            worst[-1] = -math.inf
            scores = scores._replace(logprobs_N=scores.logprobs_N + worst)
        loss = super().loss(scores, packed)
        return loss._replace(sum=loss.sum * math.nan) if self._kind == "loss" else loss


@contextmanager
def broken_gradient(policy: Any, rank: int, enabled: bool) -> Iterator[None]:
    """One element of one parameter's gradient is infinite, on one rank."""

    def corrupt(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = math.inf
        return gradient

    parameter = dict(policy.named_parameters())["network.model.layers.1.mlp.down_proj.weight"]
    hook = parameter.register_hook(corrupt) if enabled and rank == RANK else None
    yield
    if hook is not None:
        hook.remove()


def digest(policy: Any) -> str:
    """Of what this rank computes with: all weights, or its part of them."""
    hasher = hashlib.sha256()
    for parameter in policy.parameters():
        hasher.update(getattr(parameter, "ds_tensor", parameter).detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def main(data: Path, output: Path, ways: list[str]) -> None:
    launch = recipe.read_launch()
    tokenizer = AutoTokenizer.from_pretrained(shipped() / TOKENIZER)
    batches = list(file_batches.epochs(sft.Sft().samples(data, tokenizer), 15, 1, seed=0))[:4]
    results: dict[str, Any] = {}

    def new(way: str) -> Any:
        policy = model.load_policy(recipe.ModelOptions(from_scratch=SHAPE, tokenizer=TOKENIZER), tokenizer, 0)
        stage, _, precision = way.partition("-")
        options = recipe.EngineOptions.model_validate({"zero_stage": int(stage), "precision": precision or "fp32"})
        return engine.Engine(policy, launch, options, recipe.OptimizerOptions(**OPTIMIZER))

    def train_steps(learner: Any, kind: str, batches: list[Any], watch: Any, report: Callable[..., None]) -> None:
        with broken_gradient(learner.policy, launch.rank, kind == "gradient"):
            groups = [samples.Batch([batch]) for batch in batches]
            loop.train(learner, Faulty(kind, launch.rank), groups, 150, lambda step: 1.0, watch, report)

    with distributed.join_process_group(launch):
        for way in ways:
            learner, skipped = new(way), []
            watch = sanity_checks.NanGuard(None, 3)
            hashes = [digest(learner.policy)]

            def report(step: int, values: dict[str, float], into: list[float] = skipped) -> None:
                into.append(values["skipped_steps"])

            for kind in ("none", "logprob", "none", "loss", "none", "gradient", "none"):
                train_steps(learner, kind, batches[:1], watch, report)
                hashes.append(digest(learner.policy))
            try:
                train_steps(learner, "gradient", batches, watch, report)
                ended = "it went on"
            except sanity_checks.NotFinite as error:
                ended = str(error)
            hashes.append(digest(learner.policy))
            results[way] = {"hashes": hashes, "skipped": skipped, "ended": ended, "scaling": learner.scaling()}
        (output / f"rank-{launch.rank}.json").write_text(json.dumps(results))
        distributed.barrier()
        if launch.rank == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
