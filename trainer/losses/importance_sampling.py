"""Trainer and sampler disagree about the same weights: how much, and importance weights that make up for it.

The sampler (vLLM) rounds elsewhere, runs other kernels, and may be a version behind. With w = p(trainer) / p(sampler):

token         w, cut to [low, high]: TIS                   https://fengyao.notion.site/off-policy-rl
sequence      the product of a rollout's w, cut to [low, high]
icepop        w, or 0 outside of [low, high]               https://ringtech.notion.site/icepop
sequence_mask w, or 0 for all of a rollout whose geometric mean of w is outside of [low, high]

The weights have no gradient. What is dropped stays in the divisor: a step with much of it dropped is a small one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..recipe.objective import Correction
from .reduction import Rows, Totals

EXPONENT = 20.0  # exp of it is finite in float32


class Corrected(NamedTuple):
    """weights_N: to multiply each token's policy term by."""

    weights_N: Tensor
    totals: Totals


def correct(options: Correction, trainer_N: Tensor, sampler_N: Tensor, rows: Rows) -> Corrected:
    """Importance weights of the tokens.

    Args:
        options: of a kind other than none.
        trainer_N: the trainer's logprobs before its step, without a gradient.
        sampler_N: the sampler's own, as recorded with the rollout.
    """
    low, high = options.bounds
    log_w_N = trainer_N - sampler_N
    w_N = _exp(log_w_N)
    judged_N = w_N  # what is held against the bounds
    if options.kind == "sequence":
        judged_N = _exp(rows.spread(rows.sum(log_w_N)))
    elif options.kind == "sequence_mask":
        judged_N = _exp(rows.spread(rows.mean(log_w_N)))
    outside_N = (judged_N < low) | (judged_N > high)
    cuts = options.kind in ("token", "sequence")
    weights_N = judged_N.clamp(low, high) if cuts else w_N.masked_fill(outside_N, 0.0)

    tokens = float(len(weights_N))
    dropped_N = weights_N == 0
    whole_R = (rows.sum(dropped_N.long()) == rows.lengths) & (rows.lengths > 0)
    totals = {
        "sampling_importance_ratio": (weights_N.sum(), tokens),
        "is_oob_ratio": (outside_N.sum(), tokens),
        "is_dropped_ratio": (dropped_N.sum(), tokens),
        "is_dropped_sequences": (whole_R.sum(), float(rows.count)),
    }
    return Corrected(weights_N, totals)


def mismatch(trainer_N: Tensor, sampler_N: Tensor) -> Totals:
    """How far the two are apart, whatever is done about it.

    token_mult_prob_error: mean of exp |difference|, 1 when they agree; above 1.05 something is wrong (NeMo RL).
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
