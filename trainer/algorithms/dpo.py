"""Direct preference optimization: raises the likelihood of chosen over rejected answers, relative to the starting
policy.

    loss = mean over the batch's pairs of preference + sft_weight x nll

    preference    sigmoid, ipo or hinge of the margin between the two sides (formulas: losses/preference_loss.py)
    nll           - log p of the chosen side, a mean over its tokens: keeps its likelihood from falling, as in plain DPO

A side is everything that the assistant says after the prompt, over all its turns. The two sides of a pair are the
segments of one sample, so they always share a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ..data.chat_samples import Pair, read_pairs
from ..data.samples import Sample, Segment
from ..engine.engine import score
from ..losses.policy_loss import Loss, Rows, measured
from ..losses.preference_loss import preference_loss
from ..model.chunked_logprobs import Asks, Scores
from ..model.packing import Packed
from ..recipe.algorithms import DpoOptions
from . import Setup, StepLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Segment):
    """A segment of one side of a pair."""

    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSample(Sample):
    """reference: log p of the chosen and of the rejected side under the starting policy; nan until `prepare`."""

    reference: tuple[float, float] = (float("nan"), float("nan"))


class Dpo:
    asks = Asks()

    def __init__(self, options: DpoOptions) -> None:
        self._options = options

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return [_sample(pair) for pair in read_pairs(path, tokenizer)]

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        """The pairs with their reference: the current policy's log p of both sides."""
        pairs = cast(Sequence[PairSample], samples)
        scores = score(pairs, engine.logprobs, engine, budget)
        return [_with_reference(pair, logprobs) for pair, logprobs in zip(pairs, scores, strict=True)]

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        return StepLoss(len(samples), self.loss)

    def loss(self, scores: Scores, packed: Packed) -> Loss:
        pairs = cast(Sequence[PairSample], packed.samples)
        # the log p of a long answer is large and the gain small: float32 would lose it
        logprobs_N, rows = scores.logprobs_N.double(), rows_of(packed)
        reference_R = logprobs_N.new_tensor([logprob for pair in pairs for logprob in pair.reference])
        preference = preference_loss(self._options, logprobs_N, rows, reference_R)
        nll = -rows.mean(logprobs_N)[0::2].sum()
        total = preference.sum + self._options.sft_weight * nll
        sums_R, count = rows.sum(logprobs_N), float(len(pairs))
        metrics = {
            "loss": (total, count),
            "preference_loss": (preference.sum, count),
            "sft_loss": (nll, count),
            "logps/chosen": (sums_R[0::2].sum(), count),
            "logps/rejected": (sums_R[1::2].sum(), count),
        }
        return Loss(total, preference.metrics | measured(metrics))


def create(setup: Setup) -> Dpo:
    """DPO with the options of a recipe."""
    assert isinstance(setup.recipe.algorithm, DpoOptions)
    return Dpo(setup.recipe.algorithm)


def rows_of(packed: Packed) -> Rows:
    """The two rows of each pair of a micro-batch, chosen before rejected."""
    segments = cast(Sequence[Side], packed.segments)
    rejected_S = torch.tensor([not segment.chosen for segment in segments], device=packed.sample_S.device)
    trained_S = torch.tensor([segment.trained for segment in segments], device=packed.sample_S.device)
    row_S = 2 * packed.sample_S + rejected_S
    return Rows(row_S.repeat_interleave(trained_S), 2 * len(packed.samples))


def _sample(pair: Pair) -> PairSample:
    chosen = [Side(segment.token_ids, segment.spans, chosen=True) for segment in pair.chosen.segments]
    rejected = [Side(segment.token_ids, segment.spans, chosen=False) for segment in pair.rejected.segments]
    return PairSample((*chosen, *rejected))


def _with_reference(pair: PairSample, logprobs: list[list[float]]) -> PairSample:
    """logprobs: by segment, by trained token."""
    sides = zip(cast(Sequence[Side], pair.segments), logprobs, strict=True)
    sums = [(side.chosen, math.fsum(each)) for side, each in sides]
    chosen, rejected = (math.fsum(value for side, value in sums if side is wanted) for wanted in (True, False))
    return replace(pair, reference=(chosen, rejected))
