"""Attention over packed sequences.

Hugging Face models call `packed_attention` by its registered name, with the layout passed through their `forward`. Only
attention is ever padded: one fused kernel computes a group of sequences of similar length, padded to the group's
longest by at most a quarter. A row that several sequences share (a common prefix) is computed once, and each of them
reads it here.

        rows    [ s s s | a a a | b ]                what the network computes: b shares the prefix of a
        places  [ s s s a a a   s s s b b b ]        what attention computes; the last two of b are padding

With `engine.compile` on a GPU, FlexAttention computes rows themselves: without padding, and a shared row once. Sequences
follow each other as in a depth-first walk through the tree of their prefixes, so row q sees row k if k <= q < end_T[k],
one past the last row of the sequences that contain k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .sequence_parallel import SequenceParallelGroup

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "ngym_packed"
COMPILED_NAME = "ngym_packed_compiled"  # of models whose layers are compiled
SIMILAR_LENGTH = 0.8
SHORT_TOKENS = (
    512  # tokens; below that, the backward pass of attention in 16 bits takes a CPU up to 4 times that in float32
)
FLEX_BLOCK = 128  # rows and columns of a block of FlexAttention's mask


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the CPU, for which the CPU does not wait until a GPU has computed what it was given before."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class AttentionKind:
    """The kind of attention of a layer.

    scaling: of the scores; None: 1 / sqrt(D). window: how many tokens back each sees, itself included. softcap: scores
    become c tanh(score / c). sinks_H: a score per head that takes probability and contributes nothing (gpt-oss).
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> AttentionKind:
        """From the keywords with which Hugging Face's layers call attention; others have no effect here."""
        return cls(scaling, dropout, sliding_window, softcap, s_aux)


