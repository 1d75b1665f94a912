"""GRPO and its family: what stood out within its group becomes likelier. What exactly, objective.py says.

    rollouts -> groups -> advantages, on every token that the policy sampled -> ratio to the policy that sampled -> loss

All segments of a rollout share its advantage. Groups that teach nothing (equal rewards, one rollout) give exactly no
gradient, and are left out unless `shaping.skip_equal_groups` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import kl
from ..advantages import advantages, component_advantages, less_kl
from ..gae import Moments, returns_to_go, token_rewards, whiten
from ..losses import Tokens, policy_loss
from ..reduction import Loss, Rows, weigh
from ..rl import GrpoOptions
from ..rollouts import Rollout, Said, grouped, read_rollouts
from ..samples import Sample
from ..scoring import score
from ..shaping import informative, soft_overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine import Engine
    from ..model import Policy
    from ..packing import Packed


class Counted(NamedTuple):
    """What a rollout counts in the optimiser step: each of its tokens, and its part of the divisor."""

    token: float
    share: float


class Grpo:
    """One for a run.

    Args:
        updates: optimiser steps on one batch of rollouts, if that is known. At the first, the trainer's logprobs are those
            of now.
        reference: the policy that KL pulls to; it is needed, and asked, only with kl.coef above 0.
    """

    def __init__(self, options: GrpoOptions, updates: int | None, reference: Policy | None) -> None:
        self._options = options
        self._objective = options.objective
        self._updates = updates
        self._reference = reference
        self._counted: dict[int, Counted] = {}

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Rollouts with sampled tokens; failed and unscored ones teach nothing."""
        return [rollout for rollout in read_rollouts(path, self._options.temperature).rollouts if rollout.trained]

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        """The rollouts that teach something, with their advantages."""
        rollouts = self._teaching(cast(Sequence[Rollout], samples))
        if not rollouts:
            return []
        if self._asks_trainer:
            old = score(rollouts, engine.logprobs, engine, budget)
            rollouts = [_with(rollout, "old", values) for rollout, values in zip(rollouts, old, strict=True)]
        if self._reference is not None:
            reference = score(rollouts, self._reference, engine, budget)
            rollouts = [
                _with(rollout, "reference", values) for rollout, values in zip(rollouts, reference, strict=True)
            ]
        advantages = self._advantages(rollouts)
        rollouts = [_with(rollout, "advantages", values) for rollout, values in zip(rollouts, advantages, strict=True)]
        dropped = self._options.shaping.drop_truncated
        return [rollout for rollout in rollouts if not (dropped and rollout.truncated)]

    def weight(self, samples: Sequence[Sample]) -> float:
        """The divisor of an optimiser step; from here to the next call, `loss` is asked about its samples."""
        rollouts = cast(Sequence[Rollout], samples)
        weights = weigh(
            self._objective.loss.aggregation,
            [rollout.trained for rollout in rollouts],
            fixed_length=self._objective.loss.fixed_length,
            tasks_B=[rollout.group for rollout in rollouts],
        )
        self._counted = {
            id(rollout): Counted(token, share)
            for rollout, token, share in zip(rollouts, weights.token_B, weights.share_B, strict=True)
        }
        return weights.total

    def loss(self, logprobs_N: Tensor, packed: Packed) -> Loss:
        segments = cast(Sequence[Said], packed.segments)
        counted = [self._counted[id(sample)] for sample in packed.samples]

        def flat(lists: list[list[float] | None]) -> Tensor | None:
            known = [each for each in lists if each is not None]
            return logprobs_N.new_tensor([value for each in known for value in each]) if known else None

        advantages_N = flat([segment.advantages for segment in segments])
        assert advantages_N is not None, "the samples were not prepared"
        tokens = Tokens(
            logprobs_N=logprobs_N,
            advantages_N=advantages_N,
            rows=Rows(packed.sample_N, len(packed.samples)),
            weight_R=logprobs_N.new_tensor([each.token for each in counted]),
            share=sum(each.share for each in counted),
            old_N=flat([segment.old for segment in segments]),
            sampler_N=self.sampler_N(packed),
            reference_N=flat([segment.reference for segment in segments]),
        )
        return policy_loss(self._objective, tokens)

    def sampler_N(self, packed: Packed) -> Tensor:
        """The sampler's logprobs of a micro-batch's tokens."""
        segments = cast(Sequence[Said], packed.segments)
        said = [value for segment in segments for value in segment.sampler]
        return torch.tensor(said, device=packed.token_ids_T.device)

    @property
    def _asks_trainer(self) -> bool:
        """Whether the loss has to know what the trainer said before the first of several updates."""
        objective = self._objective
        return self._updates != 1 and (objective.loss.anchor == "trainer" or objective.correction.kind != "none")

    def _teaching(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        groups = grouped(rollout for rollout in rollouts if rollout.trained)
        if self._options.shaping.skip_equal_groups:
            groups = [group for group in groups if informative([rollout.reward for rollout in group])]
        return [rollout for group in groups for rollout in group]

    def _advantages(self, rollouts: Sequence[Rollout]) -> list[list[list[float]]]:
        """Of each rollout, of each segment, of each sampled token."""
        objective = self._objective
        lengths = [rollout.trained for rollout in rollouts]
        groups = [rollout.group for rollout in rollouts]
        coef = objective.kl.coef if objective.kl.where == "reward" else 0.0
        kl_N = self._kl(rollouts) if coef else torch.zeros(sum(lengths))
        if objective.advantage.components == "normalise_then_sum":
            names = sorted({name for rollout in rollouts for name in rollout.components})
            components = [[rollout.components.get(name) for name in names] for rollout in rollouts]
            values = component_advantages(objective.advantage, components, [1.0] * len(names), groups)
        else:
            rewards = [self._shaped(rollout) for rollout in rollouts]
            if coef and not objective.advantage.by_token:
                sums = [float(each.sum()) for each in kl_N.split(lengths)]
                rewards = cast(list[float], less_kl(rewards, sums, coef))
            values = advantages(objective.advantage, rewards, groups)
        if not objective.advantage.by_token:
            return [
                [[value] * segment.trained for segment in rollout.segments]
                for rollout, value in zip(rollouts, values, strict=True)
            ]
        values_N = returns_to_go(token_rewards(values, lengths, kl_N, coef), lengths, objective.advantage.gamma)
        if objective.advantage.whiten:
            values_N = whiten(values_N, Moments.of(values_N))
        pieces = iter(values_N.split([segment.trained for rollout in rollouts for segment in rollout.segments]))
        return [[next(pieces).tolist() for _ in rollout.segments] for rollout in rollouts]

    def _kl(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The estimate on each token, rollout after rollout."""
        segments = [segment for rollout in rollouts for segment in rollout.segments]
        said = torch.tensor([value for segment in segments for value in segment.old or segment.sampler])
        reference = torch.tensor([value for segment in segments for value in segment.reference or ()])
        return kl.estimate(said, reference, self._objective.kl.estimator)

    def _shaped(self, rollout: Rollout) -> float:
        overlong = self._options.shaping.soft_overlong
        if overlong is None:
            return rollout.reward
        return rollout.reward + overlong.weight * soft_overlong(rollout.trained, overlong.limit, overlong.buffer)


def _with(rollout: Rollout, name: str, values: Sequence[list[float]]) -> Rollout:
    """The rollout with this field of its segments."""
    fields: list[dict[str, Any]] = [{name: value} for value in values]
    segments = zip(rollout.segments, fields, strict=True)
    return replace(rollout, segments=tuple(replace(segment, **field) for segment, field in segments))
