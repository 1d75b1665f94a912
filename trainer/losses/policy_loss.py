"""The policy-gradient loss: ratios, clipping, importance sampling, KL, and its reduction.

With d = log p - log p_ref of a sampled token: k1 = d, k2 = d^2 / 2 and k3 = exp(-d) - 1 + d estimate
KL(policy || reference). k2 and k3 are never negative, k1 and k3 are unbiased, k2 nearly so
(http://joschu.net/blog/kl-approx.html).

As losses they differ in their gradients. d/dtheta KL = E[d x grad log p]. The pathwise gradient of k1 is zero on
average, that of k3 belongs to KL(reference || policy), that of k2 is correct on-policy. With the score-function term k
x grad log p and the ratio r of p to the sampling p, k3 has the gradient r d grad log p, and k1 the same plus a term
that is zero on average. So `exact` uses r d grad log p for all of them, and the estimator only decides what is
reported. This agrees with TRL's use_bias_correction_kl and NeMo RL for k3, and with OpenRLHF's unbiased_gradient for
all.

The sampler (vLLM) rounds differently, uses other kernels and may be a version behind. Corrections with
w = p(trainer) / p(sampler), without a gradient:

token         w, clipped to [low, high]: TIS               https://fengyao.notion.site/off-policy-rl
sequence      the product of a rollout's w, clipped to [low, high]
icepop        w, or 0 outside of [low, high]               https://ringtech.notion.site/icepop
sequence_mask w, or 0 for a whole rollout whose geometric mean of w is outside of [low, high]
product_mask  the product of a rollout's w, or 0 outside of [low, high]

    ratio_N    = exp(logprobs - anchor)                    by token, or one a rollout
    policy_N   = clipped, cispo, sapo or reinforce         x correction_N
    loss       = sum of weight_N x (policy_N + kl.coef x kl_N - entropy_coef x entropy_N) / total

`loss_weights` computes weight and total from all rollouts of the optimizer step, so cutting the step into micro-batches and
ranks changes nothing; the loop divides by total once. Dropped tokens stay in total: a step with many of them is a small
one. A rollout without trained tokens does not count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..recipe.objective import Aggregation, Correction, Kl, KlEstimator, Objective, PolicyLoss

CAP = 10.0  # limit of an estimate and of the ratio: one token must not outweigh a batch
EXPONENT = 20.0  # exp of it is finite in float32
Totals = Mapping[str, tuple[Tensor | float, float]]  # a metric as a sum, a scalar on the device, and its divisor


def kl_estimate(logprobs_N: Tensor, reference_N: Tensor, estimator: KlEstimator, cap: float = CAP) -> Tensor:
    """k1, k2 or k3 of each token, [N], within [-cap, cap]; differentiable, with the pathwise gradient."""
    d = logprobs_N - reference_N
    if estimator == "k1":
        k = d
    elif estimator == "k2":
        k = d.square() / 2
    else:
        k = torch.expm1((-d).clamp(max=EXPONENT)) + d
    return k.clamp(-cap, cap)


def kl_term(options: Kl, logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor) -> Tensor:
    """The term that each token adds to the loss before `coef`, [N]. old_N: the logprobs in the denominator of the
    ratio.
    """
    k = kl_estimate(logprobs_N, reference_N, options.estimator)
    if options.gradient == "pathwise":
        return k
    now_N = logprobs_N.detach()
    ratio = (now_N - old_N).clamp(max=math.log(CAP)).exp()
    pull = ratio * (now_N - reference_N)
    return ratio * k.detach() + pull * (logprobs_N - now_N)


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as a sum and its divisor; both are added up over micro-batches and ranks."""

    total: float
    count: float


def log_values(means: Mapping[str, Mean]) -> dict[str, float]:
    """The values of these metrics. A metric without a count is a sum; the mean of nothing is left out."""
    return {
        name: mean.total / max(mean.count, 1.0) for name, mean in means.items() if mean.count > 0 or mean.total != 0
    }