def attend(query_SHLD: Tensor, key_SKLD: Tensor, value_SKLD: Tensor, kind: AttentionKind) -> Tensor:
    """Attention of S sequences of L tokens each, [S, H, L, D]; K key heads serve H query heads."""
    length = query_SHLD.shape[2]
    window = kind.window if kind.window is not None and kind.window < length else None
    if kind.softcap is not None or kind.sinks_H is not None:
        return _attend_eager(query_SHLD, key_SKLD, value_SKLD, kind, window)
    dtype = query_SHLD.dtype
    if query_SHLD.device.type == "cpu" and dtype.itemsize == 2 and length < SHORT_TOKENS:
        query_SHLD, key_SKLD, value_SKLD = query_SHLD.float(), key_SKLD.float(), value_SKLD.float()
    attended_SHLD = F.scaled_dot_product_attention(
        query_SHLD,
        key_SKLD,
        value_SKLD,
        attn_mask=None if window is None else _causal_mask(length, window, query_SHLD.device),
        is_causal=window is None,
        scale=kind.scaling,
        dropout_p=kind.dropout,
        enable_gqa=query_SHLD.shape[1] != key_SKLD.shape[1],
    )
    return attended_SHLD.to(dtype)


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Whether a token (row) attends to another (column), [L, L]."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def _attend_eager(
    query_SHLD: Tensor, key_SKLD: Tensor, value_SKLD: Tensor, kind: AttentionKind, window: int | None
) -> Tensor:
    """Attention with explicit scores [S, H, L, L]: fused kernels support neither softcap nor sinks."""
    heads, length, size = query_SHLD.shape[1:]
    repeat = heads // key_SKLD.shape[1]
    key_SHLD, value_SHLD = (x.repeat_interleave(repeat, dim=1) for x in (key_SKLD, value_SKLD))
    scaling = 1 / math.sqrt(size) if kind.scaling is None else kind.scaling
    scores = query_SHLD @ key_SHLD.transpose(2, 3) * scaling
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~_causal_mask(length, window, scores.device), -math.inf).float()
    if kind.sinks_H is not None:
        sinks = kind.sinks_H.float().view(1, -1, 1, 1).expand(len(scores), -1, length, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :length].to(value_SHLD.dtype)
    return F.dropout(weights, kind.dropout) @ value_SHLD


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length: their number, padded length, and places [start, end)."""

    start: int
    end: int
    sequences: int
    length: int


@dataclass(eq=False)  # not frozen: torch 2.11 would compile the layers again for each number of buckets
class Layout:
    """The places in attention of a micro-batch's rows. The tensors are None if places are rows.

    row_P: the row that each place reads; padding reads a row of its own sequence and is behind every real token, where
    the causal mask hides it. place_T: the place from which each row takes its output. shared: whether some row has more
    than one place. rows: those of each sequence, in order, on the CPU. equal: the number of sequences if places are rows
    and all are of one length, otherwise 0. block_mask: FlexAttention's, once `make_block_mask` was called.
    """

    tokens: int
    buckets: tuple[Bucket, ...]
    row_P: Tensor | None
    place_T: Tensor | None
    shared: bool
    rows: Sequence[Tensor] = ()
    equal: int = 0
    block_mask: BlockMask | None = None

    @classmethod
    def of(cls, rows: Sequence[Tensor], device: torch.device) -> Layout:
        """rows: for each sequence the rows that it consists of, in order; every row belongs to a sequence."""
        longest_first = sorted(rows, key=len, reverse=True)
        buckets, padded = [], []
        first = start = 0
        for index in range(1, len(longest_first) + 1):
            if index == len(longest_first) or len(longest_first[index]) < SIMILAR_LENGTH * len(longest_first[first]):
                alike = longest_first[first:index]
                bucket = Bucket(start, start + len(alike) * len(alike[0]), len(alike), len(alike[0]))
                padded += [F.pad(rows_T, (0, bucket.length - len(rows_T)), value=int(rows_T[-1])) for rows_T in alike]
                buckets.append(bucket)
                first, start = index, bucket.end
        row_P = torch.cat(padded)
        tokens, places = int(row_P.max()) + 1, torch.arange(len(row_P))
        if torch.equal(row_P, places):
            equal = buckets[0].sequences if len(buckets) == 1 else 0
            return cls(tokens, tuple(buckets), None, None, False, rows, equal)
        # padding comes after the token that it repeats, so the first place of a row is not padding
        place_T = torch.full((tokens,), len(row_P)).scatter_reduce_(0, row_P, places, "amin")
        shared = sum(map(len, rows)) > tokens
        return cls(tokens, tuple(buckets), on_device(row_P, device), on_device(place_T, device), shared, rows)

    def make_block_mask(self, device: torch.device) -> BlockMask:
        """FlexAttention's mask, made once. Whether rows see each other is known for whole blocks without looking into
        them.
        """
        from torch.nn.attention.flex_attention import BlockMask

        if self.block_mask is not None:
            return self.block_mask
        blocks = math.ceil(self.tokens / FLEX_BLOCK)
        ends_T = torch.zeros(self.tokens, dtype=torch.int64)
        for rows_T in self.rows:
            ends_T[rows_T] = int(rows_T[-1]) + 1  # later sequences end later
        end_BR = F.pad(ends_T, (0, blocks * FLEX_BLOCK - self.tokens), value=self.tokens).view(blocks, FLEX_BLOCK)
        end_T = on_device(ends_T, device)
        first_B1 = torch.arange(blocks).unsqueeze(1) * FLEX_BLOCK
        last_B1 = torch.clamp(first_B1 + FLEX_BLOCK, max=self.tokens) - 1
        visible_BB = (end_BR.amax(1) > first_B1).tril()
        full_BB = (end_BR.amin(1) > last_B1).tril(-1)

        def listed(mask_BB: Tensor) -> tuple[Tensor, Tensor]:
            """The number of blocks that each block of rows sees, and their indices, those first."""
            order_BB = mask_BB.to(torch.int8).argsort(dim=1, descending=True, stable=True)
            counts_B = mask_BB.sum(1, dtype=torch.int32)
            order_11BB = order_BB.to(torch.int32)[None, None].contiguous()
            return on_device(counts_B.view(1, 1, -1), device), on_device(order_11BB, device)

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key <= row) & (row < end_T[key])

        mask: BlockMask = BlockMask.from_kv_blocks(
            *listed(visible_BB & ~full_BB),
            *listed(full_BB),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=sees,
            seq_lengths=(self.tokens, self.tokens),
        )
        self.block_mask = mask
        return mask


@cache
def _load_flex() -> Any:
    """The compiled kernel. Loaded at the first use: importing the compiler takes a second."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def flex_attend(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: Layout, scaling: float | None = None
) -> Tensor:
    """FlexAttention over rows, [T, H, D]. On a CPU its kernel is not compiled, and has no backward."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = _load_flex() if query_THD.device.type == "cuda" else flex_attention
    inputs = (x.transpose(0, 1).unsqueeze(0) for x in (query_THD, key_TKD, value_TKD))
    grouped = query_THD.shape[1] != key_TKD.shape[1]
    attended_HTD: Tensor = kernel(
        *inputs, block_mask=layout.make_block_mask(query_THD.device), scale=scaling, enable_gqa=grouped
    )[0]
    return attended_HTD.transpose(0, 1)


def _flex_supports(query: Tensor, kind: AttentionKind) -> bool:
    """Whether FlexAttention computes this. It takes padded batches, too: cuDNN makes a plan for each shape."""
    plain = not kind.dropout and kind.window is None and kind.softcap is None and kind.sinks_H is None
    return plain and query.device.type == "cuda" and query.element_size() == 2 and query.shape[-1] >= 16


class _Spread(torch.autograd.Function):
    """Copies rows to their places. Backward, a row's gradient is that of its output place, or the sum over its places."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_P: Tensor, place_T: Tensor, summed: bool) -> Tensor:
        ctx.save_for_backward(row_P, place_T)
        ctx.summed = summed
        return rows.index_select(0, row_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        row_P, place_T = ctx.saved_tensors
        (gradient,) = gradients
        if not ctx.summed:
            return gradient.index_select(0, place_T), None, None, None
        rows = gradient.new_zeros((len(place_T), *gradient.shape[1:]))
        return rows.index_add_(0, row_P, gradient), None, None, None


class _Collect(torch.autograd.Function):
    """Takes each row's output from its one place; the other places have no gradient."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.places = len(places)
        return places.index_select(0, place_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (place_T,) = ctx.saved_tensors
        places = gradients[0].new_zeros((ctx.places, *gradients[0].shape[1:]))
        places[place_T] = gradients[0]
        return places, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    group: SequenceParallelGroup | None = None,
    flex: bool = False,
    **kinds: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    group: ranks that share the tokens, T of which are this rank's; it attends with its share of the heads to all
    tokens. flex: whether FlexAttention may compute it; its kernel is compiled.
    """
    assert layout is not None, "the model was called without a layout"
    kind = AttentionKind.of(**kinds)
    if kind.sinks_H is not None and group is not None:
        raise NotImplementedError(f"{type(module).__name__}: its attention sinks do not support sequence_parallel")
    # squeeze and split have views as gradients; those of an index or a slice are copies into zeros
    query_THD, key_TKD, value_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if group is not None:
        query_THD, key_TKD, value_TKD = (group.to_heads(x, layout.tokens) for x in (query_THD, key_TKD, value_TKD))
    if flex and layout.row_P is not None and _flex_supports(query, kind):
        attended_THD = flex_attend(query_THD, key_TKD, value_TKD, layout, kind.scaling)
        return (attended_THD if group is None else group.to_tokens(attended_THD)).unsqueeze(0), None
    # every place has the key and value of its row; only the query at the row's output place counts
    batches = zip(
        _split_into_buckets(_spread_rows(query_THD, layout, summed=False), layout),
        _split_into_buckets(_spread_rows(key_TKD, layout, summed=layout.shared), layout),
        _split_into_buckets(_spread_rows(value_TKD, layout, summed=layout.shared), layout),
        strict=True,
    )
    outputs = [attend(*batch, kind).transpose(1, 2).flatten(0, 1) for batch in batches]
    attended_THD = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if layout.place_T is not None:
        attended_THD = cast(Tensor, _Collect.apply(attended_THD, layout.place_T))  # type: ignore[no-untyped-call]
    return (attended_THD if group is None else group.to_tokens(attended_THD)).unsqueeze(0), None


def _spread_rows(rows: Tensor, layout: Layout, *, summed: bool) -> Tensor:
    """[T, heads, D] -> [P, heads, D]."""
    if layout.row_P is None:
        return rows
    return cast(Tensor, _Spread.apply(rows, layout.row_P, layout.place_T, summed))  # type: ignore[no-untyped-call]


def _split_into_buckets(places: Tensor, layout: Layout) -> list[Tensor]:
    """The places of each bucket, [P, heads, D] -> [S, heads, L, D]."""
    parts = places.split([bucket.end - bucket.start for bucket in layout.buckets])
    return [
        part.unflatten(0, (bucket.sequences, bucket.length)).transpose(1, 2)
        for part, bucket in zip(parts, layout.buckets, strict=True)
    ]


def compiled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    outside: Callable[..., tuple[Tensor, None]],
    layout: Layout | None = None,
    group: SequenceParallelGroup | None = None,
    **kinds: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` in a layer that torch.compile traces. Where FlexAttention is possible, attention is part of the
    layer's graph: a CPU needs half the time to start one graph per layer instead of four, and a GPU waits for it.

    outside: computes everything else, outside of the graph. It should depend on the layer and not on the layout: a graph
    that ends at a call of `outside` is taken for all layouts.
    """
    assert layout is not None, "the model was called without a layout"
    kind = AttentionKind.of(**kinds)
    if group is None and _flex_supports(query, kind) and (layout.equal or layout.block_mask is not None):
        if layout.equal:
            q_SHLD, k_SKLD, v_SKLD = (
                x.squeeze(0).unflatten(1, (layout.equal, -1)).transpose(0, 1) for x in (query, key, value)
            )
            return attend(q_SHLD, k_SKLD, v_SKLD, kind).transpose(1, 2).flatten(0, 1).unsqueeze(0), None
        from torch.nn.attention.flex_attention import flex_attention

        grouped = query.shape[1] != key.shape[1]
        flex: Any = flex_attention
        attended_1HTD = flex(query, key, value, block_mask=layout.block_mask, scale=kind.scaling, enable_gqa=grouped)
        return attended_1HTD.transpose(1, 2), None
    return outside(module, query, key, value, attention_mask, layout=layout, group=group, **kinds)
