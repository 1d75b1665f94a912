"""One reducer for every term: which row a token belongs to, what it counts, and what the whole step is divided by.

    loss of a step = sum over its tokens of weight x term / total,   weight and total from all of its rollouts

`weigh` sees the whole optimiser step, so cutting it into micro-batches and ranks changes nothing. A rollout without
trained tokens counts nothing: it is as if it were not there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..recipe.objective import Aggregation

Totals = Mapping[str, tuple[Tensor, float]]  # a metric as a scalar on the device, and its count


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as a sum and what it is divided by; both are added up over micro-batches and ranks."""

    total: float
    count: float


class Loss(NamedTuple):
    """sum: a scalar to descend on, not yet divided. metrics: by name."""

    sum: Tensor
    metrics: dict[str, Mean]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that the flat tokens of a micro-batch belong to: rollouts, or the answers of preference pairs.

    row_N: int64, in any order: a row's tokens need not be neighbours. count: R, rows without tokens included.
    """

    row_N: Tensor
    count: int

    def sum(self, values_N: Tensor) -> Tensor:
        """Over the tokens of each row, [N] -> [R]."""
        return values_N.new_zeros(self.count).index_add(0, self.row_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Over the tokens of each row, [N] -> [R]; 0 where a row has none."""
        return self.sum(values_N) / self.lengths.clamp(min=1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, int64 [R]."""
        return self.sum(torch.ones_like(self.row_N))

    def spread(self, values_R: Tensor) -> Tensor:
        """Each token gets its row's value, [R] -> [N]."""
        return values_R.index_select(0, self.row_N)


class Weights(NamedTuple):
    """Of each rollout of a step: token_B, what each of its tokens counts; share_B, its part of the divisor."""

    token_B: list[float]
    share_B: list[float]

    @property
    def total(self) -> float:
        """The divisor of the step: tokens, rollouts or tasks. 0 if nothing is trained."""
        return math.fsum(self.share_B)


def weigh(
    aggregation: Aggregation,
    lengths_B: Sequence[int],
    *,
    fixed_length: int | None = None,
    tasks_B: Sequence[Hashable] = (),
) -> Weights:
    """Weights of all rollouts of an optimiser step, over all ranks.

    Args:
        lengths_B: trained tokens of each rollout, over all its segments; 0 for one that is left out.
        fixed_length: the divisor of aggregation `fixed` (Dr. GRPO, arXiv 2503.20783).
        tasks_B: each rollout's task, for aggregation `prompt`.
    """
    present_B = [float(length > 0) for length in lengths_B]
    if aggregation == "token":
        return Weights(present_B, [float(length) for length in lengths_B])
    if aggregation == "sequence":
        return Weights([1 / length if length else 0.0 for length in lengths_B], present_B)
    if aggregation == "fixed":
        if fixed_length is None:
            raise ValueError("aggregation fixed needs fixed_length")
        return Weights([present / fixed_length for present in present_B], present_B)
    of_task: defaultdict[Hashable, int] = defaultdict(int)
    for task, length in zip(tasks_B, lengths_B, strict=True):
        of_task[task] += length
    token_B = [1 / of_task[task] if length else 0.0 for task, length in zip(tasks_B, lengths_B, strict=True)]
    return Weights(token_B, [weight * length for weight, length in zip(token_B, lengths_B, strict=True)])


def measured(totals: Totals) -> dict[str, Mean]:
    """Metrics of a micro-batch; one transfer from the device for all of them."""
    if not totals:
        return {}
    values = torch.stack([total.detach().float() for total, _ in totals.values()]).tolist()
    return {name: Mean(value, count) for (name, (_, count)), value in zip(totals.items(), values, strict=True)}
