"""Logprobs of the sampled tokens of a micro-batch -> a sum to descend on, and what to know about it.

The sums are weighted by the optimiser step that they belong to (reduction.weigh), and the loop divides them, once, by that
step's total: policy, KL and entropy terms alike.

    ratio_N    = exp(logprobs - anchor)                    by token, or one a rollout
    policy_N   = clipped, cispo or reinforce               x correction_N
    loss       = sum of weight_N x (policy_N + kl.coef x kl_N - entropy_coef x entropy_N)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..recipe.objective import Critic, Objective, PolicyLoss
from . import kl
from .importance_sampling import EXPONENT, correct, mismatch
from .reduction import Loss, Rows, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The sampled tokens of a micro-batch, flat; only logprobs_N and entropy_N carry a gradient.

    rows: the rollout of each. weight_R, share: of these rollouts, from `weigh`; share is their part of the divisor.
    old_N: the trainer's logprobs before its first update on this batch; None on that first update, when they are the same.
    sampler_N: the sampler's. reference_N: the reference policy's. entropy_N: of the whole distribution at each token.
    """

    logprobs_N: Tensor
    advantages_N: Tensor
    rows: Rows
    weight_R: Tensor
    share: float
    old_N: Tensor | None = None
    sampler_N: Tensor | None = None
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None


def policy_loss(objective: Objective, tokens: Tokens) -> Loss:
    """The objective summed over a micro-batch.

    Raises:
        ValueError: a tensor that the objective asks for is not there.
    """
    weight_N, count = tokens.rows.spread(tokens.weight_R), float(len(tokens.logprobs_N))
    trainer_N = tokens.logprobs_N.detach() if tokens.old_N is None else tokens.old_N
    anchor_N = trainer_N if objective.loss.anchor == "trainer" else _given(tokens.sampler_N, "sampler_N")
    terms_N, totals = _surrogate(objective.loss, tokens, anchor_N)
    if tokens.sampler_N is not None:
        totals |= mismatch(trainer_N, tokens.sampler_N)
    if objective.correction.kind != "none":
        sampler_N = _given(tokens.sampler_N, "sampler_N")
        corrected = correct(objective.correction, trainer_N, sampler_N, tokens.rows)
        terms_N = corrected.weights_N * terms_N
        totals |= corrected.totals
    totals["actor_loss"] = ((weight_N * terms_N).sum(), tokens.share)
    if objective.kl.coef > 0 and objective.kl.where == "loss":
        kl_N = kl.term(objective.kl, tokens.logprobs_N, _given(tokens.reference_N, "reference_N"), anchor_N)
        terms_N = terms_N + objective.kl.coef * kl_N
        totals["kl_penalty"] = (kl_N.sum(), count)
    elif tokens.reference_N is not None:  # it is in the advantages; here it is told
        kl_N = kl.estimate(tokens.logprobs_N.detach(), tokens.reference_N, objective.kl.estimator)
        totals["kl_penalty"] = (kl_N.sum(), count)
    if objective.loss.entropy_coef > 0:
        terms_N = terms_N - objective.loss.entropy_coef * _given(tokens.entropy_N, "entropy_N")
    if tokens.entropy_N is not None:
        totals["entropy"] = (tokens.entropy_N.sum(), count)
    total = (weight_N * terms_N).sum()
    return Loss(total, measured(totals | {"loss": (total, tokens.share)}))


def nll_loss(logprobs_N: Tensor) -> Loss:
    """Supervised fine-tuning: minus the sum of log p; the loop divides by the step's trained tokens."""
    total = -logprobs_N.sum()
    return Loss(total, measured({"loss": (total, float(len(logprobs_N)))}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The critic's values of the sampled tokens, flat; only values_N carries a gradient.

    old_N: before the first update on this batch. returns_N: what they should have been. The rest: as in Tokens.
    """

    values_N: Tensor
    old_N: Tensor
    returns_N: Tensor
    rows: Rows
    weight_R: Tensor
    share: float


def value_loss(critic: Critic, values: Values) -> Loss:
    """Half the squared error; of a value that moved further than value_clip, the larger of its own and of the clipped one's.

    As in OpenAI's implementation of PPO (baselines, ppo2).
    """
    values_N, clip, count = values.values_N, critic.value_clip, float(len(values.values_N))
    near_N = values_N if clip is None else values.old_N + (values_N - values.old_N).clamp(-clip, clip)
    error_N, clipped_N = (values_N - values.returns_N).square(), (near_N - values.returns_N).square()
    total = (values.rows.spread(values.weight_R) * torch.maximum(error_N, clipped_N) / 2).sum()
    totals = {
        "value_loss": (total, values.share),
        "value_clip_ratio": ((clipped_N > error_N).sum(), count),
        "values": (values_N.sum(), count),
        "returns": (values.returns_N.sum(), count),
    }
    return Loss(total, measured(totals))


class _Surrogate(NamedTuple):
    terms_N: Tensor
    totals: dict[str, tuple[Tensor, float]]


def _surrogate(options: PolicyLoss, tokens: Tokens, anchor_N: Tensor) -> _Surrogate:
    """What each token adds to the loss, before its correction."""
    advantages_N, logprobs_N = tokens.advantages_N, tokens.logprobs_N
    if options.surrogate == "reinforce":
        return _Surrogate(-advantages_N * logprobs_N, {})
    ratio_N = _ratio(options, logprobs_N - anchor_N, tokens.rows)
    low, high = 1 - options.clip_low, 1 + options.clip_high
    clamped_N = ratio_N.clamp(low, high)
    below_N, above_N = ratio_N < low, ratio_N > high
    if options.surrogate == "cispo":  # every token keeps its gradient; only the weight on it is bounded
        terms_N = -clamped_N.detach() * advantages_N * logprobs_N
    else:
        terms_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * clamped_N)
        below_N, above_N = below_N & (advantages_N < 0), above_N & (advantages_N > 0)
        if options.dual_clip is not None:  # arXiv 1912.09729, eq. 5
            bounded_N = terms_N.minimum(-advantages_N * options.dual_clip)
            terms_N = bounded_N.where(advantages_N < 0, terms_N)
    count = float(len(ratio_N))
    totals = {
        "probs_ratio": (ratio_N.sum(), count),
        "probs_ratio_clamped": (clamped_N.sum(), count),
        "clip_ratio/low_mean": (below_N.sum(), count),
        "clip_ratio/high_mean": (above_N.sum(), count),
        "clip_ratio/region_mean": ((below_N | above_N).sum(), count),
    }
    return _Surrogate(terms_N, totals)


def _ratio(options: PolicyLoss, log_ratio_N: Tensor, rows: Rows) -> Tensor:
    if options.ratio == "sequence":  # GSPO (arXiv 2507.18071), eq. 7
        log_ratio_N = rows.spread(rows.mean(log_ratio_N))
    elif options.ratio == "product":
        log_ratio_N = rows.spread(rows.sum(log_ratio_N))
    return log_ratio_N.clamp(-EXPONENT, EXPONENT).exp()


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the objective needs Tokens.{name}")
    return tensor
