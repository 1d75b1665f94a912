"""Advantage estimators: group statistics and GAE, and the test whether a group has a learning signal.

A group of one and a group of equal rewards have advantages of exactly 0. So does a reward of None (could not be
scored), which is also left out of its group's statistics. Rewards are equal up to rounding, as 0.1 + 0.2 and 0.3 are.

Flat arrays hold the sampled tokens only, in order of time, rollout after rollout:

    [ a a a a | b b | c c c ]      lengths_B = [4, 2, 3]

Tokens from tools are not among them: GAE steps from the last token before a tool's answer to the first one after it, as
if the answer were part of the environment's transition. This is exact across gaps and needs no mask.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..recipe.objective import Advantage

ROUNDING = 1e-6  # relative to the largest reward; float32 rounds at 6e-8
Reward = float | None
SMALLEST_VARIANCE = 1e-8


def advantages(options: Advantage, rewards_B: Sequence[Reward], groups_B: Sequence[Hashable]) -> list[float]:
    """One advantage for each rollout of the step, over all ranks.

    Args:
        rewards_B: None where a rollout could not be scored.
        groups_B: each rollout's group. Only the rollouts given here count; failed ones do not.

    Returns:
        [B]; with estimators `reward` and `gae` the rewards themselves, which are spread over the tokens later.
    """
    of_group = _ESTIMATORS[options.estimator]
    found = [0.0] * len(rewards_B)
    for members in _scored(rewards_B, groups_B):
        values = of_group([reward for _, reward in members], options.eps)
        for (index, _), value in zip(members, values, strict=True):
            found[index] = value
    return found


def component_advantages(
    options: Advantage,
    components_BK: Sequence[Sequence[Reward]],
    weights_K: Sequence[float],
    groups_B: Sequence[Hashable],
) -> list[float]:
    """GDPO (arXiv 2601.05242): normalize each reward within its group, add up, normalize over the step, [B, K] -> [B].

    A component of None adds nothing; a rollout without any component has advantage 0 and is left out of the statistics.
    """
    normalised_KB = [advantages(options, component_B, groups_B) for component_B in zip(*components_BK, strict=True)]
    whole_step: list[Reward] = []
    for index, rewards_K in enumerate(components_BK):
        terms = [weight * value_B[index] for weight, value_B in zip(weights_K, normalised_KB, strict=True)]
        whole_step.append(None if all(reward is None for reward in rewards_K) else math.fsum(terms))
    return advantages(options, whole_step, [0] * len(whole_step))


def less_kl(rewards_B: Sequence[Reward], kl_B: Sequence[float], coef: float) -> list[Reward]:
    """Rewards minus coef x each rollout's KL summed over its tokens (RLOO), before the baseline is subtracted."""
    pairs = zip(rewards_B, kl_B, strict=True)
    return [None if reward is None else reward - coef * kl for reward, kl in pairs]


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal up to rounding."""
    return max(rewards) - min(rewards) <= ROUNDING * max(map(abs, rewards))


def _scored(rewards_B: Sequence[Reward], groups_B: Sequence[Hashable]) -> list[list[tuple[int, float]]]:
    """The groups, as (index, reward) of each scored member."""
    groups: defaultdict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for index, (reward, group) in enumerate(zip(rewards_B, groups_B, strict=True)):
        if reward is not None:
            groups[group].append((index, reward))
    return list(groups.values())


def _reward(rewards: list[float], eps: float) -> list[float]:
    return rewards


def _group_mean(rewards: list[float], eps: float) -> list[float]:
    """r - mean. Dr. GRPO (arXiv 2503.20783), eq. 3."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def _group_std(rewards: list[float], eps: float) -> list[float]:
    """(r - mean) / (std + eps), the unbiased std. GRPO (arXiv 2402.03300), section 4.1.2."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean, std = fmean(rewards), _std(rewards)
    return [(reward - mean) / (std + eps) for reward in rewards]


def _leave_one_out(rewards: list[float], eps: float) -> list[float]:
    """r - mean of the others = k / (k - 1) (r - mean). RLOO (arXiv 2402.14740)."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    factor = len(rewards) / (len(rewards) - 1)
    return [factor * value for value in _group_mean(rewards, eps)]


def _leave_one_out_std(rewards: list[float], eps: float) -> list[float]:
    """(r - mean of the others) / (std of the others + eps); undivided if the others are equal. NeMo RL's default."""
    values = _leave_one_out(rewards, eps)
    others = [rewards[:index] + rewards[index + 1 :] for index in range(len(rewards))]
    return [
        value if not rest or all_equal(rest) else value / (_std(rest) + eps)
        for value, rest in zip(values, others, strict=True)
    ]


def _std(values: Sequence[float]) -> float:
    mean = fmean(values)
    # hypot instead of a sum of squares, which may overflow where the deviation does not
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)


_ESTIMATORS: dict[str, Callable[[list[float], float], list[float]]] = {
    "group_std": _group_std,
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "leave_one_out_std": _leave_one_out_std,
    "reward": _reward,
    "gae": _reward,
}


