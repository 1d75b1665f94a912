"""Reward models: a scalar head on the policy network learns to score conversations as pairs or labels rank them.

    pairs      {"prompt", "chosen", "rejected", "margin"}: the score of the chosen answer is the higher one
    outcomes   {"prompt", "completion", "label"}: the score is the log odds that the answer is good
    steps      {"prompt", "completion", "labels"}: a score after each assistant turn, the log odds that it is good

A score is read after the last token of the conversation, as the chat template renders it without a generation prompt:
transformers' AutoModelForSequenceClassification and vLLM's /classify read the same. Steps are prefixes of one
conversation; packing computes what they share once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ngym.errors import UsageError

from ..data.chat_dataset import JudgedAnswer, read_judged
from ..data.samples import Sample, Segment
from ..losses.policy_loss import Loss, TokenRows
from ..losses.reward_loss import derive_metrics, label_loss, moments, pair_loss
from ..model.chunked_logprobs import RequestedScores, Scores
from ..model.packing import MicroBatch
from ..recipe.algorithms import RewardModelOptions
from . import Setup, StepLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSegment(Segment):
    """A conversation that is scored at its end: its only span is one past its last token.

    label: chosen, or good. length: tokens after the prompt.
    """

    label: bool
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSample(Sample):
    """A pair, an answer, or the steps of one. margin: of a pair."""

    margin: float = 0.0


class RewardModelTraining:
    asks = RequestedScores(logprobs=False, values=True)

    def __init__(self, options: RewardModelOptions) -> None:
        self._options = options

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        rows = read_judged(path, tokenizer, self._options.supervision)
        if self._options.margin_coef > 0 and any(row.margin is None for row in rows):
            raise UsageError(
                f"{path}: a pair without a number as its margin, which margin_coef needs; add it, or set 0"
            )
        return [JudgedSample(tuple(map(_segment, row.answers)), margin=row.margin or 0.0) for row in rows]

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        return list(samples)

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        pairs = self._options.supervision == "pairs"
        count = len(samples) if pairs else sum(len(sample.segments) for sample in samples)
        return StepLoss(count, self._loss, derive_metrics)

    def _loss(self, scores: Scores, packed: MicroBatch) -> Loss:
        assert scores.values_N is not None
        values_N, segments = scores.values_N.double(), cast(Sequence[JudgedSegment], packed.segments)
        labels_N = torch.tensor([segment.label for segment in segments], device=values_N.device)
        if self._options.supervision == "pairs":
            rows = TokenRows(2 * packed.sample_N + ~labels_N, 2 * len(packed.samples))
            margins = [sample.margin for sample in cast(Sequence[JudgedSample], packed.samples)]
            loss = pair_loss(self._options, rows.sum(values_N), values_N.new_tensor(margins))
        else:
            loss = label_loss(values_N, labels_N)
        lengths_N = torch.tensor([segment.length for segment in segments], device=values_N.device)
        return Loss(loss.sum, {**loss.totals, **moments(values_N, lengths_N)})


def create(setup: Setup) -> RewardModelTraining:
    """The training of a reward model, with the options of a recipe."""
    assert isinstance(setup.recipe.algorithm, RewardModelOptions)
    return RewardModelTraining(setup.recipe.algorithm)


def _segment(answer: JudgedAnswer) -> JudgedSegment:
    end = len(answer.token_ids)
    return JudgedSegment(answer.token_ids, [(end, end + 1)], label=answer.label, length=answer.length)
