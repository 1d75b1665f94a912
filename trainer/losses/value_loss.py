"""The critic's loss: the squared error of its values, clipped as in PPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..recipe.objective import Critic
from .policy_loss import Loss, TokenRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The critic's values of the sampled tokens, flat; only values_N carries a gradient.

    old_N: before the first update on this batch. returns_N: their targets. The rest: as in Tokens.
    """

    values_N: Tensor
    old_N: Tensor
    returns_N: Tensor
    rows: TokenRows
    weight_R: Tensor
    share: float


def value_loss(critic: Critic, values: Values) -> Loss:
    """Half the squared error; for a value that moved further than value_clip, the larger of the two errors, unclipped
    and clipped.

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
    return Loss(total, totals)
