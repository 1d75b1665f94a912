"""KTO: raises the likelihood of answers with the label true, and lowers that of the others; no pairs are needed.

    loss = mean over the batch's answers of weight x (1 - sigmoid(+-beta (gain - z)))

    gain    log p - log p of the policy at the start, a sum over the answer's tokens
    z       the mean gain of mismatched answers over the whole optimizer step, at least 0: an estimate of the KL

A mismatched answer is the answer to another prompt of the file. z costs a forward pass over as many tokens again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..data.chat_dataset import read_labeled
from ..data.samples import Sample
from ..engine.engine import score
from ..losses.policy_loss import Loss, TokenRows
from ..losses.preference_loss import kto_loss
from ..model.chunked_logprobs import RequestedScores, Scores
from ..model.packing import MicroBatch
from ..recipe.algorithms import KtoOptions
from . import Setup, StepLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledSample(Sample):
    """label: whether the answer is desirable. reference, mismatched_reference: log p of the answer, and of the
    mismatched one, under the starting policy; nan until `prepare`.
    """

    label: bool
    mismatched: Sample
    reference: float = float("nan")
    mismatched_reference: float = float("nan")

    @property
    def longest(self) -> int:
        return max(len(segment.token_ids) for sample in (self, self.mismatched) for segment in sample.segments)


class Kto:
    asks = RequestedScores()

    def __init__(self, options: KtoOptions, engine: Engine, budget: int) -> None:
        self._options = options
        self._engine = engine
        self._budget = budget

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return [
            LabeledSample(answer.segments, label=label, mismatched=mismatched)
            for answer, mismatched, label in read_labeled(path, tokenizer, self._engine.policy.images)
        ]

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        """The answers with the current policy's log p of them, and of their mismatched ones."""
        labeled = cast(Sequence[LabeledSample], samples)
        references = _sum_logprobs(labeled, engine, budget)
        mismatched = _sum_logprobs([sample.mismatched for sample in labeled], engine, budget)
        return [
            replace(sample, reference=reference, mismatched_reference=mismatched_reference)
            for sample, reference, mismatched_reference in zip(labeled, references, mismatched, strict=True)
        ]

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        labeled = cast(Sequence[LabeledSample], samples)
        now = _sum_logprobs([sample.mismatched for sample in labeled], self._engine, self._budget)
        gains = [sum_ - sample.mismatched_reference for sum_, sample in zip(now, labeled, strict=True)]
        return StepLoss(len(labeled), partial(self._loss, kl=max(0.0, math.fsum(gains) / len(gains))))

    def _loss(self, scores: Scores, packed: MicroBatch, kl: float) -> Loss:
        labeled, options = cast(Sequence[LabeledSample], packed.samples), self._options
        logprobs_N = scores.logprobs_N.double()
        reference_R = logprobs_N.new_tensor([sample.reference for sample in labeled])
        labels_R = logprobs_N.new_tensor([sample.label for sample in labeled]).bool()
        weights_R = options.desirable_weight * labels_R + options.undesirable_weight * ~labels_R
        gains_R = TokenRows(packed.sample_N, len(labeled)).sum(logprobs_N) - reference_R
        return kto_loss(options.beta, gains_R, labels_R, weights_R, kl)


def create(setup: Setup) -> Kto:
    """KTO with the options of a recipe."""
    assert isinstance(setup.recipe.algorithm, KtoOptions)
    return Kto(setup.recipe.algorithm, setup.engine, setup.recipe.micro_batch_tokens)


def _sum_logprobs(samples: Sequence[Sample], engine: Engine, budget: int) -> list[float]:
    """Log p of each sample's trained tokens."""
    by_segment = score(samples, engine.logprobs, engine, budget)
    return [math.fsum(value for segment in segments for value in segment) for segments in by_segment]
