"""Advantages per token: rewards spread over a rollout, GAE or returns to go, whitened over the whole step.

Flat arrays hold the sampled tokens only, in order of time, rollout after rollout:

    [ a a a a | b b | c c c ]      lengths_B = [4, 2, 3]

Tokens from tools are not among them: GAE steps from the last token before a tool's answer to the first one after it, as
if the answer were part of the environment's transition. This is exact across gaps and needs no mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ngym.stats import ROUNDING

SMALLEST_VARIANCE = 1e-8


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
    rewards_TB, values_TB = grid.scatter(rewards_N), grid.scatter(values_N)
    advantages_TB = torch.zeros_like(rewards_TB)
    advantage = next_value = rewards_TB.new_zeros(rewards_TB.shape[1])
    for t in reversed(range(len(rewards_TB))):
        delta = rewards_TB[t] + gamma * next_value - values_TB[t]
        advantage = delta + gamma * lam * advantage
        advantages_TB[t] = advantage
        next_value = values_TB[t]
    advantages_N = grid.gather(advantages_TB)
    return Estimates(advantages_N, advantages_N + values_N)


def returns_to_go(rewards_N: Tensor, lengths_B: Sequence[int], gamma: float) -> Tensor:
    """The discounted rewards from each token on, [N] (REINFORCE, REINFORCE++)."""
    return gae(rewards_N, torch.zeros_like(rewards_N), lengths_B, gamma, 1.0).advantages_N


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """The share of the returns' variance that the values explain: 1 all, 0 none (or all returns equal), < 0 misleading."""
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

    def scatter(self, values_N: Tensor) -> Tensor:
        values_TB = values_N.new_zeros(self.longest, self.rollouts)
        values_TB[self.time_N, self.rollout_N] = values_N
        return values_TB

    def gather(self, values_TB: Tensor) -> Tensor:
        return values_TB[self.time_N, self.rollout_N]
