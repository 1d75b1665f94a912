"""The reference for the trainer's engine: the same methods in plain PyTorch, float32 on the CPU, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ngym.trainer.data.samples import Sample
from ngym.trainer.engine.engine import Update
from ngym.trainer.model.chunked_logprobs import RequestedScores, Scores
from ngym.trainer.model.packing import MicroBatch, plan

Shared = TypeVar("Shared")


class PlainEngine:
    """The part of an engine that `loop.take_step` and the algorithms use."""

    rank, ranks = 0, 1
    device = torch.device("cpu")

    def __init__(self, policy: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        self.policy = policy
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm or float("inf")

    def micro_batches(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        return plan(samples, budget)

    def scores(self, packed: MicroBatch, asks: RequestedScores) -> Scores:
        scores: Scores = self.policy(packed, asks)
        return scores

    def logprobs(self, packed: MicroBatch, temperature: float | None = None) -> Tensor:
        scores: Scores = self.policy(packed, RequestedScores(), temperature)
        return scores.logprobs_N

    def values(self, packed: MicroBatch) -> Tensor:
        values_N = self.scores(packed, RequestedScores(logprobs=False, values=True)).values_N
        assert values_N is not None
        return values_N

    def backward(self, loss_sum: Tensor, weight: float, *, last: bool) -> None:
        (loss_sum / weight).backward()  # type: ignore[no-untyped-call]

    def step(self, lr_multiplier: float) -> Update:
        """The policy and its critic are clipped separately, as the engine does without ZeRO."""
        parts = [self.policy.network, self.policy.critic]
        norms = [
            float(nn.utils.clip_grad_norm_(part.parameters(), self._max_grad_norm))
            for part in parts
            if part is not None
        ]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Update(norms[0], lr_multiplier, *norms[1:])

    def all_reduce(self, values: list[float]) -> list[float]:
        return values

    def broadcast(self, value: Shared) -> Shared:
        return value

    def state(self, kind: str) -> dict[str, Tensor]:
        """The weights (`master`) or a tensor of the optimizer (`exp_avg`), by the names of the weights."""
        named = self.policy.named_parameters()
        if kind == "master":
            return {name: one.detach().clone() for name, one in named}
        return {name: self._optimizer.state[one][kind] for name, one in named}
