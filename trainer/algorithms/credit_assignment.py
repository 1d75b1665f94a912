"""Credit assignment: the advantage of each token that the policy sampled; with a critic, also each token's return.

rewards, components -> one advantage a rollout -> on each of its tokens
rewards, KL, values -> one reward a token      -> GAE or returns to go -> whitened
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ..data.samples import Rollout, filled
from ..losses.advantages import (
    advantages,
    component_advantages,
    informative,
    informative_components,
    less_kl,
    soft_overlong,
)
from ..losses.gae import Moments, gae, returns_to_go, token_rewards, whiten
from ..losses.policy_loss import kl_estimate
from ..recipe.algorithms import PolicyGradientOptions


def credited(options: PolicyGradientOptions, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with `advantages`; with estimator gae, which reads their `values`, also with `returns`."""
    objective, lengths = options.objective, [rollout.trained for rollout in rollouts]
    advantage = objective.advantage
    coef = objective.kl.coef if objective.kl.where == "reward" else 0.0
    kl_N = _kl(options, rollouts) if coef else torch.zeros(sum(lengths))
    values_B = _of_rollouts(options, rollouts, kl_N, coef)
    if not advantage.by_token:
        on_all = [
            [[value] * segment.trained for segment in rollout.segments]
            for rollout, value in zip(rollouts, values_B, strict=True)
        ]
        return filled(rollouts, "advantages", on_all)
    rewards_N = token_rewards(values_B, lengths, kl_N, coef)
    if advantage.estimator == "gae":
        said = [value for rollout in rollouts for segment in rollout.segments for value in segment.values or ()]
        estimates = gae(rewards_N, torch.tensor(said), lengths, advantage.gamma, advantage.lam)
        rollouts = filled(rollouts, "returns", _by_segment(rollouts, estimates.returns_N))
        advantages_N = estimates.advantages_N
    else:
        advantages_N = returns_to_go(rewards_N, lengths, advantage.gamma)
    if advantage.whiten:
        advantages_N = whiten(advantages_N, Moments.of(advantages_N))
    return filled(rollouts, "advantages", _by_segment(rollouts, advantages_N))


def teaches(options: PolicyGradientOptions, group: Sequence[Rollout]) -> bool:
    """Whether a group has a learning signal: its rewards, or one of its separate components, are not all equal."""
    if options.advantage.components == "sum":
        return informative([rollout.reward for rollout in group])
    return informative_components([rollout.components for rollout in group])


def _of_rollouts(options: PolicyGradientOptions, rollouts: Sequence[Rollout], kl_N: Tensor, coef: float) -> list[float]:
    """The advantage of each rollout, or its reward if the estimator spreads it over its tokens later, [B]."""
    groups = [rollout.group for rollout in rollouts]
    if options.advantage.components == "normalise_then_sum":
        names = sorted({name for rollout in rollouts for name in rollout.components})
        components = [[rollout.components.get(name) for name in names] for rollout in rollouts]
        return component_advantages(options.advantage, components, [1.0] * len(names), groups)
    rewards = [_shaped(options, rollout) for rollout in rollouts]
    if coef and not options.advantage.by_token:
        sums = [float(each.sum()) for each in kl_N.split([rollout.trained for rollout in rollouts])]
        rewards = cast(list[float], less_kl(rewards, sums, coef))
    return advantages(options.advantage, rewards, groups)


def _kl(options: PolicyGradientOptions, rollouts: Sequence[Rollout]) -> Tensor:
    """The KL estimate of each token, rollout after rollout, [N]."""
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    said = torch.tensor([value for segment in segments for value in segment.old or segment.sampler])
    reference = torch.tensor([value for segment in segments for value in segment.reference or ()])
    return kl_estimate(said, reference, options.kl.estimator)


def _shaped(options: PolicyGradientOptions, rollout: Rollout) -> float:
    overlong = options.shaping.soft_overlong
    if overlong is None:
        return rollout.reward
    return rollout.reward + overlong.weight * soft_overlong(rollout.trained, overlong.limit, overlong.buffer)


def _by_segment(rollouts: Sequence[Rollout], values_N: Tensor) -> list[list[list[float]]]:
    """values_N as nested lists: by rollout, by segment, by token."""
    pieces = iter(values_N.split([segment.trained for rollout in rollouts for segment in rollout.segments]))
    return [[next(pieces).tolist() for _ in rollout.segments] for rollout in rollouts]
