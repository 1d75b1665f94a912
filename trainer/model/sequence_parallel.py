"""Sequence parallelism (Ulysses, arXiv 2309.14509): ranks share a micro-batch's tokens, and in attention its heads.

    [T/n tokens, H heads] -- all to all --> [T tokens, H/n heads] -> attention -- all to all --> [T/n tokens, H heads]

A token's logprob is computed on its rank and sent to all, so every rank of the group has the whole loss. Its gradient
there is that of the rank's own tokens, and the gradients of all ranks add up to the whole.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, distributed


class SequenceParallelGroup(NamedTuple):
    """The ranks that share micro-batches, and this one's place among them."""

    group: distributed.ProcessGroup
    ranks: int
    rank: int

    @classmethod
    def of(cls, ranks: int) -> SequenceParallelGroup:
        """Groups of this many neighboring ranks. Every rank of the run calls it."""
        world, rank = distributed.get_world_size(), distributed.get_rank()
        groups = [distributed.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        return cls(groups[rank // ranks], ranks, rank % ranks)

    def first(self, tokens: int) -> int:
        """The index at which this rank's share of the tokens begins; shares are equal, and the last ones may exceed the
        end.
        """
        return self.rank * math.ceil(tokens / self.ranks)

    def local_indices(self, trained_N: Tensor, tokens: int) -> Tensor:
        """The indices into N of the trained tokens that this rank predicts, from the tokens before them.

        tokens: of the whole micro-batch.
        """
        place_N = trained_N - 1 - self.first(tokens)
        return ((place_N >= 0) & (place_N < math.ceil(tokens / self.ranks))).nonzero().squeeze(1)

    def shard(self, values_T: Tensor) -> Tensor:
        """This rank's part, [ceil(T / n)], padded with zeros."""
        return self._pad(values_T).chunk(self.ranks)[self.rank]

    def to_heads(self, tokens_LHD: Tensor, tokens: int) -> Tensor:
        """All heads of this rank's tokens -> this rank's heads of all tokens, [L, H, D] -> [T, H/n, D]."""
        length, _, width = tokens_LHD.shape
        to_rank = tokens_LHD.reshape(length, self.ranks, -1, width).transpose(0, 1)
        return self._swap(to_rank).flatten(0, 1)[:tokens]

    def to_tokens(self, heads_THD: Tensor) -> Tensor:
        """The inverse of `to_heads`: [T, H/n, D] -> [L, H, D]."""
        to_rank = self._pad(heads_THD).unflatten(0, (self.ranks, -1))
        return self._swap(to_rank).transpose(0, 1).flatten(1, 2)

    def gather(self, values_n: Tensor, trained_N: Tensor, tokens: int) -> Tensor:
        """All ranks' values of their trained tokens, [N], from this rank's values [n]."""
        local_N = values_n.new_zeros(len(trained_N)).index_put((self.local_indices(trained_N, tokens),), values_n)
        return cast(Tensor, _Gather.apply(local_N, self.group))  # type: ignore[no-untyped-call]

    def _pad(self, values_T: Tensor) -> Tensor:
        beyond = -len(values_T) % self.ranks
        return F.pad(values_T, (0, 0) * (values_T.dim() - 1) + (0, beyond)) if beyond else values_T

    def _swap(self, to_rank: Tensor) -> Tensor:
        return cast(Tensor, _Exchange.apply(to_rank, self.group))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """All-to-all over [n, ...]: row r goes to rank r and is replaced by the row from rank r. Gradients go the same way
    back.
    """

    @staticmethod
    def forward(ctx: Any, to_rank: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(to_rank, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(to_rank: Tensor, group: distributed.ProcessGroup) -> Tensor:
    sent = to_rank.contiguous()
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return received


class _Gather(torch.autograd.Function):
    """The sum over the ranks. Backward it is the identity: every rank computes the same loss, which counts once."""

    @staticmethod
    def forward(ctx: Any, local_N: Tensor, group: distributed.ProcessGroup) -> Tensor:
        total = local_N.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
