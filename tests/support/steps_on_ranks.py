"""A program for a launcher: `steps_on_ranks.py DATA OUTPUT OPTIONS...`: the same three steps with each of the
engine's options.

Rank 0 writes OUTPUT/<place>.json (losses and gradient norms, and the loss on held-out samples at the end) and OUTPUT/<place>.safetensors (the weights). With `--again`,
the last two steps are taken a second time, by a new engine that loads what was stored after the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from small_model import SHAPE
from transformers import AutoTokenizer

from ngym.config.shipped_files import shipped
from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import file_batches
from ngym.trainer.engine import distributed, engine
from ngym.trainer.evaluation import heldout_loss
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe

TOKENIZER = "data/tiny_policy/tokenizer"
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3}  # the eps of Adam hides no gradient here: a wrong factor moves the weights by lr
BATCH, BUDGET, STEPS = 15, 150, 3


def take(learner: Any, batches: list[Any]) -> list[tuple[float, float]]:
    results = [loop.take_step(learner, sft.Sft(), batch, BUDGET, 1.0) for batch in batches]
    return [(step.means["loss"], step.update.grad_norm) for step in results]


def main(data: Path, output: Path, every: list[dict[str, Any]], again: bool) -> None:
    launch = recipe.read_launch()
    tokenizer = AutoTokenizer.from_pretrained(shipped() / TOKENIZER)
    batches = list(file_batches.epochs(sft.Sft().samples(data, tokenizer), BATCH, 1, seed=0))[:STEPS]

    def new(options: dict[str, Any]) -> Any:
        policy = model.load_policy(recipe.ModelOptions(from_scratch=SHAPE, tokenizer=TOKENIZER), tokenizer, 0)
        return engine.Engine(policy, launch, recipe.EngineOptions(**options), recipe.OptimizerOptions(**OPTIMIZER))

    with distributed.join_process_group(launch):
        for place, options in enumerate(every):
            learner = new(options)
            steps = take(learner, batches[:1])
            state = output / f"state-{place}"
            state.mkdir(exist_ok=True)
            saved = learner.save_state(state) if again else None
            steps += take(learner, batches[1:])
            held_out = heldout_loss.HeldOutData(batches[0], sft.Sft(), learner, BUDGET, 1, print).means()["loss"]
            weights = learner.weights()
            if again:
                distributed.barrier()
                learner = new(options)
                learner.load_state(state, saved)
                steps += take(learner, batches[1:])
            if launch.rank == 0:
                (output / f"{place}.json").write_text(json.dumps({"steps": steps, "held_out": held_out}))
                tensors = {name: tensor.detach().float().clone().contiguous() for name, tensor in weights.items()}
                save_file(tensors, output / f"{place}.safetensors")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--again"]
    main(Path(words[0]), Path(words[1]), [json.loads(word) for word in words[2:]], "--again" in sys.argv)
