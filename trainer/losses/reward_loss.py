"""Losses of reward models, on scores, and measures of the scores.

pairs   -log sigmoid(chosen - rejected - margin_coef margin) + center_coef (chosen + rejected)^2
        Bradley-Terry (arXiv 2203.02155, eq. 1), its margin (arXiv 2307.09288, eq. 2), its centering (arXiv 2312.09244)
labels  -log sigmoid(score) for true, -log sigmoid(-score) for false: cross-entropy of outcomes (arXiv 2110.14168) and
        of steps (arXiv 2305.20050)

A score is right if its sign is (labels), or that of the difference (pairs). Its confidence is sigmoid of the absolute
value. Correlations and calibration are not means of micro-batches: they are derived from means of their parts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from .policy_loss import Loss

if TYPE_CHECKING:
    from ..recipe.algorithms import RewardModelOptions

BINS = tuple(f"0.{tenth}" for tenth in range(5, 10))  # lower ends of confidence; each is 0.1 wide
CALIBRATION, MOMENTS = "calibration/", "moments/"


def pair_loss(options: RewardModelOptions, scores_R: Tensor, margins_P: Tensor) -> Loss:
    """Summed over the pairs of a micro-batch; the loop divides by the step's pairs.

    Args:
        scores_R: pair by pair: row 2p is the chosen answer of pair p, row 2p + 1 the rejected one.
        margins_P: of each pair, from its row.
    """
    chosen_P, rejected_P = scores_R[0::2], scores_R[1::2]
    margin_P = chosen_P - rejected_P
    center = (chosen_P + rejected_P).square().sum()
    total = -F.logsigmoid(margin_P - options.margin_coef * margins_P).sum() + options.center_coef * center
    pairs = float(len(chosen_P))
    totals = {
        "loss": (total, pairs),
        "rewards/chosen": (chosen_P.sum(), pairs),
        "rewards/rejected": (rejected_P.sum(), pairs),
        "rewards/margins": (margin_P.sum(), pairs),
        "rewards/accuracies": ((margin_P > 0).sum(), pairs),
    }
    return Loss(total, totals | _calibration(margin_P))


def label_loss(scores_N: Tensor, labels_N: Tensor) -> Loss:
    """Summed over the scores of a micro-batch; the loop divides by the step's scores. labels_N: bool."""
    signed_N = scores_N.where(labels_N, -scores_N)
    total, count, positives = -F.logsigmoid(signed_N).sum(), float(len(scores_N)), float(labels_N.sum())
    totals = {
        "loss": (total, count),
        "rewards/chosen": (scores_N[labels_N].sum(), positives),
        "rewards/rejected": (scores_N[~labels_N].sum(), count - positives),
        "rewards/accuracies": ((signed_N > 0).sum(), count),
    }
    return Loss(total, totals | _calibration(signed_N))


def _calibration(right_K: Tensor) -> dict[str, tuple[Tensor | float, float]]:
    """For each bin of confidence its share of all, and its mean accuracy and confidence. right_K: above 0 if right."""
    confidence_K, right_K = right_K.detach().abs().double().sigmoid(), right_K.detach() > 0
    bin_K = ((confidence_K - 0.5) * 10).long().clamp(0, len(BINS) - 1)
    means: dict[str, tuple[Tensor | float, float]] = {}
    for number, low in enumerate(BINS):
        in_bin_K = bin_K == number
        count = float(in_bin_K.sum())
        means[f"{CALIBRATION}{low}/share"] = (count, float(len(bin_K)))
        means[f"{CALIBRATION}{low}/accuracy"] = (right_K[in_bin_K].sum(), count)
        means[f"{CALIBRATION}{low}/confidence"] = (confidence_K[in_bin_K].sum(), count)
    return means


def moments(scores_N: Tensor, lengths_N: Tensor) -> dict[str, tuple[Tensor | float, float]]:
    """The parts of the correlation between score and length."""
    x_N, y_N = scores_N.detach().double(), lengths_N.double()
    parts = {"x": x_N, "y": y_N, "xx": x_N * x_N, "yy": y_N * y_N, "xy": x_N * y_N}
    return {f"{MOMENTS}{name}": (part_N.sum(), float(len(x_N))) for name, part_N in parts.items()}


def derive_metrics(means: dict[str, float], *, bins: bool) -> dict[str, float]:
    """The means with `length_correlation` and `calibration_error` in place of their parts; with the bins if asked.

    calibration_error is the expected calibration error: the mean of |accuracy - confidence| over the bins, by share.
    """
    x, y, xx, yy, xy = (means[f"{MOMENTS}{name}"] for name in ("x", "y", "xx", "yy", "xy"))
    spread = math.sqrt(max(0.0, xx - x * x) * max(0.0, yy - y * y))
    parts = ("share", "accuracy", "confidence")
    of_bins = [[means.get(f"{CALIBRATION}{low}/{part}", 0.0) for part in parts] for low in BINS]
    error = sum(share * abs(accuracy - confidence) for share, accuracy, confidence in of_bins)
    hidden = (MOMENTS,) if bins else (MOMENTS, CALIBRATION)
    visible = {name: value for name, value in means.items() if not name.startswith(hidden)}
    correlation = (xy - x * y) / spread if spread > 1e-9 else 0.0
    return {**visible, "calibration_error": error, "length_correlation": correlation}
