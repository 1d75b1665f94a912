"""What the loop asks of an algorithm: rows to samples, and logprobs to a loss.

The loss is a plain sum over a micro-batch: the loop divides it by the weight of the whole batch, so that cutting a batch
into micro-batches and ranks changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..samples import Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..packing import Packed


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as a sum and what it is divided by; both are added up over micro-batches and ranks."""

    total: float
    count: float


class Loss(NamedTuple):
    """sum: a scalar to descend on. metrics: by name."""

    sum: Tensor
    metrics: dict[str, Mean]


class Algorithm(Protocol):
    """One small file of this folder."""

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """The samples of a JSONL file."""

    def weight(self, samples: Sequence[Sample]) -> float:
        """What a loss summed over these samples is divided by: their trained tokens, sequences or pairs."""

    def loss(self, logprobs_N: Tensor, packed: Packed) -> Loss:
        """The loss summed over a micro-batch. logprobs_N: of its trained tokens, in the order of `packed.segments`."""
