"""Attention within sequences of one length: causal, and where a model wants it within a window, soft-capped, with sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """What a layer asks for.

    scaling: of the scores; None: 1 / sqrt(D). window: how many tokens back each sees, itself included. softcap: scores are
    bent to c tanh(score / c). sinks_H: a score of each head that takes probability and gives nothing (gpt-oss).
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


def attended(query_SHLD: Tensor, key_SKLD: Tensor, value_SKLD: Tensor, kind: Kind) -> Tensor:
    """Of S sequences of L tokens each, [S, H, L, D]; K heads of keys serve H of queries."""
    length = query_SHLD.shape[2]
    window = kind.window if kind.window is not None and kind.window < length else None
    if kind.softcap is not None or kind.sinks_H is not None:
        return _by_hand(query_SHLD, key_SKLD, value_SKLD, kind, window)
    return F.scaled_dot_product_attention(
        query_SHLD,
        key_SKLD,
        value_SKLD,
        attn_mask=None if window is None else _seen(length, window, query_SHLD.device),
        is_causal=window is None,
        scale=kind.scaling,
        dropout_p=kind.dropout,
        enable_gqa=query_SHLD.shape[1] != key_SKLD.shape[1],
    )


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """Whether a token (row) sees another (column), [L, L]."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _by_hand(query_SHLD: Tensor, key_SKLD: Tensor, value_SKLD: Tensor, kind: Kind, window: int | None) -> Tensor:
    """The scores as a tensor [S, H, L, L]: no fused kernel bends them, or has a sink."""
    heads, length, size = query_SHLD.shape[1:]
    repeat = heads // key_SKLD.shape[1]
    key_SHLD, value_SHLD = (x.repeat_interleave(repeat, dim=1) for x in (key_SKLD, value_SKLD))
    scaling = 1 / math.sqrt(size) if kind.scaling is None else kind.scaling
    scores = query_SHLD @ key_SHLD.transpose(2, 3) * scaling
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~_seen(length, window, scores.device), -math.inf).float()
    if kind.sinks_H is not None:
        sinks = kind.sinks_H.float().view(1, -1, 1, 1).expand(len(scores), -1, length, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :length].to(value_SHLD.dtype)
    return F.dropout(weights, kind.dropout) @ value_SHLD
