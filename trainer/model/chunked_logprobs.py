"""The decoder's hidden states, its output head, and log-probabilities in chunks.

    hidden_CH --head--> logits_CV --log_softmax--> logprobs_CV -> log p of one token a row, entropy of the row

Logits are by far the largest tensor of a step: 8,192 tokens x 150,000 words x 4 bytes = 5 GB, several times over. A
single chunk keeps its logprobs for the backward, which turns them into the gradient in place. Several chunks keep
nothing: the backward computes each again, at the cost of one more matrix product.

With `engine.compile`, two generated kernels read and write the logits in the head's own precision: no float32 logits
are stored, and a single chunk keeps its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import teacher_divergence
from .packing import MicroBatch
from .routing_replay import KEYWORD
from .sequence_parallel import SequenceParallelGroup

# With less, chunks have so few rows that adding up the head's gradient costs more than computing it.
LOGITS_BYTES = {"cpu": 256 << 20, "cuda": 5 << 28}  # on a GPU: of 4,096 tokens in bf16 with 160,000 words
COMPILED_SHARE = 24  # compiled kernels have few tensors beside the logits: a 24th of a GPU's memory may hold them


def logits_limit(device: torch.device, *, compiled: bool) -> int:
    """Bytes of the logits of a chunk. With several chunks, the backward computes all of them again."""
    limit = LOGITS_BYTES.get(device.type, LOGITS_BYTES["cpu"])
    if compiled and device.type == "cuda":
        limit = max(limit, torch.cuda.get_device_properties(device).total_memory // COMPILED_SHARE)
    return limit


def states(
    decoder: nn.Module,
    packed: MicroBatch,
    group: SequenceParallelGroup | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The last hidden states one place before each trained token, [N, H].

    decoder: a Hugging Face model without its head, with the attention of attention.py.
    group: the ranks that share the micro-batch; the states are then those of `group.local_indices`.
    inputs: instead of the micro-batch's ids and positions, for `decoder`; images are among them. They are those of the
        whole micro-batch, also with a group.
    """
    places_N, token_ids_T, positions_T = packed.trained_N - 1, packed.token_ids_T, packed.positions_T
    if group is not None:
        places_N = places_N[group.local_indices(packed.trained_N, len(token_ids_T))] - group.first(len(token_ids_T))
        token_ids_T, positions_T = group.shard(token_ids_T), group.shard(positions_T)
    inputs = inputs or {"input_ids": token_ids_T.unsqueeze(0), "position_ids": positions_T.unsqueeze(0)}
    if packed.experts_TLK is not None:
        experts_TLK = packed.experts_TLK if group is None else group.shard(packed.experts_TLK)
        inputs = {**inputs, KEYWORD: experts_TLK}
    hidden_TH: Tensor = decoder(**inputs, use_cache=False, layout=packed.layout, group=group).last_hidden_state[0]
    return hidden_TH[places_N]


class RequestedScores(NamedTuple):
    """The outputs to compute. Each costs time: entropy and collision a pass over the logits, values one through the
    critic, a divergence one through a teacher and two over the logits.

    logprobs: False if only values are needed.
    """

    logprobs: bool = True
    entropy: bool = False
    values: bool = False
    collision: bool = False
    divergence: teacher_divergence.TeacherDivergence | None = None


