"""Divergences between the policy's whole distribution of each trained token and a teacher's.

beta = 0          KL(teacher || policy), forward: the policy covers everything that the teacher may say
0 < beta < 1      beta KL(teacher || m) + (1 - beta) KL(policy || m), with m = beta teacher + (1 - beta) policy
beta = 1          KL(policy || teacher), reverse: the policy stays within what the teacher would say

This is the generalized Jensen-Shannon divergence (arXiv 2306.13649, eq. 1, with TRL's ends). A teacher that returns its
likeliest tokens only is compared on these and one more outcome: all the others together. That is a lower bound.

The logits are computed in chunks, and again in the backward.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .packing import MicroBatch

MIN_PROBABILITY = 1e-9  # of the other tokens' probability: rounding can leave less than none
IMPOSSIBLE = -1e4  # the logprob of a token that cannot occur: exp of it is 0, and no difference is inf - inf


class Distributions(Protocol):
    """A teacher's distributions of the trained tokens of a micro-batch."""

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Logprobs of the tokens start to end, float32, and their token ids: [C, V] and None for the whole vocabulary,
        or both [C, K] with the likeliest. A place without a token has -inf.
        """


class Teacher(Protocol):
    def __call__(self, packed: MicroBatch) -> Distributions: ...


class TeacherDivergence(NamedTuple):
    """A divergence from a teacher, as asked of the policy."""

    beta: float
    teacher: Teacher


class TopK(NamedTuple):
    """The likeliest tokens of a teacher behind a URL."""

    logprobs_NK: Tensor
    token_ids_NK: Tensor

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        return self.logprobs_NK[start:end], self.token_ids_NK[start:end]


class DivergenceScorer(nn.Module):
    """A module, so that ZeRO-3 gathers the head's weights around it."""

    def forward(
        self,
        hidden_NH: Tensor,
        teacher: Distributions,
        *,
        head: nn.Linear,
        temperature: float,
        beta: float,
        logits_bytes: int,
    ) -> Tensor:
        """The divergence of each token, [N]."""
        rows = max(1, logits_bytes // (4 * head.out_features))

        def of_chunk(hidden_CH: Tensor, start: int) -> Tensor:
            logits_CV = F.linear(hidden_CH, head.weight, head.bias).float() / temperature
            teacher_rows = teacher.rows(start, start + len(hidden_CH))
            return divergence(F.log_softmax(logits_CV, dim=-1), *teacher_rows, beta)

        starts = range(0, max(1, len(hidden_NH)), rows)
        chunks = [
            checkpoint(of_chunk, hidden_CH, start, use_reentrant=False)
            for start, hidden_CH in zip(starts, hidden_NH.split(rows), strict=True)
        ]
        return torch.cat(chunks)


def divergence(student_CV: Tensor, teacher_CK: Tensor, token_ids_CK: Tensor | None, beta: float) -> Tensor:
    """The divergence of each row, [C], from logprobs. token_ids_CK: of the teacher's tokens; None: the whole vocabulary."""
    if token_ids_CK is not None:
        student_CK = student_CV.gather(1, token_ids_CK).masked_fill(teacher_CK == -torch.inf, -torch.inf)
        student_CV, teacher_CK = _append_rest(student_CK), _append_rest(teacher_CK)
    student_CV, teacher_CK = student_CV.clamp(min=IMPOSSIBLE), teacher_CK.clamp(min=IMPOSSIBLE)
    if beta == 0:
        return _kl(teacher_CK, student_CV)
    if beta == 1:
        return _kl(student_CV, teacher_CK)
    shares = student_CV.new_tensor([1 - beta, beta]).log()
    mixed_CV = torch.logaddexp(student_CV + shares[0], teacher_CK + shares[1])
    return beta * _kl(teacher_CK, mixed_CV) + (1 - beta) * _kl(student_CV, mixed_CV)


def _append_rest(logprobs_CK: Tensor) -> Tensor:
    """With one more column: the logprob of all other tokens together."""
    others_C = (1 - logprobs_CK.exp().sum(-1)).clamp(min=MIN_PROBABILITY).log()
    return torch.cat((logprobs_CK, others_C.unsqueeze(1)), dim=1)


def _kl(p_CV: Tensor, q_CV: Tensor) -> Tensor:
    """KL(p || q) of logprobs."""
    return (p_CV.exp() * (p_CV - q_CV)).sum(-1)