def informative(rewards: Sequence[Reward]) -> bool:
    """Dynamic sampling: whether a group has a gradient, that is, two scored rollouts that differ. Call before shaping."""
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) > 1 and not all_equal(scored)


def informative_components(components: Sequence[Mapping[str, Reward]]) -> bool:
    """The same for a group whose components are normalized separately: one that differs is enough."""
    names = {name for of_rollout in components for name in of_rollout}
    return any(informative([of_rollout.get(name) for of_rollout in components]) for name in names)


def soft_overlong(length: int, limit: int, buffer: int) -> float:
    """A penalty to add to the reward: 0 up to limit - buffer tokens, then linear to -1 at the limit and beyond.

    length: all sampled tokens of the rollout, over all its turns.
    """
    return min(0.0, max(-1.0, (limit - buffer - length) / buffer))


class Estimates(NamedTuple):
    """advantages_N, and returns_N = advantages + values, the targets of the critic."""

    advantages_N: Tensor
    returns_N: Tensor


def token_rewards(rewards_B: Sequence[float], lengths_B: Sequence[int], kl_N: Tensor, coef: float) -> Tensor:
    """-coef x KL on each token, and a rollout's reward (or advantage) on its last one, [N].

    kl_N: KL estimates without a gradient; zeros without a reference.
    """
    ends = torch.tensor(lengths_B, device=kl_N.device).cumsum(0) - 1
    present = torch.tensor([length > 0 for length in lengths_B], device=kl_N.device)
    finals = torch.tensor(rewards_B, dtype=kl_N.dtype, device=kl_N.device)
    return (-coef * kl_N).index_add(0, ends[present], finals[present])


def gae(rewards_N: Tensor, values_N: Tensor, lengths_B: Sequence[int], gamma: float, lam: float) -> Estimates:
    """Generalised advantage estimation (arXiv 1506.02438), eq. 16; after the last token the value is 0.

    values_N: the critic's value of the state in which each token was chosen.
    """
    grid = _Grid.of(lengths_B, rewards_N.device)
    rewards_TB, values_TB = grid.lay(rewards_N), grid.lay(values_N)
    advantages_TB = torch.zeros_like(rewards_TB)
    advantage = next_value = rewards_TB.new_zeros(rewards_TB.shape[1])
    for t in reversed(range(len(rewards_TB))):
        delta = rewards_TB[t] + gamma * next_value - values_TB[t]
        advantage = delta + gamma * lam * advantage
        advantages_TB[t] = advantage
        next_value = values_TB[t]
    advantages_N = grid.pick(advantages_TB)
    return Estimates(advantages_N, advantages_N + values_N)


def returns_to_go(rewards_N: Tensor, lengths_B: Sequence[int], gamma: float) -> Tensor:
    """The discounted rewards from each token on, [N] (REINFORCE, REINFORCE++)."""
    return gae(rewards_N, torch.zeros_like(rewards_N), lengths_B, gamma, 1.0).advantages_N


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """The share of the returns' variance that the values explain: 1 all, 0 none (or all returns equal), negative:
    misleading.
    """
    variance = float(returns_N.var(correction=0))
    return 1 - float((returns_N - values_N).var(correction=0)) / variance if variance > 0 else 0.0


class Moments(NamedTuple):
    """Sums over tokens; added up over all micro-batches and ranks, they are the moments of the step."""

    tokens: float
    total: float
    squares: float

    @classmethod
    def of(cls, values_N: Tensor) -> Self:
        values = values_N.double()
        return cls(float(len(values)), values.sum().item(), values.square().sum().item())


def whiten(values_N: Tensor, step: Moments) -> Tensor:
    """(value - mean) / std over all tokens of the step, [N]; exactly 0 where all of them are equal.

    The population variance, at least 1e-8, as for REINFORCE++ (arXiv 2501.03262) in OpenRLHF and NeMo RL.
    """
    mean = step.total / max(step.tokens, 1.0)
    variance = max(step.squares / max(step.tokens, 1.0) - mean * mean, 0.0)
    if math.sqrt(variance) <= ROUNDING * abs(mean):
        return torch.zeros_like(values_N)
    return (values_N - mean) / math.sqrt(max(variance, SMALLEST_VARIANCE))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Positions of the flat tokens in [T, B]; all rollouts end together, at T - 1."""

    time_N: Tensor
    rollout_N: Tensor
    longest: int
    rollouts: int

    @classmethod
    def of(cls, lengths_B: Sequence[int], device: torch.device) -> Self:
        """The grid for rollouts of these lengths."""
        lengths = torch.tensor(lengths_B, device=device)
        longest = max(lengths_B, default=0)
        rollout_N = torch.arange(len(lengths_B), device=device).repeat_interleave(lengths)
        ends_N = lengths.cumsum(0)[rollout_N]
        return cls(torch.arange(len(rollout_N), device=device) - ends_N + longest, rollout_N, longest, len(lengths_B))

    def lay(self, values_N: Tensor) -> Tensor:
        values_TB = values_N.new_zeros(self.longest, self.rollouts)
        values_TB[self.time_N, self.rollout_N] = values_N
        return values_TB

    def pick(self, values_TB: Tensor) -> Tensor:
        return values_TB[self.time_N, self.rollout_N]
