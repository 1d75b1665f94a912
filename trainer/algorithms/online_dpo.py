"""Online DPO: pairs from the policy's own rollouts, the best of each group against its worst (arXiv 2402.04792).

    rollouts -> groups with different rewards -> (best, worst) -> the loss of algorithms/dpo.py

The reference is the policy at the start of the run, as a second network or as the one without its adapter. It scores
both sides of each pair when the rollouts arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ngym.stats import all_equal

from ..data.images import TEXT_ONLY, Images
from ..data.samples import RolloutSample, Sample, group_by_task, trainable_rollouts
from ..engine.engine import score
from ..model.chunked_logprobs import RequestedScores
from ..model.packing import MicroBatch
from ..recipe.algorithms import OnlineDpoOptions
from . import Setup, StepLoss
from .dpo import Dpo, PairSample, Side, with_reference
from .policy_gradient import initial_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine


class OnlineDpo:
    """reference: logprobs [N] of a micro-batch under the policy at the start; None for a loss without a reference.
    images: how the policy reads images, or the reason why it does not.
    """

    def __init__(
        self,
        options: OnlineDpoOptions,
        reference: Callable[[MicroBatch], Tensor] | None,
        images: Images = TEXT_ONLY,
    ) -> None:
        self._options = options
        self._images = images
        self._dpo = Dpo(options.preference)
        self._reference = reference

    @property
    def asks(self) -> RequestedScores:
        return self._dpo.asks

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Rollouts with sampled tokens; failed and unscored ones are left out."""
        options = self._options
        return trainable_rollouts(path, options.temperature, options.task_fields, self._images)

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        """A pair of each group with different rewards, with the reference's log p of both sides."""
        rollouts = [rollout for rollout in cast(Sequence[RolloutSample], samples) if rollout.trained]
        groups = [group for group in group_by_task(rollouts) if not all_equal([rollout.reward for rollout in group])]
        pairs = [_make_pair(group) for group in groups]
        if self._reference is None or not pairs:
            return list(self._dpo.prepare(pairs, engine, budget))
        scores = score(pairs, self._reference, engine, budget)
        return [with_reference(pair, logprobs) for pair, logprobs in zip(pairs, scores, strict=True)]

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        return self._dpo.step_loss(samples)


def create(setup: Setup) -> OnlineDpo:
    """Online DPO with the options of a recipe."""
    options = setup.recipe.algorithm
    assert isinstance(options, OnlineDpoOptions)
    reference = None if options.preference.reference_free else initial_policy(setup, options.temperature)
    return OnlineDpo(options, reference, setup.engine.policy.images)


def _make_pair(group: Sequence[RolloutSample]) -> PairSample:
    best, worst = (choose(group, key=lambda rollout: rollout.reward) for choose in (max, min))
    sides = [
        Side(segment.token_ids, segment.spans, segment.images, chosen=rollout is best)
        for rollout in (best, worst)
        for segment in rollout.segments
    ]
    return PairSample(tuple(sides))
