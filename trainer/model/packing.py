"""Packs a batch into micro-batches of flat tensors, without padding, and with common prefixes computed once.

`plan` cuts a batch into micro-batches of about equal size within a token budget, the same number for every rank; `pack`
lays one micro-batch out. Rollouts of a task share its prompt, tasks of an environment its instructions and tools:

    tokens     [ p p p q q a a a a | b b b | r r c c ]      prompt pppqq, answers aaaa and bbb; prompt ppprr, answer cc
    positions  [ 0 1 2 3 4 5 6 7 8 | 5 6 7 | 3 4 5 6 ]
    trained    [           x x x x | x x x |     x x ]      indices [N]; logprob i is predicted from row trained[i] - 1

Each sequence attends only to its own tokens. (A first trained token is predicted from the row before it, so each
sequence has a separate last prompt token: b is preceded by a second q that is not shown here.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.samples import Sample, Segment
from .attention import Layout


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

    Samples with a common prefix are neighbors. Every rank plans the whole batch and gets the same plan. A sample longer
    than the budget is alone; with fewer samples than ranks some micro-batches are empty.
    """
    alike = sorted(samples, key=lambda sample: sample.segments[0].token_ids)
    total = sum(sample.tokens for sample in samples)
    count = math.ceil(math.ceil(total / budget) / ranks) * ranks
    parts: list[list[Sample]] = [[] for _ in range(count)]
    before = 0
    for sample in alike:  # goes where its middle is when the total is cut into equal parts
        parts[(2 * before + sample.tokens) * count // (2 * total)].append(sample)
        before += sample.tokens
    micro_batches = [piece for part in parts for piece in _within(budget, part)]
    return micro_batches + [[] for _ in range(-len(micro_batches) % ranks)]


def _within(budget: int, part: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Cut a part into pieces within the budget."""
    piece: list[Sample] = []
    filled = 0
    for sample in part:
        if piece and filled + sample.tokens > budget:
            yield piece
            piece, filled = [], 0
        piece.append(sample)
        filled += sample.tokens
    if piece:
        yield piece


def pack(samples: Sequence[Sample], device: torch.device) -> Packed:
    """Concatenate the segments of a micro-batch, with those that share a prefix next to each other."""
    owned = [(segment, owner) for owner, sample in enumerate(samples) for segment in sample.segments]
    owned.sort(key=lambda pair: pair[0].token_ids)
    segments = tuple(segment for segment, _ in owned)
    rows: list[Tensor] = []
    token_ids: list[int] = []
    positions: list[int] = []
    trained: list[int] = []
    for index, segment in enumerate(segments):
        length, first = len(segment.token_ids), len(token_ids)
        shared = _in_common(segments[index - 1].token_ids, segment) if index else 0
        token_ids += segment.token_ids[shared:]
        positions += range(shared, length)
        for start, end in segment.spans:
            trained += range(first + start - shared, first + end - shared)
        own = torch.arange(first, first + length - shared)
        rows.append(torch.cat((rows[-1][:shared], own)) if shared else own)
    sample_S = torch.tensor([owner for _, owner in owned])
    return Packed(
        samples=tuple(samples),
        segments=segments,
        token_ids_T=torch.tensor(token_ids, device=device),
        positions_T=torch.tensor(positions, device=device),
        trained_N=torch.tensor(trained, dtype=torch.int64, device=device),
        sample_S=sample_S.to(device),
        sample_N=sample_S.repeat_interleave(torch.tensor([segment.trained for segment in segments])).to(device),
        layout=Layout.of(rows, device),
    )


def _in_common(before: list[int], segment: Segment) -> int:
    """The length of the prefix shared with `before`, without the last token before the first trained one."""
    ids = segment.token_ids
    low, high = 0, min(len(before), (segment.spans[0][0] if segment.spans else len(ids)) - 1)
    while low < high:  # comparing slices is much faster than comparing elements
        middle = (low + high + 1) // 2
        if before[low:middle] == ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
