"""Evaluation on a held-out file: the algorithm's own loss and metrics on it, without a training step.

val/loss              as in training, with all samples as one step: KTO's z is the mean over the whole file;
                      for sft the mean of -log p over all tokens, with val/perplexity = exp of it
val/rewards/...       for dpo: accuracies, margins ... against the starting policy; for reward_model: of its scores
val/calibration/...   for reward_model: accuracy and confidence by bins of confidence
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..algorithms import Algorithm, StepLoss
from ..algorithms.sft import Sft
from ..data.samples import Batch, Sample
from ..engine.sanity_checks import NOT_SAVED, NotFinite
from ..losses.policy_loss import Mean, log_values
from ..model.packing import pack
from ..model.policy import dropout_off

if TYPE_CHECKING:
    from ..engine.engine import Engine

PLANNED_AT_ONCE = 1024  # samples
SHOWN = ("val/loss", "val/perplexity", "val/rewards/accuracies", "val/rewards/margins")


class HeldOutNotFinite(NotFinite):
    """The held-out loss is not finite: the weights of this step must not be saved."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the held-out loss after step {step} is {loss}: the weights cannot be used, {NOT_SAVED}")
        self.step = step


class HeldOutData:
    """Measures a held-out file. Every rank has an instance and calls it at the same time.

    Args:
        samples: prepared for the algorithm with the policy that the run starts from.
        budget: tokens that a rank computes at once.
        note: called with the step, the metrics, and a line for the screen.
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

    def evaluate_between(self, batches: Iterable[Batch], done: int) -> Iterator[Batch]:
        """The batches after the first `done`; evaluates before the first batch, every so many batches, and at the end.

        A batch is evaluated after its checkpoint is saved, so a run that resumes from that evaluates it again.
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
            HeldOutNotFinite: the loss is not finite.
        """
        began = time.monotonic()
        values = {f"val/{name}": value for name, value in self.means().items()}
        if isinstance(self._algorithm, Sft):
            values["val/perplexity"] = math.exp(min(values["val/loss"], 700.0))
        text = ", ".join(f"{name.removeprefix('val/')} {values[name]:.4f}" for name in SHOWN if name in values)
        values["time/eval"] = time.monotonic() - began
        self._note(step, values, f"held-out after {step} steps: {text} ({len(self._samples):,} samples)")
        if not math.isfinite(values["val/loss"]):
            raise HeldOutNotFinite(step, values["val/loss"])

    def means(self) -> dict[str, float]:
        """Each metric of the algorithm, as a mean over the samples of all ranks; a mean of nothing is left out."""
        sums: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        with torch.no_grad(), dropout_off(self._engine.policy):
            step_loss = self._algorithm.step_loss(self._samples)  # of all samples: weights and z depend on them
            for start in range(0, len(self._samples), PLANNED_AT_ONCE):
                self._add(step_loss, self._samples[start : start + PLANNED_AT_ONCE], sums, counts)
        names = sorted(sums)  # the same on every rank
        totals = self._engine.all_reduce([*(sums[name] for name in names), *(counts[name] for name in names)])
        means = log_values({name: Mean(totals[place], totals[len(names) + place]) for place, name in enumerate(names)})
        return step_loss.derived(means, bins=True)

    def _add(
        self, step_loss: StepLoss, samples: Sequence[Sample], sums: dict[str, float], counts: dict[str, float]
    ) -> None:
        engine, algorithm = self._engine, self._algorithm
        for batch in engine.micro_batches(samples, self._budget):
            # a rank without work computes something with count 0: the ranks' collectives must match
            packed = pack(batch or samples[:1], engine.device)
            loss = step_loss.loss(engine.scores(packed, algorithm.asks), packed)
            for name, mean in loss.metrics.items():
                sums[name] += mean.total if batch else 0.0
                counts[name] += mean.count if batch else 0.0
