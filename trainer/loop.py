"""The training loop of every algorithm: batches in, optimizer steps out.

batch -> updates -> plan -> this rank's micro-batches -> scores -> loss -> backward ... -> step -> metrics
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from ngym.telemetry import tracing

from .algorithms import Algorithm
from .data.samples import Batch, Sample
from .engine.checks import Guard
from .engine.engine import Engine, Update
from .model.packing import pack

TOLD = ("loss", "grad_norm", "lr", "global_valid_toks", "global_valid_seqs")  # recorded on the span of a step
# These compare the policy with its sampler. Only the first update reports them: later the two differ by design.
BEFORE_TRAINING = frozenset({"token_mult_prob_error", "mismatch_kl"})


class Step(NamedTuple):
    """One optimizer step. means: the algorithm's metrics over its samples, including `loss`."""

    means: dict[str, float]
    update: Update


def train(
    engine: Engine,
    algorithm: Algorithm,
    batches: Iterable[Batch],
    budget: int,
    factor: Callable[[int], float],
    guard: Guard,
    report: Callable[[int, dict[str, float]], None],
    done: int = 0,
) -> None:
    """Train each batch: one optimizer step on each of its updates.

    Args:
        budget: tokens that a rank computes at once.
        factor: step (from 0) -> factor of the learning rates.
        guard: checks every optimizer step and counts the skipped ones.
        report: called after each batch (from 1) with its metrics.
        done: number of batches that were trained before.

    Raises:
        NotFinite: losses or gradients are not finite, several times in a row.
    """
    for number, batch in enumerate(batches, done + 1):
        began = time.monotonic()
        taken: list[Step] = []
        with tracing.span("train step") as span:
            for samples in batch.updates:
                step = take_step(engine, algorithm, samples, budget, factor(number - 1))
                if guard.passes(number, samples, step.means["loss"], step.update.grad_norm):
                    taken.append(step)
            values = _values(batch, taken, guard.skipped, time.monotonic() - began)
            span.set("ngym.step", number)
            for name in TOLD:
                span.set(f"ngym.{name}", values.get(name))
        report(number, {**batch.values, **values})


def take_step(engine: Engine, algorithm: Algorithm, samples: Sequence[Sample], budget: int, factor: float) -> Step:
    """One optimizer step. Every rank gets all samples and computes its share of them."""
    step_loss = algorithm.step_loss(samples)
    micro_batches = engine.micro_batches(samples, budget)
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for index, mine in enumerate(micro_batches):
        # A rank without work computes something with count 0: the ranks' collectives must match.
        counted = 1.0 if mine else 0.0
        packed = pack(mine or samples[:1], engine.device)
        loss = step_loss.loss(engine.scores(packed, algorithm.asks), packed)
        # A loss that is not finite on one rank must make the gradient not finite on all ranks.
        poison = 1.0 if loss.sum.isfinite() else math.nan
        engine.backward(counted * poison * loss.sum, step_loss.divisor, last=index == len(micro_batches) - 1)
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


def _values(batch: Batch, taken: Sequence[Step], skipped: int, seconds: float) -> dict[str, float]:
    """The metrics of a batch: means over its optimizer steps."""
    samples = [sample for update in batch.updates for sample in update]
    names = taken[0].means if taken else ()
    means = {name: fmean(step.means[name] for step in taken) for name in names}
    means |= {name: taken[0].means[name] for name in names if name in BEFORE_TRAINING}
    if taken:
        means |= {"lr": taken[-1].update.lr, "grad_norm": fmean(step.update.grad_norm for step in taken)}
        of_critic = [norm for step in taken if (norm := step.update.critic_grad_norm) is not None]
        means |= {"critic_grad_norm": fmean(of_critic)} if of_critic else {}
    return {
        **means,
        "global_valid_toks": sum(sample.trained for sample in samples),
        "global_valid_seqs": len(samples),
        "skipped_steps": skipped,
        "tokens_per_s": sum(sample.tokens for sample in samples) / seconds,
        "time/train": seconds,
    }
