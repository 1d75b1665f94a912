"""One side of benchmarks/trainer.py: our engine and loop, one optimiser step at a turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep import Turns

from ngym.runtime.cpu_threads import limit_spinning

limit_spinning(alone=True)  # before torch is imported, as ng_train does

from ngym.trainer import loop
from ngym.trainer.algorithms.dpo import Dpo
from ngym.trainer.algorithms.policy_gradient import PolicyGradient
from ngym.trainer.algorithms.sft import Sft
from ngym.trainer.data.samples import Batch
from ngym.trainer.engine import distributed, engine
from ngym.trainer.engine.sanity_checks import NanGuard
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe as config

GRPO = {
    "name": "grpo",
    "advantage": {"estimator": "group_std"},
    "loss": {"anchor": "trainer", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"},
    "shaping": {"skip_equal_groups": False},  # TRL computes them, so they are computed here, too
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ADAMW, ADAMW_BYTES = "aten::_fused_adamw_", 28  # a parameter: reads four float32, writes three
PROBE = 2048  # rows and columns of the products that show the processor's own limit
ALGORITHMS = {"sft": {"name": "sft"}, "dpo": {"name": "dpo", "beta": 0.1}, "grpo": GRPO}


def main() -> None:
    spec = json.loads(sys.argv[1])
    recipe = config.Recipe.model_validate(
        {
            "algorithm": ALGORITHMS[spec["algorithm"]],
            "output": spec["folder"],
            "model": {"path": spec["model"]},
            "data": {"path": spec["data"]},
            "batch_size": spec["batch"],
            "micro_batch_tokens": spec["micro_batch_tokens"],
            "optimizer": {"name": "adamw", "lr": spec["lr"], "max_grad_norm": 1.0},
            "engine": spec["engine"],
        }
    )
    torch = sys.modules["torch"]
    torch.set_num_threads(spec["threads"])
    launch = config.read_launch()
    with distributed.join_process_group(launch):
        tokenizer = model.load_tokenizer(recipe.model)
        policy = model.load_policy(recipe.model, tokenizer, 0)
        policy.eval()
        learner = engine.Engine(policy, launch, recipe.engine, recipe.optimizer)
        turns = Turns()
        samples = read(spec["algorithm"], recipe, tokenizer, learner)
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        turns.ready(parameters=parameters, device=str(learner.device))
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True)

        def report(step: int, values: dict[str, float]) -> None:
            facts = {name: values[name] for name in ("loss", "grad_norm", "tokens")}
            if step == spec.get("profiled"):
                profiler.stop()
                facts |= summarize_profile(profiler.key_averages(), parameters)
            turns.done(**facts)
            if step + 1 == spec.get("profiled"):
                profiler.start()

        loop.train(
            learner,
            samples.algorithm,
            batches(samples, learner, recipe),
            recipe.micro_batch_tokens,
            lambda step: 1.0,
            NanGuard(None, 1),
            report,
        )


def summarize_profile(events: Any, parameters: int) -> dict[str, float]:
    """Of a profiled step: the shares of the time of its parts, and the rates of matrix products (GFLOP/s) and of AdamW
    (GB/s), each beside the rate at which this process can multiply two large matrices, or copy one.
    """
    products = [event for event in events if event.key in PRODUCTS]
    seconds = {
        "products": sum(event.self_cpu_time_total for event in products) / 1e6,
        "attention": sum(event.self_cpu_time_total for event in events if "scaled_dot_product" in event.key) / 1e6,
        "adamw": sum(event.self_cpu_time_total for event in events if event.key == ADAMW) / 1e6,
    }
    total = sum(event.self_cpu_time_total for event in events) / 1e6
    torch = sys.modules["torch"]
    left, right = torch.rand(2, PROBE, PROBE)
    large = torch.rand(16, PROBE, PROBE)
    copy = torch.empty_like(large)
    return {
        **{name: time / total for name, time in seconds.items()},
        "gflops": sum(event.flops for event in products) / seconds["products"] / 1e9,
        "most_gflops": 2 * PROBE**3 / fastest(lambda: torch.mm(left, right)) / 1e9,
        "adamw_gb_s": parameters * ADAMW_BYTES / seconds["adamw"] / 1e9,
        "copied_gb_s": 2 * large.nbytes / fastest(lambda: copy.copy_(large)) / 1e9,
    }


def fastest(call: Callable[[], object]) -> float:
    """The least seconds of ten calls."""
    times = []
    for _ in range(10):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


class Read:
    """The samples of the file in its order, and the algorithm."""

    def __init__(self, algorithm: Any, samples: Sequence[Any], live: bool) -> None:
        self.algorithm, self.samples, self.live = algorithm, samples, live


def read(kind: str, recipe: Any, tokenizer: Any, learner: Any) -> Read:
    path, budget = Path(recipe.data.path), recipe.micro_batch_tokens
    if kind == "grpo":
        algorithm = PolicyGradient(recipe.algorithm, 1, None)
        return Read(algorithm, algorithm.samples(path, tokenizer), True)
    if kind == "sft":
        algorithm = Sft()
        return Read(algorithm, algorithm.samples(path, tokenizer), False)
    algorithm = Dpo(recipe.algorithm)
    newline = tokenizer("\n")["input_ids"][-1]
    samples = [as_trl_counts(pair, newline) for pair in algorithm.samples(path, tokenizer)]
    return Read(algorithm, algorithm.prepare(samples, learner, budget), False)


def as_trl_counts(pair: Any, newline: int) -> Any:
    """The pair, trained on all that follows its prompt: TRL's DPO takes what tools answered, and the template's newline
    after the last message, for words of the policy.
    """
    sides = [
        replace(side, token_ids=[*side.token_ids, newline], spans=[(side.spans[0][0], len(side.token_ids) + 1)])
        for side in pair.segments
    ]
    return replace(pair, segments=tuple(sides))


def batches(read: Read, learner: Any, recipe: Any) -> Iterator[Any]:
    for start in range(0, len(read.samples), recipe.batch_size):
        part = read.samples[start : start + recipe.batch_size]
        tokens = float(sum(sample.tokens for sample in part))
        if read.live:  # rewards to advantages is a part of the step, there as here
            part = read.algorithm.prepare(part, learner, recipe.micro_batch_tokens)
        yield Batch([part], {"tokens": tokens})


if __name__ == "__main__":
    main()
