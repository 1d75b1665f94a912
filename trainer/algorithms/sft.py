"""Supervised fine-tuning: the negative log-likelihood of the assistant's turns, a mean over the batch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.chat_dataset import read_demonstrations
from ..data.images import TEXT_ONLY, Images
from ..data.samples import Sample
from ..losses.policy_loss import nll_loss
from ..model.chunked_logprobs import RequestedScores, Scores
from . import Loss, Setup, StepLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine
    from ..model.packing import MicroBatch


class Sft:
    """loss = - sum of log p(token) / trained tokens of the batch.

    images: how the policy reads images, or the reason why it does not.
    """

    asks = RequestedScores()

    def __init__(self, images: Images = TEXT_ONLY) -> None:
        self._images = images

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return read_demonstrations(path, tokenizer, self._images)

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        return list(samples)

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        return StepLoss(sum(sample.trained for sample in samples), self.loss)

    def loss(self, scores: Scores, packed: MicroBatch) -> Loss:
        return nll_loss(scores.logprobs_N)


def create(setup: Setup) -> Sft:
    """Supervised fine-tuning, which has no options."""
    return Sft(setup.engine.policy.images)
