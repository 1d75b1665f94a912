"""The current policy's logprobs of all trained tokens of many samples: the ranks share the work and all get the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..data.samples import Sample
from ..model.packing import Packed, pack

if TYPE_CHECKING:
    from torch import Tensor

    from .engine import Engine

PLANNED_AT_ONCE = 1024


def score(
    samples: Sequence[Sample], logprobs: Callable[[Packed], Tensor], engine: Engine, budget: int
) -> list[list[list[float]]]:
    """Values by sample, by segment, by trained token. Every rank calls it.

    logprobs: [N] of the trained tokens of a micro-batch, such as engine.logprobs. budget: tokens computed at once.
    """
    starts = range(0, len(samples), PLANNED_AT_ONCE)
    return [
        one for start in starts for one in _score(samples[start : start + PLANNED_AT_ONCE], logprobs, engine, budget)
    ]


def _score(
    samples: Sequence[Sample], logprobs: Callable[[Packed], Tensor], engine: Engine, budget: int
) -> list[list[list[float]]]:
    places: dict[int, int] = {}
    count = 0
    for sample in samples:
        for segment in sample.segments:
            places[id(segment)] = count
            count += segment.trained
    found = [0.0] * count
    for mine in engine.micro_batches(samples, budget):
        # a rank without work computes something and discards it: the ranks' collectives must match
        packed = pack(mine or samples[:1], engine.device)
        with torch.no_grad():
            values = logprobs(packed).tolist()
        start = 0
        for segment in packed.segments if mine else ():
            place = places[id(segment)]
            found[place : place + segment.trained] = values[start : start + segment.trained]
            start += segment.trained
    everyones = engine.add_up(found)
    return [[everyones[places[id(segment)] :][: segment.trained] for segment in sample.segments] for sample in samples]