class Scores(NamedTuple):
    """Outputs for the trained tokens of a micro-batch, float32, in the order of its segments; None if not requested.

    logprobs_N: log p of each token given the tokens before it ([0] if not requested). entropy_N: of the whole
    distribution that it was sampled from. values_N: the critic's value of the state in which it was chosen.
    collision_N: log of the sum of p squared over the vocabulary, without a gradient. divergence_N: from the teacher.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    collision_N: Tensor | None = None
    values_N: Tensor | None = None
    divergence_N: Tensor | None = None


class Scorer(nn.Module):
    """The requested values of the distributions softmax(head(hidden) / temperature).

    A module, so that ZeRO-3 gathers the head's weights around it: once, for any number of chunks.

    compiled: whether torch.compile makes the kernels between the head's matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compiled = False

    def forward(
        self,
        hidden_NH: Tensor,
        token_ids_N: Tensor,
        *,
        head: nn.Linear,
        temperature: float,
        entropy: bool,
        logits_bytes: int,
        collision: bool = False,
    ) -> Scores:
        """logits_bytes: memory limit of the logits of a chunk, which are float32 unless compiled."""
        size = head.weight.element_size() if self.compiled and temperature == 1 else 4
        rows = max(1, logits_bytes // (size * head.out_features))
        request = _Request(rows, temperature, entropy, collision, self.compiled)
        return Scores(*_ScoreFunction.apply(hidden_NH, head.weight, head.bias, token_ids_N, request))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Request:
    """rows: rows of a chunk."""

    rows: int
    temperature: float
    entropy: bool
    collision: bool
    compiled: bool


def _log_softmax(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_CV = F.linear(hidden_CH, weight_VH, bias_V)
    if temperature != 1:
        logits_CV = logits_CV.float().div_(temperature)
    return F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)


class _ScoreFunction(torch.autograd.Function):
    """Log p of one token per row, and the entropy of each row."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_ids_N: Tensor, request: _Request
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        of_chunks: list[_RowScores] = []
        buffer_CV = None
        for hidden_CH, token_ids_C in zip(hidden_NH.split(request.rows), token_ids_N.split(request.rows), strict=True):
            if request.compiled:
                buffer_CV = F.linear(hidden_CH, weight_VH, bias_V)
                of_chunks.append(
                    _load_kernels().row_scores(
                        buffer_CV, token_ids_C, request.temperature, request.entropy, request.collision
                    )
                )
            else:
                buffer_CV = _log_softmax(hidden_CH, weight_VH, bias_V, request.temperature)
                of_chunks.append(_row_scores(buffer_CV, token_ids_C, request))
        logprobs_N, entropy_N, collision_N, normalizer_N = (
            None if column[0] is None else torch.cat(column) for column in zip(*of_chunks, strict=True)
        )
        if collision_N is not None:
            ctx.mark_non_differentiable(collision_N)
        ctx.request = request
        saved_CV = buffer_CV if len(of_chunks) == 1 else None
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, token_ids_N, entropy_N, normalizer_N, saved_CV)
        assert logprobs_N is not None
        return logprobs_N, entropy_N, collision_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden_NH, weight_VH, bias_V, token_ids_N, entropy_N, normalizer_N, saved_CV = ctx.saved_tensors
        request: _Request = ctx.request
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_NH = torch.empty_like(hidden_NH)
        grad_VH: Tensor | None = None
        grad_V: Tensor | None = None
        for start in range(0, max(1, len(token_ids_N)), request.rows):
            rows = slice(start, start + request.rows)
            entropy_C = None if entropy_N is None else entropy_N[rows]
            of_rows = [gradient[rows] for gradient in gradients[:2] if gradient is not None]
            if request.compiled:
                logits_CV = F.linear(hidden_NH[rows], weight_VH, bias_V) if saved_CV is None else saved_CV
                grad_CV = _load_kernels().of_logits(
                    logits_CV, normalizer_N[rows], token_ids_N[rows], entropy_C, of_rows, request.temperature
                )
            else:
                logprobs_CV = saved_CV
                if logprobs_CV is None:
                    logprobs_CV = _log_softmax(hidden_NH[rows], weight_VH, bias_V, request.temperature)
                grad_CV = _logits_grad(logprobs_CV, token_ids_N[rows], entropy_C, of_rows)
                if request.temperature != 1:
                    grad_CV.div_(request.temperature)
                grad_CV = grad_CV.to(weight_VH.dtype)
            torch.mm(grad_CV, weight_VH, out=grad_NH[rows])
            if of_weight:
                grad_VH = _add_product(grad_VH, grad_CV.T, hidden_NH[rows])
            if of_bias:
                grad_V = grad_CV.sum(0) if grad_V is None else grad_V.add_(grad_CV.sum(0))
        return grad_NH, grad_VH, grad_V, None, None


class _Kernels(NamedTuple):
    row_scores: Callable[[Tensor, Tensor, float, bool, bool], _RowScores]
    of_logits: Callable[[Tensor, Tensor, Tensor, Tensor | None, list[Tensor], float], Tensor]


@cache
def _load_kernels() -> _Kernels:
    """The compiled kernels. Loaded at the first use: importing the compiler takes a second."""
    return _Kernels(torch.compile(_fused_row_scores), torch.compile(_fused_logits_grad))


class _RowScores(NamedTuple):
    """normalizer_C: log of the sum of exp(logits / temperature), for the backward of the compiled kernels."""

    logprobs_C: Tensor
    entropy_C: Tensor | None
    collision_C: Tensor | None
    normalizer_C: Tensor | None


def _row_scores(logprobs_CV: Tensor, token_ids_C: Tensor, request: _Request) -> _RowScores:
    return _RowScores(
        logprobs_CV.gather(1, token_ids_C.unsqueeze(1)).squeeze(1),
        -(logprobs_CV.exp().mul_(logprobs_CV)).sum(-1) if request.entropy else None,
        (2 * logprobs_CV).logsumexp(-1) if request.collision else None,
        None,
    )


def _fused_row_scores(
    logits_CV: Tensor, token_ids_C: Tensor, temperature: float, entropy: bool, collision: bool
) -> _RowScores:
    """As `_row_scores`, in two passes over the logits."""
    scaled_CV = logits_CV.float() / temperature
    most_C1 = scaled_CV.amax(-1, keepdim=True)
    below_CV = scaled_CV - most_C1
    exp_CV = below_CV.exp()
    total_C = exp_CV.sum(-1)
    normalizer_C = most_C1.squeeze(1) + total_C.log()
    return _RowScores(
        logits_CV.gather(1, token_ids_C.unsqueeze(1)).squeeze(1).float() / temperature - normalizer_C,
        total_C.log() - (exp_CV * below_CV).sum(-1) / total_C if entropy else None,
        exp_CV.square().sum(-1).log() - 2 * total_C.log() if collision else None,
        normalizer_C,
    )


def _fused_logits_grad(
    logits_CV: Tensor,
    normalizer_C: Tensor,
    token_ids_C: Tensor,
    entropy_C: Tensor | None,
    gradients: list[Tensor],
    temperature: float,
) -> Tensor:
    """The gradient of the unscaled logits in their precision; formulas: `_logits_grad`."""
    logprobs_CV = logits_CV.float() / temperature - normalizer_C.unsqueeze(1)
    p_CV = logprobs_CV.exp()
    of_logprob_C1 = gradients[0].unsqueeze(1)
    places_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    grad_CV = torch.where(places_V == token_ids_C.unsqueeze(1), of_logprob_C1, 0.0) - of_logprob_C1 * p_CV
    if entropy_C is not None:
        grad_CV = grad_CV - gradients[1].unsqueeze(1) * p_CV * (logprobs_CV + entropy_C.unsqueeze(1))
    return (grad_CV / temperature).to(logits_CV.dtype)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return a @ b if total is None else total.addmm_(a, b)


def _logits_grad(logprobs_CV: Tensor, token_ids_C: Tensor, entropy_C: Tensor | None, gradients: list[Tensor]) -> Tensor:
    """The gradient of the scaled logits, written over the logprobs.

    d log p_i / d logit_j = [i = j] - p_j,   d entropy / d logit_j = -p_j (log p_j + entropy).
    """
    of_logprob_C1 = gradients[0].unsqueeze(1)
    if entropy_C is None:
        logprobs_CV.exp_().mul_(-of_logprob_C1)
    else:
        of_entropy_C1 = gradients[1].unsqueeze(1)
        p_CV = logprobs_CV.exp()
        logprobs_CV.add_(entropy_C.unsqueeze(1)).mul_(-of_entropy_C1).sub_(of_logprob_C1).mul_(p_CV)
    return logprobs_CV.scatter_add_(1, token_ids_C.unsqueeze(1), of_logprob_C1)
