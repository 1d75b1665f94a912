"""Losses of labeled answers: pairs of a chosen and a rejected one, or single answers that are good or bad.

score = log p - log p of the reference, of an answer: a sum over its tokens, or their mean; without a reference, log p
margin = score of the chosen answer - score of the rejected one; logit = beta margin - target_margin

sigmoid     -log sigmoid(logit)             DPO (arXiv 2305.18290), eq. 7; ln 2 while policy and reference are one
            with label smoothing s: (1 - s) of it and s of that of -logit (https://ericmitchell.ai/cdpo.pdf, eq. 3)
            CPO (arXiv 2401.08417), eq. 3, without a reference; SimPO (arXiv 2405.14734), eq. 6, with means
robust      ((1 - s) of it - s of that of -logit) / (1 - 2 s)   robust DPO (arXiv 2403.00409)
ipo         (margin - 1 / (2 beta))^2       IPO (arXiv 2310.12036), eq. 17; TRL's is that with length_normalised
hinge       max(0, 1 - beta margin)         SLiC (arXiv 2305.10425)
odds_ratio  -beta log sigmoid(log odds of the chosen - log odds of the rejected)   ORPO (arXiv 2403.07691), eq. 6 and 7
kto         weight (1 - sigmoid(+-beta (score - z)))   KTO (arXiv 2402.01306), eq. 8

weighted: times exp of the mean over the tokens of log p - log sum of p^2, of both answers (WPO, arXiv 2406.11827).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recipe.objective import Preference
from .policy_loss import Loss, TokenRows

NEARLY_SURE = -1e-9  # largest log p of an answer: the odds of a certain one are infinite


def preference_loss(
    options: Preference,
    logprobs_N: Tensor,
    rows: TokenRows,
    reference_R: Tensor,
    sft_weight_P: Tensor | None = None,
    collision_N: Tensor | None = None,
) -> Loss:
    """Summed over the pairs of a micro-batch; the loop divides by the step's pairs.

    Args:
        rows: the answers, pair by pair: row 2p is the chosen one of pair p, row 2p + 1 the rejected one.
        reference_R: the reference policy's logprob of each whole answer, a sum over its tokens; 0 without a reference.
        sft_weight_P: of the chosen answer's tokens, so that dividing by the pairs gives the mean of their -log p.
            Default: 1 / their number, a mean over pairs.
        collision_N: log of the sum of p^2 of each token's distribution; only needed if the options are `weighted`.
    """
    lengths_R = rows.lengths.clamp(min=1)
    scores_R = rows.sum(logprobs_N) - reference_R
    if options.length_normalised:
        scores_R = scores_R / lengths_R
    chosen_P, rejected_P = scores_R[0::2], scores_R[1::2]
    losses_P = _losses(options, chosen_P, rejected_P)
    if options.weighted:
        if collision_N is None:
            raise ValueError("a weighted preference loss needs collision_N")
        likely_R = rows.mean((logprobs_N - collision_N).detach()).exp()
        losses_P = losses_P * likely_R[0::2] * likely_R[1::2]
    nll_P = -rows.sum(logprobs_N)[0::2] * (1 / lengths_R[0::2] if sft_weight_P is None else sft_weight_P)
    preference, nll = losses_P.sum(), nll_P.sum()
    total = preference + options.sft_weight * nll
    pairs = float(len(chosen_P))
    totals = {
        "loss": (total, pairs),
        "preference_loss": (preference, pairs),
        "sft_loss": (nll, pairs),
        "rewards/chosen": (options.beta * chosen_P.sum(), pairs),
        "rewards/rejected": (options.beta * rejected_P.sum(), pairs),
        "rewards/margins": (options.beta * (chosen_P - rejected_P).sum(), pairs),
        "rewards/accuracies": ((chosen_P > rejected_P).sum(), pairs),
    }
    return Loss(total, totals)


def _losses(options: Preference, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    margins_P = chosen_P - rejected_P
    if options.loss == "odds_ratio":
        return -options.beta * F.logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
    if options.loss == "ipo":
        return (margins_P - 1 / (2 * options.beta)).square()
    logits_P = options.beta * margins_P - options.target_margin
    if options.loss == "hinge":
        return (1 - logits_P).relu()
    weight, flipped_weight = 1 - options.label_smoothing, options.label_smoothing
    if options.loss == "robust":
        weight, flipped_weight = weight / (weight - flipped_weight), -flipped_weight / (weight - flipped_weight)
    return -weight * F.logsigmoid(logits_P) - flipped_weight * F.logsigmoid(-logits_P)


def _log_odds(scores_P: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, exact at both ends."""
    scores_P = scores_P.clamp(max=NEARLY_SURE)
    return scores_P - torch.where(scores_P < -0.6931, torch.log1p(-scores_P.exp()), torch.log(-torch.expm1(scores_P)))


def kto_loss(beta: float, gains_R: Tensor, labels_R: Tensor, weights_R: Tensor, kl: float) -> Loss:
    """KTO, summed over the answers of a micro-batch; the loop divides by the step's answers.

    Args:
        gains_R: log p - log p of the reference, a sum over each answer's tokens.
        labels_R: bool, whether an answer is desirable. weights_R: its weight.
        kl: z, how far the policy is from the reference; at least 0 and the same for the whole optimizer step.
    """
    sign_R = torch.where(labels_R, 1.0, -1.0).to(gains_R)
    total = (weights_R * torch.sigmoid(-beta * sign_R * (gains_R - kl))).sum()
    rows, positives = float(len(gains_R)), float(labels_R.sum())
    rewards_R = beta * gains_R
    totals = {
        "loss": (total, rows),
        "kl": (gains_R.new_tensor(kl * rows), rows),
        "rewards/chosen": (rewards_R[labels_R].sum(), positives),
        "rewards/rejected": (rewards_R[~labels_R].sum(), rows - positives),
    }
    return Loss(total, totals)
