"""The preference loss on pairs of answers: it widens the policy's margin between them over the reference's.

margin = (log p - log p of the reference, of the chosen answer) - (the same of the rejected one), each a sum over the
answer's tokens, or their mean

sigmoid  -log sigmoid(beta margin)          DPO (arXiv 2305.18290), eq. 7; ln 2 while policy and reference are one
         with label smoothing s: (1 - s) of it and s of that of -margin (https://ericmitchell.ai/cdpo.pdf, eq. 3)
ipo      (margin - 1 / (2 beta))^2          IPO (arXiv 2310.12036), eq. 17; TRL's is that with length_normalised
hinge    max(0, 1 - beta margin)            SLiC (arXiv 2305.10425)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..recipe.objective import Preference
from .policy_loss import Loss, Rows, measured


def preference_loss(options: Preference, logprobs_N: Tensor, rows: Rows, reference_R: Tensor) -> Loss:
    """Summed over the pairs of a micro-batch; the loop divides by the step's pairs.

    Args:
        rows: the answers, pair by pair: row 2p is the chosen one of pair p, row 2p + 1 the rejected one.
        reference_R: the reference policy's logprob of each whole answer, a sum over its tokens.
    """
    scores_R = rows.sum(logprobs_N) - reference_R
    if options.length_normalised:
        scores_R = scores_R / rows.lengths.clamp(min=1)
    chosen_P, rejected_P = scores_R[0::2], scores_R[1::2]
    total = _losses(options, chosen_P - rejected_P).sum()
    pairs = float(len(chosen_P))
    totals = {
        "loss": (total, pairs),
        "rewards/chosen": (options.beta * chosen_P.sum(), pairs),
        "rewards/rejected": (options.beta * rejected_P.sum(), pairs),
        "rewards/margins": (options.beta * (chosen_P - rejected_P).sum(), pairs),
        "rewards/accuracies": ((chosen_P > rejected_P).sum(), pairs),
    }
    return Loss(total, measured(totals))


def _losses(options: Preference, margins_P: Tensor) -> Tensor:
    if options.loss == "ipo":
        return (margins_P - 1 / (2 * options.beta)).square()
    logits_P = options.beta * margins_P
    if options.loss == "hinge":
        return (1 - logits_P).relu()
    kept, flipped = 1 - options.label_smoothing, options.label_smoothing
    return -kept * F.logsigmoid(logits_P) - flipped * F.logsigmoid(-logits_P)
