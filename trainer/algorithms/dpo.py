"""Preference pairs, DPO and its kin: raises the likelihood of chosen over rejected answers.

    loss = mean over the batch's pairs of preference + sft_weight x nll

    preference    of the margin between the two sides (formulas: losses/preference_loss.py)
    nll           - log p of the chosen side, a mean over its tokens: keeps its likelihood from falling, as in plain DPO

A side is everything that the assistant says after the prompt, over all its turns. The two sides of a pair are the
segments of one sample, so they always share a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ..data.chat_dataset import Pair, read_pairs
from ..data.images import TEXT_ONLY, Images
from ..data.samples import Sample, Segment
from ..engine.engine import score
from ..losses.policy_loss import Loss, TokenRows
from ..losses.preference_loss import preference_loss
from ..model.chunked_logprobs import RequestedScores, Scores
from ..model.packing import MicroBatch
from ..recipe.algorithms import PreferenceOptions
from ..recipe.objective import Preference
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
    """reference: log p of the chosen and of the rejected side under the starting policy, or 0; nan until `prepare`."""

    reference: tuple[float, float] = (float("nan"), float("nan"))

    @property
    def chosen_tokens(self) -> int:
        return sum(side.trained for side in cast(Sequence[Side], self.segments) if side.chosen)


class Dpo:
    """images: how the policy reads images, or the reason why it does not."""

    def __init__(self, options: Preference, images: Images = TEXT_ONLY) -> None:
        self._options = options
        self._images = images

    @property
    def asks(self) -> RequestedScores:
        return RequestedScores(collision=self._options.weighted)

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return [_sample(pair) for pair in read_pairs(path, tokenizer, self._images)]

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        """The pairs with their reference: the current policy's log p of both sides, unless the loss uses none."""
        pairs = cast(Sequence[PairSample], samples)
        if self._options.reference_free:
            return [replace(pair, reference=(0.0, 0.0)) for pair in pairs]
        scores = score(pairs, engine.logprobs, engine, budget)
        return [with_reference(pair, logprobs) for pair, logprobs in zip(pairs, scores, strict=True)]

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        pairs = cast(Sequence[PairSample], samples)
        token_weight = len(pairs) / max(1, sum(pair.chosen_tokens for pair in pairs))
        by_token = self._options.sft_aggregation == "token"
        return StepLoss(len(pairs), partial(self._loss, sft_weight=token_weight if by_token else None))

    def _loss(self, scores: Scores, packed: MicroBatch, sft_weight: float | None) -> Loss:
        pairs = cast(Sequence[PairSample], packed.samples)
        # the log p of a long answer is large and the gain small: float32 would lose it
        logprobs_N, rows = scores.logprobs_N.double(), rows_of(packed)
        reference_R = logprobs_N.new_tensor([logprob for pair in pairs for logprob in pair.reference])
        weight_P = None if sft_weight is None else logprobs_N.new_full((len(pairs),), sft_weight)
        loss = preference_loss(self._options, logprobs_N, rows, reference_R, weight_P, scores.collision_N)
        sums_R, count = rows.sum(logprobs_N), float(len(pairs))
        logps = {"logps/chosen": (sums_R[0::2].sum(), count), "logps/rejected": (sums_R[1::2].sum(), count)}
        return Loss(loss.sum, {**loss.totals, **logps})


def create(setup: Setup) -> Dpo:
    """DPO or its kin, with the options of a recipe."""
    assert isinstance(setup.recipe.algorithm, PreferenceOptions)
    return Dpo(setup.recipe.algorithm, setup.engine.policy.images)


def rows_of(packed: MicroBatch) -> TokenRows:
    """The two rows of each pair of a micro-batch, chosen before rejected."""
    segments = cast(Sequence[Side], packed.segments)
    rejected_S = torch.tensor([not segment.chosen for segment in segments], device=packed.sample_S.device)
    trained_S = torch.tensor([segment.trained for segment in segments], device=packed.sample_S.device)
    row_S = 2 * packed.sample_S + rejected_S
    return TokenRows(row_S.repeat_interleave(trained_S), 2 * len(packed.samples))


def _sample(pair: Pair) -> PairSample:
    return PairSample(
        tuple(
            Side(segment.token_ids, segment.spans, segment.images, chosen=sample is pair.chosen)
            for sample in pair
            for segment in sample.segments
        )
    )


def with_reference(pair: PairSample, logprobs: list[list[float]]) -> PairSample:
    """The pair with the reference's log p of both sides. logprobs: by segment, by trained token."""
    sides = zip(cast(Sequence[Side], pair.segments), logprobs, strict=True)
    sums = [(side.chosen, math.fsum(terms)) for side, terms in sides]
    chosen, rejected = (math.fsum(value for side, value in sums if side is is_chosen) for is_chosen in (True, False))
    return replace(pair, reference=(chosen, rejected))
