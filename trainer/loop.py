"""The one loop: batches in, steps out, whatever the algorithm.

batch -> plan -> this rank's micro-batches -> logprobs -> loss -> backward ... -> step -> metrics
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ngym.errors import NgymError

from .algorithms import Algorithm
from .engine import Engine, Update
from .packing import pack, plan
from .samples import Sample


class NotFinite(NgymError):
    """The loss or the gradient is no number."""


class Step(NamedTuple):
    """One optimiser step. means: the algorithm's metrics over the whole batch."""

    means: dict[str, float]
    update: Update


def train(
    engine: Engine,
    algorithm: Algorithm,
    batches: Iterable[list[Sample]],
    budget: int,
    factor: Callable[[int], float],
    report: Callable[[int, dict[str, float]], None],
) -> None:
    """Take one optimiser step on each batch.

    Args:
        budget: tokens that a rank computes at once.
        factor: step (from 0) -> factor on the learning rates.
        report: called after each step (from 1) with its metrics.

    Raises:
        NotFinite: a loss or gradient is nan or infinite; the step is named.
    """
    for number, batch in enumerate(batches, 1):
        began = time.monotonic()
        step = take_step(engine, algorithm, batch, budget, factor(number - 1))
        if not math.isfinite(step.update.grad_norm) or not all(map(math.isfinite, step.means.values())):
            raise NotFinite(f"step {number}: gradient norm {step.update.grad_norm}, {step.means}; lower optimizer.lr")
        report(number, _values(batch, step, time.monotonic() - began))


def take_step(engine: Engine, algorithm: Algorithm, batch: Sequence[Sample], budget: int, factor: float) -> Step:
    """One optimiser step. Every rank is given the whole batch and computes its share of it."""
    weight = algorithm.weight(batch)
    micro_batches = plan(batch, budget, engine.ranks)[engine.rank :: engine.ranks]
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for index, samples in enumerate(micro_batches):
        # A rank without work computes something and counts none of it: the ranks' collectives must match.
        counted = 1.0 if samples else 0.0
        packed = pack(samples or batch[:1], engine.device)
        loss = algorithm.loss(engine.logprobs(packed), packed)
        engine.backward(counted * loss.sum, weight, last=index == len(micro_batches) - 1)
        for name, mean in loss.metrics.items():
            sums[name][0] += counted * mean.total
            sums[name][1] += counted * mean.count
    update = engine.step(factor)
    return Step(_means(engine, sums), update)


def _means(engine: Engine, sums: dict[str, list[float]]) -> dict[str, float]:
    """Each metric over all micro-batches and ranks; the names are the same on every rank."""
    names = sorted(sums)
    added = engine.add_up([value for name in names for value in sums[name]])
    return {name: total / max(count, 1.0) for name, total, count in zip(names, added[::2], added[1::2], strict=True)}


def _values(batch: Sequence[Sample], step: Step, seconds: float) -> dict[str, float]:
    return {
        **step.means,
        "lr": step.update.lr,
        "grad_norm": step.update.grad_norm,
        "global_valid_toks": sum(sample.trained for sample in batch),
        "global_valid_seqs": len(batch),
        "tokens_per_s": sum(sample.tokens for sample in batch) / seconds,
        "time/step": seconds,
    }


def epochs(samples: Sequence[Sample], batch_size: int, count: int, seed: int) -> Iterator[list[Sample]]:
    """Each epoch shuffles anew; its last batch may be smaller."""
    for epoch in range(count):
        order = list(range(len(samples)))
        random.Random(f"{seed} epoch {epoch}").shuffle(order)
        for start in range(0, len(order), batch_size):
            yield [samples[index] for index in order[start : start + batch_size]]
