"""A program for a launcher: `families_on_ranks.py OUTPUT CASES...`: two steps of a small model for each case.

A case has `family` (transformers' name), `shape` (beyond SMALL), `replays` (of a mixture of experts) and `engine` (options).
Rank 0 writes OUTPUT/<place>.json: the loss and the gradient norm of each step.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from small_model import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ngym.routed_experts import ExpertRows
from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import samples
from ngym.trainer.engine import distributed, engine
from ngym.trainer.model import attention, policy, routing_replay
from ngym.trainer.recipe import recipe

SMALL = {**SHAPE, "vocab_size": 96, "initializer_range": 0.2}
EXPERTS = 6
BUDGET, STEPS = 60, 2
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3}


def batch(with_experts: bool) -> list[samples.Sample]:
    """Their common prompt has the same experts; the last token of each sample has none."""
    rng = random.Random(5)
    prompt, of_prompt = [rng.randrange(1, 96) for _ in range(8)], drawn(rng, 8)
    made = []
    for length in (3, 9, 2, 12, 5, 7):
        ids = prompt + [rng.randrange(1, 96) for _ in range(length)]
        chosen = of_prompt + drawn(rng, length - 1)
        experts = ExpertRows(2, 2, "uint8", bytearray(chosen)) if with_experts else None
        made.append(samples.Sample((samples.Segment(ids, [(8, len(ids))], experts=experts),)))
    return made


def drawn(rng: random.Random, tokens: int) -> list[int]:
    """Experts that no router would choose, of two layers."""
    return [expert for _ in range(tokens * 2) for expert in rng.sample(range(EXPERTS), 2)]


def steps(case: dict[str, Any], launch: recipe.Launch) -> list[tuple[float, float]]:
    shape = AutoConfig.for_model(case["family"], **SMALL, **case["shape"])
    torch.manual_seed(0)
    made = policy.Policy(AutoModelForCausalLM.from_config(shape, attn_implementation=attention.NAME))
    if case["replays"]:
        made.routers = routing_replay.replay_routing(made.network)
    learner = engine.Engine(made, launch, recipe.EngineOptions(**case["engine"]), recipe.OptimizerOptions(**OPTIMIZER))
    results = [loop.take_step(learner, sft.Sft(), batch(case["replays"]), BUDGET, 1.0) for _ in range(STEPS)]
    return [(step.means["loss"], step.update.grad_norm) for step in results]


def main(output: Path, cases: list[dict[str, Any]]) -> None:
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
    launch = recipe.read_launch()
    with distributed.join_process_group(launch):
        for place, case in enumerate(cases):
            taken = steps(case, launch)
            if launch.rank == 0:
                (output / f"{place}.json").write_text(json.dumps(taken))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [json.loads(word) for word in sys.argv[2:]])
