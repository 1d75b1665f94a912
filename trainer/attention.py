"""Causal attention over sequences that lie side by side: none sees another, and only attention is ever padded.

Hugging Face models call `packed_attention` by its registered name, with the layout passed through their `forward`. The
sequences come longest first; neighbours of similar length form a group that one fused kernel computes, padded to the
group's longest by at most a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "ngym_packed"
SIMILAR = 0.8


@dataclass(frozen=True)
class Group:
    """Sequences of similar length at [start, end) of T.

    padded_SL: the row of the group that each padded place reads; padding reads a row of its own sequence and lies
    behind every real token, where the causal mask hides it. real_T: the padded place of each real token. Both are None
    where all lengths are equal.
    """

    start: int
    end: int
    sequences: int
    length: int
    padded_SL: Tensor | None
    real_T: Tensor | None


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a micro-batch lie."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Layout:
        """lengths: of the sequences in their order, longest first."""
        groups: list[Group] = []
        first, start = 0, 0
        for index in range(1, len(lengths) + 1):
            if index == len(lengths) or lengths[index] < SIMILAR * lengths[first]:
                group = _group(lengths[first:index], start, device)
                groups.append(group)
                first, start = index, group.end
        return cls(tuple(groups))


def _group(lengths: Sequence[int], start: int, device: torch.device) -> Group:
    longest, end = lengths[0], start + sum(lengths)
    if lengths[-1] == longest:
        return Group(start, end, len(lengths), longest, None, None)
    length_S1 = torch.tensor(lengths).unsqueeze(1)
    begin_S1 = length_S1.cumsum(0) - length_S1
    place_L = torch.arange(longest)
    padded_SL = begin_S1 + torch.minimum(place_L, length_S1 - 1)
    real_T = (place_L < length_S1).flatten().nonzero().squeeze(1)
    return Group(start, end, len(lengths), longest, padded_SL.flatten().to(device), real_T.to(device))


class _Pad(torch.autograd.Function):
    """Rows to padded places; backwards, only the real places have a gradient (a plain gather would add up the rest)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, padded: Tensor, real: Tensor) -> Tensor:
        ctx.save_for_backward(real)
        return rows.index_select(0, padded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (real,) = ctx.saved_tensors
        return gradients[0].index_select(0, real), None, None


class _Unpad(torch.autograd.Function):
    """Padded places to rows; the padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, real: Tensor) -> Tensor:
        ctx.save_for_backward(real)
        ctx.places = places.shape[0]
        return places.index_select(0, real)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (real,) = ctx.saved_tensors
        gradient = gradients[0]
        places = gradient.new_zeros((ctx.places, *gradient.shape[1:]))
        places[real] = gradient
        return places, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    assert layout is not None, "the model was called without a layout"
    longest = layout.groups[0].length
    if softcap is not None or s_aux is not None or (sliding_window is not None and longest > sliding_window):
        what = "soft-capped, sink or sliding-window attention"
        raise NotImplementedError(f"{type(module).__name__}: {what} over {longest} tokens is not packed yet")
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for group in layout.groups:
        rows = slice(group.start, group.end)
        q_SHLD, k_SKLD, v_SKLD = (_to_batch(x[rows], group) for x in (query_THD, key_TKD, value_TKD))
        grouped = q_SHLD.shape[1] != k_SKLD.shape[1]
        attended = F.scaled_dot_product_attention(
            q_SHLD, k_SKLD, v_SKLD, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
        )
        outputs.append(_to_rows(attended, group))
    return torch.cat(outputs).unsqueeze(0), None


def _to_batch(rows: Tensor, group: Group) -> Tensor:
    """[rows, heads, D] -> [S, heads, L, D]."""
    if group.padded_SL is not None:
        rows = cast(Tensor, _Pad.apply(rows, group.padded_SL, group.real_T))  # type: ignore[no-untyped-call]
    return rows.reshape(group.sequences, group.length, *rows.shape[1:]).transpose(1, 2)


def _to_rows(batch: Tensor, group: Group) -> Tensor:
    """[S, heads, L, D] -> [rows, heads, D]."""
    places = batch.transpose(1, 2).flatten(0, 1)
    if group.real_T is not None:
        places = cast(Tensor, _Unpad.apply(places, group.real_T))  # type: ignore[no-untyped-call]
    return places
