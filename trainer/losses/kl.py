"""How far the policy is from its reference, and the pull back.

With d = log p - log p_ref of a sampled token, on average over tokens: k1 = d, k2 = d^2 / 2 (close to it), and
k3 = exp(-d) - 1 + d are KL(policy || reference); k2 and k3 are never negative, k1 and k3 are unbiased
(http://joschu.net/blog/kl-approx.html).

As a loss they differ in their gradients. d/dtheta KL = E[d x grad log p]; the pathwise gradient of k1 is zero on
average, that of k3 is the one of KL(reference || policy), that of k2 is right on-policy. With the score-function term,
k x grad log p, and the ratio r of p to the p that sampled, k3 has the gradient r d grad log p, k1 the same plus a term
that is zero on average. So `exact` uses r d grad log p for all of them; the estimator only decides what is reported.
It agrees with TRL's use_bias_correction_kl and NeMo RL for k3, and with OpenRLHF's unbiased_gradient for all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..recipe.objective import Kl, KlEstimator

CAP = 10.0  # on an estimate and on the ratio: one token must not outweigh a batch
EXPONENT = 20.0  # exp of it is finite in float32


def estimate(logprobs_N: Tensor, reference_N: Tensor, estimator: KlEstimator, cap: float = CAP) -> Tensor:
    """k1, k2 or k3 of each token, [N], within [-cap, cap]; differentiable, with the pathwise gradient."""
    d = logprobs_N - reference_N
    if estimator == "k1":
        k = d
    elif estimator == "k2":
        k = d.square() / 2
    else:
        k = torch.expm1((-d).clamp(max=EXPONENT)) + d
    return k.clamp(-cap, cap)


def term(options: Kl, logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor) -> Tensor:
    """What each token adds to the loss before `coef`, [N]. old_N: logprobs that the ratio is taken to."""
    k = estimate(logprobs_N, reference_N, options.estimator)
    if options.gradient == "pathwise":
        return k
    now_N = logprobs_N.detach()
    ratio = (now_N - old_N).clamp(max=math.log(CAP)).exp()
    pull = ratio * (now_N - reference_N)
    return ratio * k.detach() + pull * (logprobs_N - now_N)
