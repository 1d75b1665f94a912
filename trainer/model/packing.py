"""Packs a batch into micro-batches of flat tensors, without padding, and with common prefixes computed once.

`plan` cuts a batch into micro-batches of about equal size within a budget of computed tokens, the same number for every
rank; `pack` lays one micro-batch out. Rollouts of a task share its prompt, tasks of an environment its instructions and
tools:

    tokens     [ p p p q q a a a a | b b b | r r c c ]      prompt pppqq, answers aaaa and bbb; prompt ppprr, answer cc
    positions  [ 0 1 2 3 4 5 6 7 8 | 5 6 7 | 3 4 5 6 ]
    trained    [           x x x x | x x x |     x x ]      indices [N]; logprob i is predicted from row trained[i] - 1

Each sequence attends only to its own tokens. (A first trained token is predicted from the row before it, so each
sequence has a separate last prompt token: b is preceded by a second q that is not shown here.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ngym.routed_experts import ExpertRows

from ..data.samples import Sample, Segment
from .attention import Layout, on_device

ATTENTION_SHARE = 2  # padded attention keeps keys and values of each sequence


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    samples: as given. segments: theirs, in the order of the tensors. token_ids_T, positions_T: int64.
    trained_N: int64 indices into T. images: files in the order of their placeholders in token_ids_T, those in a common
    prefix once. image_rows: the rows of these placeholders. sample_S: index into `samples` of each segment; sample_N: of
    each trained token. experts_TLK: int16, to replay, -1 where they are not known; None: of no segment.
    """

    samples: tuple[Sample, ...]
    segments: tuple[Segment, ...]
    token_ids_T: Tensor
    positions_T: Tensor
    trained_N: Tensor
    sample_S: Tensor
    sample_N: Tensor
    layout: Layout
    images: tuple[bytes, ...] = ()
    image_rows: tuple[int, ...] = ()
    experts_TLK: Tensor | None = None


def plan(samples: Sequence[Sample], budget: int, ranks: int = 1, *, common_prefixes: bool = True) -> list[list[Sample]]:
    """Micro-batches that compute at most `budget` tokens, a multiple of `ranks` of them; rank r takes every ranks-th
    from r.

    Samples with a common prefix are neighbors, and the prefix counts once. As attention may read it once for each of
    them, at most ATTENTION_SHARE * budget tokens are attended to. Every rank plans the whole batch and gets the same
    plan. A sample longer than the budget is alone; with fewer samples than ranks some micro-batches are empty.

    common_prefixes: False: they are computed for each sequence.
    """
    alike = sorted(samples, key=lambda sample: sample.segments[0].prefix_ids)
    costs = list(_costs(alike)) if common_prefixes else [_Cost(*(sample.tokens,) * 3) for sample in alike]
    micro_batches = _split(alike, costs, budget)
    count = math.ceil(len(micro_batches) / ranks) * ranks
    # the smallest limit that makes no more micro-batches: they are of about equal size
    low, high = sum(cost.after for cost in costs) // count, budget
    while low < high:
        limit = (low + high) // 2
        smaller = _split(alike, costs, limit)
        if len(smaller) <= count:
            micro_batches, high = smaller, limit
        else:
            low = limit + 1
    return micro_batches + [[] for _ in range(count - len(micro_batches))]


class _Cost(NamedTuple):
    """Tokens of a sample that are computed: if it is the first of its micro-batch, or if it follows its neighbor. attended:
    those of all its segments.
    """

    first: int
    after: int
    attended: int


def _costs(alike: Sequence[Sample]) -> Iterator[_Cost]:
    """Upper bounds: `pack` finds more in common among several segments."""
    before: list[int] = []
    for sample in alike:
        segments = sample.segments
        within = sum(_common_length(segment.prefix_ids, following) for segment, following in pairwise(segments))
        yield _Cost(sample.tokens - within, sample.tokens - within - _common_length(before, segments[0]), sample.tokens)
        before = segments[0].prefix_ids


def _split(alike: Sequence[Sample], costs: Sequence[_Cost], limit: int) -> list[list[Sample]]:
    """Pieces within the limit, as long as possible."""
    pieces: list[list[Sample]] = []
    computed = attended = 0
    for sample, cost in zip(alike, costs, strict=True):
        computed, attended = computed + cost.after, attended + cost.attended
        if not pieces or computed > limit or attended > ATTENTION_SHARE * limit:
            pieces.append([])
            computed, attended = cost.first, cost.attended
        pieces[-1].append(sample)
    return pieces


