"""CPU kernels for vLLM: attention, and log-probabilities of sampled tokens.

No route that can be reached tells a rank. Where more than the sampled token is asked for, vLLM's own answer stands.

Measured with 64 requests at a time: 7 % more tokens a second from a tiny model. They are registered with
vLLM as implementations of its operators, and chosen by its argument `ir_op_priority`.
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
    """In this process, and in those forked from it."""
    Sampler.gather_logprobs = staticmethod(gather_logprobs)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """logprobs [B, V], token_ids [B] -> those of the tokens [B, 1], then [B, num_logprobs] of the likeliest; ranks [B]."""
    if num_logprobs > 0:
        return vllms(logprobs, num_logprobs, token_ids)
    column = token_ids.unsqueeze(-1)
    return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))


def prefer_ours(arguments: Namespace) -> None:
    """Register the kernels, in the process that the engine is forked from; a choice of the user's own stands."""
    if not hasattr(torch.ops._C, "rms_norm"):  # a build of vLLM for a CPU that it has no kernels for
        return
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_can)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_can_fused)(fused_add_rms_norm)
    undecided = IrOpPriorityConfig()
    if arguments.ir_op_priority == arguments.kernel_config.ir_op_priority == undecided:
        arguments.ir_op_priority = IrOpPriorityConfig(rms_norm=[PROVIDER], fused_add_rms_norm=[PROVIDER])


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)  # the kernel takes rows that follow one another
    return output


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x + x_residual
    return rms_norm(total, weight, epsilon), total


def _can(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """float32, in which both agree to the bit, and rows of whole vectors, or the kernel refuses them."""
    plain = variance_size is None and weight is not None and x.shape[-1] % VECTOR == 0
    return plain and x.dtype == weight.dtype == torch.float32  # type: ignore[union-attr]  # plain has seen to that


def _can_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _can(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype
