"""A batch -> micro-batches -> flat tensors: whole sequences side by side, no padding computed, and none sees another.

`plan` cuts a batch into micro-batches of about equal size within a token budget, the same number for every rank; `pack`
lays one micro-batch out.

    token_ids  [ a a a a a a a | b b b b b | c c ]      longest segment first
    positions  [ 0 1 2 3 4 5 6 | 0 1 2 3 4 | 0 1 ]
    trained    [       x x x x |     x x x |   x ]      indices [N]; logprob i is predicted from position trained[i] - 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Layout
from .samples import Sample, Segment


@dataclass(frozen=True)
class Packed:
    """One micro-batch.

    samples: as given. segments: theirs, in the order of the tensors. token_ids_T, positions_T: int64.
    trained_N: int64 indices into T. sample_S: index into `samples` of each segment; sample_N: of each trained token.
    """

    samples: tuple[Sample, ...]
    segments: tuple[Segment, ...]
    token_ids_T: Tensor
    positions_T: Tensor
    trained_N: Tensor
    sample_S: Tensor
    sample_N: Tensor
    layout: Layout


def plan(samples: Sequence[Sample], budget: int, ranks: int = 1) -> list[list[Sample]]:
    """Micro-batches of at most `budget` tokens, a multiple of `ranks` of them; rank r takes every ranks-th from r.

    Every rank plans the whole batch and gets the same plan. A sample longer than the budget is alone; with fewer
    samples than ranks some micro-batches are empty.
    """
    longest_first = sorted(samples, key=lambda sample: -sample.tokens)
    count = min(len(samples), math.ceil(sum(sample.tokens for sample in samples) / budget))
    count = math.ceil(count / ranks) * ranks
    while True:
        bins: list[list[Sample]] = [[] for _ in range(count)]
        filled = [0] * count
        for sample in longest_first:
            emptiest = min(range(count), key=filled.__getitem__)
            bins[emptiest].append(sample)
            filled[emptiest] += sample.tokens
        if all(tokens <= budget or len(bin_) == 1 for bin_, tokens in zip(bins, filled, strict=True)):
            return bins
        count += ranks


def pack(samples: Sequence[Sample], device: torch.device) -> Packed:
    """Lay the segments of a micro-batch side by side."""
    owned = [(segment, owner) for owner, sample in enumerate(samples) for segment in sample.segments]
    owned.sort(key=lambda pair: -len(pair[0].token_ids))
    segments = tuple(segment for segment, _ in owned)
    lengths = [len(segment.token_ids) for segment in segments]
    positions = [position for length in lengths for position in range(length)]
    trained: list[int] = []
    offset = 0
    for segment, length in zip(segments, lengths, strict=True):
        for start, end in segment.spans:
            trained.extend(range(offset + start, offset + end))
        offset += length
    sample_S = torch.tensor([owner for _, owner in owned])
    return Packed(
        samples=tuple(samples),
        segments=segments,
        token_ids_T=torch.tensor([token for segment in segments for token in segment.token_ids], device=device),
        positions_T=torch.tensor(positions, device=device),
        trained_N=torch.tensor(trained, dtype=torch.int64, device=device),
        sample_S=sample_S.to(device),
        sample_N=sample_S.repeat_interleave(torch.tensor([segment.trained for segment in segments])).to(device),
        layout=Layout.of(lengths, device),
    )