class Loss(NamedTuple):
    """sum: the scalar to minimize, not yet divided. totals: of the metrics, by name."""

    sum: Tensor
    totals: Totals

    @property
    def metrics(self) -> dict[str, Mean]:
        """The metrics as numbers. On a GPU, it waits for them."""
        return measure(self.totals)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows that the flat tokens of a micro-batch belong to: rollouts, or the answers of preference pairs.

    row_N: int64, in any order: a row's tokens need not be neighbours. count: R, rows without tokens included.
    """

    row_N: Tensor
    count: int

    def sum(self, values_N: Tensor) -> Tensor:
        """Over the tokens of each row, [N] -> [R]."""
        return values_N.new_zeros(self.count).index_add(0, self.row_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Over the tokens of each row, [N] -> [R]; 0 where a row has none."""
        return self.sum(values_N) / self.lengths.clamp(min=1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, int64 [R]."""
        return self.sum(torch.ones_like(self.row_N))

    def spread(self, values_R: Tensor) -> Tensor:
        """Give each token its row's value, [R] -> [N]."""
        return values_R.index_select(0, self.row_N)


class Weights(NamedTuple):
    """For each rollout of a step: token_B, the weight of each of its tokens; share_B, its part of the divisor."""

    token_B: list[float]
    share_B: list[float]

    @property
    def total(self) -> float:
        """The divisor of the step: tokens, rollouts or tasks; 0 if nothing is trained."""
        return math.fsum(self.share_B)


def loss_weights(
    aggregation: Aggregation,
    lengths_B: Sequence[int],
    *,
    fixed_length: int | None = None,
    tasks_B: Sequence[Hashable] = (),
) -> Weights:
    """Weights of all rollouts of an optimizer step, over all ranks.

    Args:
        lengths_B: trained tokens of each rollout, over all its segments; 0 for one that is left out.
        fixed_length: the divisor of aggregation `fixed` (Dr. GRPO, arXiv 2503.20783).
        tasks_B: each rollout's task, for aggregation `prompt`.
    """
    present_B = [float(length > 0) for length in lengths_B]
    if aggregation == "token":
        return Weights(present_B, [float(length) for length in lengths_B])
    if aggregation == "sequence":
        return Weights([1 / length if length else 0.0 for length in lengths_B], present_B)
    if aggregation == "fixed":
        if fixed_length is None:
            raise ValueError("aggregation fixed needs fixed_length")
        return Weights([present / fixed_length for present in present_B], present_B)
    of_task: defaultdict[Hashable, int] = defaultdict(int)
    for task, length in zip(tasks_B, lengths_B, strict=True):
        of_task[task] += length
    token_B = [1 / of_task[task] if length else 0.0 for task, length in zip(tasks_B, lengths_B, strict=True)]
    return Weights(token_B, [weight * length for weight, length in zip(token_B, lengths_B, strict=True)])


def detach_totals(totals: Totals) -> Totals:
    """The totals without their graph, so that they can be read after the backward."""
    return {
        name: (total.detach() if isinstance(total, Tensor) else total, count) for name, (total, count) in totals.items()
    }


def measure(totals: Totals) -> dict[str, Mean]:
    """Metrics of a micro-batch; one transfer from the device for all of them."""
    on_device = {name: total.detach().double() for name, (total, _) in totals.items() if isinstance(total, Tensor)}
    values = dict(zip(on_device, torch.stack([*on_device.values()]).tolist(), strict=True)) if on_device else {}
    return {
        name: Mean(values[name] if name in values else float(total), count) for name, (total, count) in totals.items()
    }


class CorrectionWeights(NamedTuple):
    """weights_N: factors of each token's policy term."""

    weights_N: Tensor
    totals: Totals


def correct(options: Correction, trainer_N: Tensor, sampler_N: Tensor, rows: TokenRows) -> CorrectionWeights:
    """Importance weights of the tokens.

    Args:
        options: of a kind other than none.
        trainer_N: the trainer's logprobs before its step, without gradient.
        sampler_N: the sampler's, as recorded with the rollout.
    """
    low, high = options.bounds
    log_w_N = trainer_N - sampler_N
    w_N = _exp(log_w_N)
    bounded_N = w_N  # what is compared with the bounds
    if options.kind in ("sequence", "product_mask"):
        bounded_N = _exp(rows.spread(rows.sum(log_w_N)))
    elif options.kind == "sequence_mask":
        bounded_N = _exp(rows.spread(rows.mean(log_w_N)))
    outside_N = (bounded_N < low) | (bounded_N > high)
    cuts = options.kind in ("token", "sequence")
    factor_N = bounded_N if options.kind == "product_mask" else w_N
    weights_N = bounded_N.clamp(low, high) if cuts else factor_N.masked_fill(outside_N, 0.0)

    tokens = float(len(weights_N))
    dropped_N = weights_N == 0
    dropped_R = (rows.sum(dropped_N.long()) == rows.lengths) & (rows.lengths > 0)
    totals = {
        "sampling_importance_ratio": (weights_N.sum(), tokens),
        "is_oob_ratio": (outside_N.sum(), tokens),
        "is_dropped_ratio": (dropped_N.sum(), tokens),
        "is_dropped_sequences": (dropped_R.sum(), float(rows.count)),
    }
    return CorrectionWeights(weights_N, totals)


def mismatch(trainer_N: Tensor, sampler_N: Tensor) -> Totals:
    """The distance between trainer and sampler, before any correction.

    token_mult_prob_error: mean of exp |difference|, 1 when they agree. With equal weights, above 1.05 something is wrong
    (NeMo RL).
    mismatch_kl: k3 of KL(sampler || trainer).
    """
    difference_N = (trainer_N.detach() - sampler_N).clamp(-EXPONENT, EXPONENT)
    count = float(len(difference_N))
    return {
        "token_mult_prob_error": (difference_N.abs().exp().sum(), count),
        "mismatch_kl": ((torch.expm1(difference_N) - difference_N).sum(), count),
    }


def _exp(log_N: Tensor) -> Tensor:
    return log_N.clamp(-EXPONENT, EXPONENT).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The sampled tokens of a micro-batch, flat; only logprobs_N and entropy_N carry a gradient.

    rows: the rollout of each. weight_R, share: from `loss_weights`, for these rollouts; share is their part of the divisor.
    old_N: the trainer's logprobs before its first update on this batch; None on that first update, when they are equal.
    sampler_N: the sampler's. reference_N: the reference policy's. entropy_N: of each token's whole distribution.
    """

    logprobs_N: Tensor
    advantages_N: Tensor
    rows: TokenRows
    weight_R: Tensor
    share: float
    old_N: Tensor | None = None
    sampler_N: Tensor | None = None
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None


def policy_loss(objective: Objective, tokens: Tokens) -> Loss:
    """The loss of the objective, summed over a micro-batch.

    Raises:
        ValueError: a tensor that the objective needs is missing.
    """
    weight_N, count = tokens.rows.spread(tokens.weight_R), float(len(tokens.logprobs_N))
    trainer_N = tokens.logprobs_N.detach() if tokens.old_N is None else tokens.old_N
    anchor_N = trainer_N if objective.loss.anchor == "trainer" else _required(tokens.sampler_N, "sampler_N")
    terms_N, of_surrogate = _surrogate(objective.loss, tokens, anchor_N)
    totals = dict(of_surrogate)
    if tokens.sampler_N is not None:
        totals |= mismatch(trainer_N, tokens.sampler_N)
    if objective.correction.kind != "none":
        sampler_N = _required(tokens.sampler_N, "sampler_N")
        corrected = correct(objective.correction, trainer_N, sampler_N, tokens.rows)
        terms_N = corrected.weights_N * terms_N
        totals |= corrected.totals
    totals["actor_loss"] = ((weight_N * terms_N).sum(), tokens.share)
    if objective.kl.coef > 0 and objective.kl.where == "loss":
        kl_N = kl_term(objective.kl, tokens.logprobs_N, _required(tokens.reference_N, "reference_N"), anchor_N)
        terms_N = terms_N + objective.kl.coef * kl_N
        totals["kl_penalty"] = (kl_N.sum(), count)
    elif tokens.reference_N is not None:  # the KL is in the advantages; here it is only reported
        kl_N = kl_estimate(tokens.logprobs_N.detach(), tokens.reference_N, objective.kl.estimator)
        totals["kl_penalty"] = (kl_N.sum(), count)
    if objective.loss.entropy_coef > 0:
        terms_N = terms_N - objective.loss.entropy_coef * _required(tokens.entropy_N, "entropy_N")
    if tokens.entropy_N is not None:
        totals["entropy"] = (tokens.entropy_N.sum(), count)
    total = (weight_N * terms_N).sum()
    return Loss(total, totals | {"loss": (total, tokens.share)})


def nll_loss(logprobs_N: Tensor) -> Loss:
    """Supervised fine-tuning: minus the sum of log p; the loop divides by the step's trained tokens."""
    total = -logprobs_N.sum()
    return Loss(total, {"loss": (total, float(len(logprobs_N)))})


class _Surrogate(NamedTuple):
    terms_N: Tensor
    totals: Totals


def _surrogate(options: PolicyLoss, tokens: Tokens, anchor_N: Tensor) -> _Surrogate:
    """The term that each token adds to the loss, before its correction."""
    advantages_N, logprobs_N = tokens.advantages_N, tokens.logprobs_N
    if options.surrogate == "reinforce":
        return _Surrogate(-advantages_N * logprobs_N, {})
    ratio_N = _ratio(options, logprobs_N - anchor_N, tokens.rows)
    if options.surrogate == "sapo":
        tau_N = torch.full_like(advantages_N, options.tau_negative).masked_fill(advantages_N > 0, options.tau_positive)
        gate_N = 4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1))
        return _Surrogate(-gate_N * advantages_N, {"probs_ratio": (ratio_N.sum(), float(len(ratio_N)))})
    low, high = 1 - options.clip_low, 1 + options.clip_high
    clamped_N = ratio_N.clamp(low, high)
    below_N, above_N = ratio_N < low, ratio_N > high
    if options.surrogate == "cispo":  # every token keeps its gradient; only its weight is bounded
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


def _ratio(options: PolicyLoss, log_ratio_N: Tensor, rows: TokenRows) -> Tensor:
    if options.ratio == "sequence":  # GSPO (arXiv 2507.18071), eq. 7
        log_ratio_N = rows.spread(rows.mean(log_ratio_N))
    elif options.ratio == "product":
        log_ratio_N = rows.spread(rows.sum(log_ratio_N))
    return log_ratio_N.clamp(-EXPONENT, EXPONENT).exp()


def _required(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the objective needs Tokens.{name}")
    return tensor
