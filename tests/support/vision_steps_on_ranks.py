"""A program for a launcher: `vision_steps_on_ranks.py MODEL OUTPUT OPTIONS...`: two steps that train the encoder of images,
with each of the engine's options. Of two ranks, one gets micro-batches of text only.

Rank 0 writes OUTPUT/<place>.json (losses and gradient norms) and OUTPUT/<place>.safetensors (the weights).
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from image_models import png, segment_with
from safetensors.torch import save_file
from torch import nn

from ngym.trainer.data import samples
from ngym.trainer.engine import distributed, engine
from ngym.trainer.model import packing
from ngym.trainer.model import policy as model
from ngym.trainer.model.chunked_logprobs import RequestedScores
from ngym.trainer.recipe import recipe

# The eps of Adam hides no gradient here: a wrong factor moves the weights by lr.
OPTIMIZER = {"name": "adamw", "lr": 1e-2, "eps": 1e-2, "max_grad_norm": None}
ASKS = RequestedScores(values=True)


def micro_batches(reader: Any) -> list[list[list[samples.Segment]]]:
    """The micro-batches of each rank: images first, then text on both; and text, then text or images."""
    red, blue = png("red"), png("blue", (112, 56))
    texts = [samples.Segment([40, 41, 42, *answer], [(3, 3 + len(answer))]) for answer in ([80, 81], [20], [90, 91])]
    images = [segment_with(reader, each, [50, 51]) for each in ([red], [red, blue])]
    return [[images, texts[:1]], [texts[1:2], texts[2:]]]


def losses(learner: Any, batches: list[list[samples.Segment]], weight: float) -> float:
    total = 0.0
    for number, segments in enumerate(batches, 1):
        packed = packing.pack([samples.Sample((segment,)) for segment in segments], learner.device)
        scores = learner.scores(packed, ASKS)
        loss = (scores.values_N - 1).square().sum() - scores.logprobs_N.sum()
        total += float(loss.detach())
        learner.backward(loss, weight, last=number == len(batches))
    return total


def main(folder: Path, output: Path, every: list[dict[str, Any]]) -> None:
    launch = recipe.read_launch()
    options = recipe.ModelOptions(path=str(folder), train_vision=True)

    def new(engine_options: dict[str, Any]) -> Any:
        policy = model.load_policy(options, model.load_tokenizer(options), 0)
        policy.critic = model.CriticNetwork(policy.network, None, policy.images)
        nn.init.normal_(policy.critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        optimizing = recipe.OptimizerOptions(**OPTIMIZER)
        return engine.Engine(policy, launch, recipe.EngineOptions(**engine_options), optimizing)

    with distributed.join_process_group(launch):
        for place, engine_options in enumerate(every):
            learner = new(engine_options)
            of_ranks = micro_batches(learner.policy.images)
            weight = float(sum(segment.trained for rank in of_ranks for part in rank for segment in part))
            alone = launch.ranks == 1 or engine_options.get("sequence_parallel", 1) > 1
            own = [part for rank in of_ranks for part in rank] if alone else of_ranks[launch.rank]
            steps = []
            for _ in range(2):
                [loss] = learner.all_reduce([losses(learner, own, weight)])
                update = learner.step(1.0)
                # without ZeRO, the critic has a norm of its own
                steps.append((loss / weight, math.hypot(update.grad_norm, update.critic_grad_norm or 0.0)))
            weights = learner.weights()
            if launch.rank == 0:
                (output / f"{place}.json").write_text(json.dumps(steps))
                tensors = {name: tensor.detach().float().clone().contiguous() for name, tensor in weights.items()}
                save_file(tensors, output / f"{place}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [json.loads(word) for word in sys.argv[3:]])
