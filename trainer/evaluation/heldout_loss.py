"""How good is the policy on a held-out file? The algorithm's own loss and metrics on it, without a step.

val/loss              as in training; for sft the mean of -log p over all tokens, and val/perplexity = exp of it
val/rewards/...       for dpo: accuracies, margins ... against the starting policy
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..algorithms import Algorithm
from ..algorithms.sft import Sft
from ..data.samples import Batch, Sample
from ..engine.nan_guard import NOT_SAVED, NotFinite
from ..model.packing import pack

if TYPE_CHECKING:
    from ..engine.engine import Engine

PLANNED_AT_ONCE = 1024  # samples
SHOWN = ("val/loss", "val/perplexity", "val/rewards/accuracies", "val/rewards/margins")


class HeldOutNotFinite(NotFinite):
    """The held-out loss is not a number: the policy of this step is not worth saving."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the held-out loss after step {step} is {loss}: the weights cannot be used, {NOT_SAVED}")
        self.step = step


class HeldOutData:
    """Every rank has one and calls it at the same time.

    Args:
        samples: prepared for the algorithm, while the policy was the one that the run begins with.
        budget: tokens that a rank computes at once.
        note: told the step, the metrics, and a line for the screen.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        algorithm: Algorithm,
        engine: Engine,
        budget: int,
        every: int,
        note: Callable[[int, dict[str, float], str], None],
    ) -> None:
        self._samples = samples
        self._algorithm = algorithm
        self._engine = engine
        self._budget = budget
        self._every = every
        self._note = note

    def evaluated(self, batches: Iterable[Batch], done: int) -> Iterator[Batch]:
        """The batches after the first `done`; the policy is evaluated before the first of all, every so many, and at the end.

        A batch is measured after its checkpoint was saved, so a run that goes on from there has it still to do.
        """
        if done % self._every == 0:
            self._measure(done)
        step = done
        for step, batch in enumerate(batches, done + 1):
            yield batch
            if step % self._every == 0:
                self._measure(step)
        if step % self._every:
            self._measure(step)

    def _measure(self, step: int) -> None:
        """
        Raises:
            HeldOutNotFinite: the loss is not a number.
        """
        began = time.monotonic()
        values = {f"val/{name}": value for name, value in self.means().items()}
        if isinstance(self._algorithm, Sft):
            values["val/perplexity"] = math.exp(min(values["val/loss"], 700.0))
        shown = ", ".join(f"{name.removeprefix('val/')} {values[name]:.4f}" for name in SHOWN if name in values)
        values["time/eval"] = time.monotonic() - began
        self._note(step, values, f"held-out after {step} steps: {shown} ({len(self._samples):,} samples)")
        if not math.isfinite(values["val/loss"]):
            raise HeldOutNotFinite(step, values["val/loss"])

    def means(self) -> dict[str, float]:
        """Each metric of the algorithm, a mean over the samples of all ranks."""
        sums: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        with torch.no_grad(), _no_dropout(self._engine.policy):
            for start in range(0, len(self._samples), PLANNED_AT_ONCE):
                self._add(self._samples[start : start + PLANNED_AT_ONCE], sums, counts)
        names = sorted(sums)  # the same on every rank
        totals = self._engine.add_up([*(sums[name] for name in names), *(counts[name] for name in names)])
        return {name: totals[place] / totals[len(names) + place] for place, name in enumerate(names)}

    def _add(self, samples: Sequence[Sample], sums: dict[str, float], counts: dict[str, float]) -> None:
        engine, algorithm = self._engine, self._algorithm
        step_loss = algorithm.step_loss(samples)
        for mine in engine.micro_batches(samples, self._budget):
            # a rank without work computes something and counts none of it: the ranks' collectives must match
            packed = pack(mine or samples[:1], engine.device)
            loss = step_loss.loss(engine.scores(packed, algorithm.asks), packed)
            for name, mean in loss.metrics.items():
                sums[name] += mean.total if mine else 0.0
                counts[name] += mean.count if mine else 0.0


@contextmanager
def _no_dropout(policy: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in policy.modules()}  # they may differ: see activations.py
    policy.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