def pack(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Concatenate the segments of a micro-batch, with those that share a prefix next to each other."""
    owned_segments = [(segment, owner) for owner, sample in enumerate(samples) for segment in sample.segments]
    owned_segments.sort(key=lambda pair: pair[0].prefix_ids)
    segments = tuple(segment for segment, _ in owned_segments)
    rows: list[Tensor] = []
    token_ids: list[int] = []
    positions: list[int] = []
    trained: list[int] = []
    images: list[bytes] = []
    image_rows: list[int] = []
    experts: list[tuple[int, ExpertRows]] = []
    for index, segment in enumerate(segments):
        length, first = len(segment.token_ids), len(token_ids)
        shared = _common_length(segments[index - 1].prefix_ids, segment) if index else 0
        token_ids += segment.token_ids[shared:]
        positions += range(shared, length)
        for start, end in segment.spans:
            trained += range(first + start - shared, first + end - shared)
        for image in segment.images:
            if image.places[0] >= shared:
                images.append(image.content)
                image_rows += (first + place - shared for place in image.places)
        if segment.experts is not None:
            experts.append((first, segment.experts.between(shared, length)))
        new_rows = torch.arange(first, first + length - shared)
        rows.append(torch.cat((rows[-1][:shared], new_rows)) if shared else new_rows)
    sample_S = torch.tensor([owner for _, owner in owned_segments])
    return MicroBatch(
        samples=tuple(samples),
        segments=segments,
        token_ids_T=on_device(torch.tensor(token_ids), device),
        positions_T=on_device(torch.tensor(positions), device),
        trained_N=on_device(torch.tensor(trained, dtype=torch.int64), device),
        sample_S=on_device(sample_S, device),
        sample_N=on_device(sample_S.repeat_interleave(torch.tensor([segment.trained for segment in segments])), device),
        layout=Layout.of(rows, device),
        images=tuple(images),
        image_rows=tuple(image_rows),
        experts_TLK=_known_experts(experts, len(token_ids), device) if experts else None,
    )


def common_experts(samples: Sequence[Sample]) -> list[list[ExpertRows | None]]:
    """The experts of each segment of each sample, those of common prefixes from the first segment with them.

    So it makes no difference which segments share a micro-batch.
    """
    experts = [[segment.experts for segment in sample.segments] for sample in samples]
    before: tuple[list[int], ExpertRows] | None = None
    places = [(sample, place) for sample, each in enumerate(samples) for place in range(len(each.segments))]
    for sample, place in sorted(places, key=lambda at: samples[at[0]].segments[at[1]].prefix_ids):
        segment, own = samples[sample].segments[place], experts[sample][place]
        if own is None:
            continue
        if before is not None:
            prefix_ids, known = before
            shared = min(_common_length(prefix_ids, segment), known.rows)
            own = replace(own, raw=known.between(0, shared).raw + own.between(shared, own.rows).raw)
            experts[sample][place] = own
        before = segment.prefix_ids, own
    return experts


def _known_experts(experts: Sequence[tuple[int, ExpertRows]], tokens: int, device: torch.device) -> Tensor:
    """[T, L, K] of a micro-batch, -1 for the other tokens. experts: those from a row on."""
    known_TLK = torch.full((tokens, experts[0][1].layers, experts[0][1].chosen), -1, dtype=torch.int16)
    for first, rows in experts:
        of_rows = np.frombuffer(rows.raw, rows.dtype).astype(np.int16).reshape(-1, rows.layers, rows.chosen)
        known_TLK[first : first + len(of_rows)] = torch.from_numpy(of_rows)
    return on_device(known_TLK, device)


def _common_length(before: list[int], segment: Segment) -> int:
    """The length of the prefix shared with `before`, without the last token before the first trained one, and with
    whole images only.
    """
    ids = segment.prefix_ids
    low, high = 0, min(len(before), (segment.spans[0][0] if segment.spans else len(ids)) - 1)
    while low < high:  # comparing slices is much faster than comparing elements
        middle = (low + high + 1) // 2
        if before[low:middle] == ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    for image in segment.images:
        if image.places[0] < low <= image.places[-1]:
            return image.places[0]
    return low
