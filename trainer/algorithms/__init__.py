"""The interface of an algorithm: rows to samples, and scores to a loss.

The loss is a plain sum over a micro-batch. The loop divides it by the divisor of the whole optimizer step, so the
result does not depend on how a batch is cut into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..data.samples import Sample
from ..losses.policy_loss import Loss
from ..model.chunked_logprobs import RequestedScores, Scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine
    from ..model.packing import MicroBatch
    from ..recipe.recipe import Recipe

__all__ = ["Algorithm", "Loss", "Setup", "StepLoss"]


class Setup(NamedTuple):
    """The inputs of an algorithm. The engine's policy has the weights with which training begins."""

    recipe: Recipe
    engine: Engine
    tokenizer: PreTrainedTokenizerBase


class Derived(Protocol):
    def __call__(self, means: dict[str, float], *, bins: bool) -> dict[str, float]: ...


def as_measured(means: dict[str, float], *, bins: bool) -> dict[str, float]:
    """The means themselves."""
    return means


class StepLoss(NamedTuple):
    """The loss of one optimizer step.

    divisor: for the sum over all micro-batches: the trained tokens, sequences or pairs.
    loss: summed over a micro-batch of the step's samples.
    derived: the metrics to report from the means of those of `loss`; bins: also distributions, for held-out samples.
    """

    divisor: float
    loss: Callable[[Scores, MicroBatch], Loss]
    derived: Derived = as_measured


class Algorithm(Protocol):
    """An algorithm; each is one small file of this folder."""

    @property
    def asks(self) -> RequestedScores:
        """The outputs of the network that the loss needs for each token of a training step."""

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """The samples of a JSONL file."""

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        """The samples with what the loss needs from the policy before the first step. Every rank calls it.

        budget: tokens that a rank computes at once.
        """

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        """The loss of one optimizer step on these samples of all ranks. It holds references to them."""
