"""The log-probability of the sampled token, without its rank among all: to find that takes longer than the rest of it.

No route that can be reached tells a rank. Where more than the sampled token is asked for, vLLM's own answer stands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

vllms = Sampler.gather_logprobs


def leave_out_ranks() -> None:
    """In this process, and in those forked from it."""
    Sampler.gather_logprobs = staticmethod(gather_logprobs)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """logprobs [B, V], token_ids [B] -> those of the tokens [B, 1], then [B, num_logprobs] of the likeliest; ranks [B]."""
    if num_logprobs > 0:
        return vllms(logprobs, num_logprobs, token_ids)
    column = token_ids.unsqueeze(-1)
    return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))
