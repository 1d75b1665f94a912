"""Tensor parallelism (DeepSpeed's AutoTP): which weights are cut across ranks, and how they become whole again.

A projection into the heads or into the MLP's intermediate size is cut by rows, the projection back by columns; everything
else is on every rank. Files and weight pushes contain whole tensors, of weights and of optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from ngym.errors import ConfigError

if TYPE_CHECKING:
    from ..model.policy import TrainedNetwork


SHARD = "ngym_shard"
CUT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
CUT_BY_ROWS = (r".*\.[qkv]_proj\.(weight|bias)$", r".*\.(gate|up)_proj\.(weight|bias)$")
CUT_BY_COLUMNS = (r".*\.(o|down)_proj\.(weight|bias)$",)
# replicated, but applied to this rank's heads only: their gradients must be summed over the ranks
HEAD_NORMS = (r".*\.[qk]_norm\.weight$",)


class Shard(NamedTuple):
    """A rank's part of a weight: part `rank` of `ranks` equal parts along a dimension."""

    dim: int
    ranks: int
    rank: int
    group: distributed.ProcessGroup


def tensor_parallel_settings(ranks: int) -> dict[str, Any]:
    """DeepSpeed's `tensor_parallel`."""
    specs = [
        {
            "patterns": list(CUT_BY_ROWS),
            "partition_type": "column",
        },  # named after the matrix that multiplies from the right
        {"patterns": list(CUT_BY_COLUMNS), "partition_type": "row"},
        {"patterns": list(HEAD_NORMS), "partition_type": "skip", "grad_allreduce": True},
    ]
    partition_config = {"use_default_specs": False, "layer_specs": specs}
    return {"autotp_size": ranks, "vocab_parallel_lm_head": False, "partition_config": partition_config}


def parameter_shapes(policy: TrainedNetwork) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters, for `mark_shards` to compare after DeepSpeed has cut them."""
    return {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}


def mark_shards(policy: TrainedNetwork, before: Mapping[str, tuple[int, ...]], group: distributed.ProcessGroup) -> None:
    """Record on each parameter whose shape has changed how it was cut.

    Raises:
        ConfigError: no parameter was cut.
    """
    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    count = 0
    for name, parameter in policy.named_parameters():
        for dim, (now, size) in enumerate(zip(parameter.shape, before[name], strict=True)):
            if now != size:
                setattr(parameter, SHARD, Shard(dim, ranks, rank, group))
                count += 1
    if not count:
        raise ConfigError(f"engine.tensor_parallel: no layer of {policy.network.config.model_type} is cut; set it to 1")


def whole_tensor(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """The whole tensor from each rank's part; for an uncut parameter the value itself. Every rank calls it."""
    shard: Shard | None = getattr(parameter, SHARD, None)
    if shard is None:
        return value
    shard_data = value.contiguous()
    parts = [torch.empty_like(shard_data) for _ in range(shard.ranks)]
    distributed.all_gather(parts, shard_data, group=shard.group)
    return torch.cat(parts, shard.dim)


def own_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor."""
    shard: Shard | None = getattr(parameter, SHARD, None)
    return value if shard is None else value.chunk(shard.ranks, shard.dim)[shard.rank]


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter."""
    shard: Shard | None = getattr(parameter, SHARD, None)
    sizes = list(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3 the parameter itself is empty
    if shard is not None:
        sizes[shard.dim] *= shard.ranks
    return tuple(sizes)


@contextmanager
def whole_parameters(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Makes the parameters whole within this block. Every rank enters it.

    Afterwards their original data is put back, not cut again: it is a view of the flat buffer that ZeRO updates.
    """
    shards = [(parameter, parameter.data) for parameter in parameters]
    for parameter, data in shards:
        parameter.data = whole_tensor(parameter, data)
    try:
        yield
    finally:
        for parameter, data in shards:
            parameter.data = data
