"""Steps of an engine on a few packed sequences, and the log-probabilities of a network, for the tests of adapters."""

from __future__ import annotations

from typing import Any

import torch

from ngym.trainer.data import samples
from ngym.trainer.model import packing


def pack_sequences() -> Any:
    """Sequences of several lengths, which our attention packs."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (20, 30, 44, 12)]
    return packing.pack([samples.Sample((samples.Segment(one, [(1, len(one))]),)) for one in ids], torch.device("cpu"))


def step(of: Any, data: Any, count: int = 1) -> list[float]:
    """The gradient norms."""
    norms = []
    for _ in range(count):
        logprobs_N = of.logprobs(data)
        of.backward(-logprobs_N.sum(), len(logprobs_N), last=True)
        norms.append(of.step(1.0).grad_norm)
    return norms


@torch.no_grad()
def compute_logprobs(logprobs: Any, data: Any) -> torch.Tensor:
    result: torch.Tensor = logprobs(data)
    return result


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())
