"""Attention over packed sequences with common prefixes, by different kernels: the trainer's, and candidates for GPUs.

    KERNELS[name](query_THD, key_TKD, value_TKD, batch) -> [T, H, D]

The trainer's own pads groups of similar sequences and calls `scaled_dot_product_attention` (trainer/model/attention.py).
With `engine.compile` on a GPU it calls FlexAttention, which needs neither padding nor copies of a shared prefix. Varlen
attention (FlashAttention in torch) copies shared keys and values, and pads nothing.

tests/gpu compares each with `reference`, and benchmarks/gpu.py measures them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ngym.trainer.model.attention import Layout, flex_attend, packed_attention


@dataclass
class PackedRows:
    """The rows of a micro-batch. rows: of each sequence, in order, as in Layout.of; the sequences in depth-first order."""

    rows: Sequence[Tensor]
    device: torch.device

    @classmethod
    def draw(cls, groups: int, size: int, prompt: int, answer: int, device: torch.device) -> PackedRows:
        """`groups` prompts, each with `size` answers whose lengths lie between a half and the whole of `answer`."""
        draw, rows, first = torch.Generator().manual_seed(0), [], 0
        for _ in range(groups):
            shared = torch.arange(first, first + prompt)
            first += prompt
            for _ in range(size):
                length = int(torch.randint(answer // 2, answer + 1, (), generator=draw))
                rows.append(torch.cat((shared, torch.arange(first, first + length))))
                first += length
        return cls(rows, device)

    @property
    def tokens(self) -> int:
        return int(self.rows[-1][-1]) + 1

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.rows, self.device)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """For varlen: the row of each place [P], the place of each row [T], the bounds of the sequences, the longest."""
        row_P = torch.cat(list(self.rows))
        place_T = torch.full((self.tokens,), len(row_P)).scatter_reduce_(0, row_P, torch.arange(len(row_P)), "amin")
        lengths = torch.tensor([0, *map(len, self.rows)])
        bounds = lengths.cumsum(0).to(torch.int32)
        return row_P.to(self.device), place_T.to(self.device), bounds.to(self.device), int(lengths.max())


Kernel = Callable[[Tensor, Tensor, Tensor, PackedRows], Tensor]


def reference(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, batch: PackedRows) -> Tensor:
    """Each sequence by itself, with explicit scores."""
    heads, size = query_THD.shape[1:]
    key_THD, value_THD = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (key_TKD, value_TKD))
    outputs = torch.zeros_like(query_THD)
    for rows in (one.to(batch.device) for one in batch.rows):
        scores_HLL = torch.einsum("qhd,khd->hqk", query_THD[rows], key_THD[rows]) * size**-0.5
        later = torch.ones(len(rows), len(rows), dtype=torch.bool, device=batch.device).triu(1)
        weights_HLL = scores_HLL.masked_fill(later, -torch.inf).softmax(-1)
        outputs = outputs.index_copy(0, rows, torch.einsum("hqk,khd->qhd", weights_HLL, value_THD[rows]))
    return outputs


def padded_attention(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, batch: PackedRows, *, backend: SDPBackend | None = None
) -> Tensor:
    """The trainer's own. backend: None for torch's choice."""
    inputs = (one.transpose(0, 1).unsqueeze(0) for one in (query_THD, key_TKD, value_TKD))
    module = torch.nn.Module()
    if backend is None:
        return packed_attention(module, *inputs, None, layout=batch.layout)[0][0]
    with sdpa_kernel(backend):
        return packed_attention(module, *inputs, None, layout=batch.layout)[0][0]


def flex(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, batch: PackedRows) -> Tensor:
    """The trainer's own with `engine.compile` on a GPU; on a CPU uncompiled, and without a backward."""
    return flex_attend(query_THD, key_TKD, value_TKD, batch.layout)


def varlen(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, batch: PackedRows) -> Tensor:
    """torch's FlashAttention for sequences of any lengths; CUDA and half precision only."""
    from torch.nn.attention.varlen import varlen_attn

    row_P, place_T, bounds, longest = batch.places
    query_PHD, key_PKD, value_PKD = (one.index_select(0, row_P) for one in (query_THD, key_TKD, value_TKD))
    options: dict[str, bool] = {}
    if query_THD.shape[1] != key_TKD.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # since torch 2.12
            options["enable_gqa"] = True
        else:
            repeat = query_THD.shape[1] // key_TKD.shape[1]
            key_PKD, value_PKD = (one.repeat_interleave(repeat, dim=1) for one in (key_PKD, value_PKD))
    inputs = query_PHD, key_PKD, value_PKD
    attended = varlen_attn(*inputs, bounds, bounds, longest, longest, window_size=(-1, 0), **options)
    assert isinstance(attended, Tensor)
    return attended.index_select(0, place_T)


KERNELS: dict[str, Kernel] = {
    "padded, torch's choice": padded_attention,
    "padded, math": partial(padded_attention, backend=SDPBackend.MATH),
    "padded, flash": partial(padded_attention, backend=SDPBackend.FLASH_ATTENTION),
    "padded, memory-efficient": partial(padded_attention, backend=SDPBackend.EFFICIENT_ATTENTION),
    "padded, cuDNN": partial(padded_attention, backend=SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "varlen": varlen,
}


def unavailable(name: str, device: torch.device, dtype: torch.dtype, backward: bool) -> str:
    """The reason why a kernel cannot run here; "" if it can."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cpu":
        if name in ("padded, memory-efficient", "padded, cuDNN", "varlen"):
            return "it needs a GPU"
        return "no backward on a CPU" if name == "flex" and backward else ""
    return "" if half or name not in ("padded, flash", "padded, cuDNN", "varlen") else "it needs half precision"
