"""A trainer's weights -> the files of a checkpoint: each tensor once, in safetensors files of a bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from ngym.errors import UsageError

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names
FILE_BYTES = 16 << 20  # of tensors; above 32 MiB malloc takes fresh pages for each file, which is three times slower


class File(NamedTuple):
    """sha256: in hexadecimal."""

    content: bytes
    sha256: str


def checkpoint(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name; of those that are one and the same (a tied head) the first.

    Raises:
        UsageError: a tensor is not of a dtype that weights have.
    """
    tensors: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES:
            raise UsageError(f"tensor {name}: has the dtype {tensor.dtype}; float32, bfloat16 or float16 can be pushed")
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in seen or tensor.numel() == 0:
            tensors[name] = tensor.detach()
        seen.add(place)
    return tensors


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """UsageError, unless all values are finite."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise UsageError(f"tensor {name}: not every value is finite")


def files(tensors: Mapping[str, Tensor], limit: int = FILE_BYTES) -> Iterator[File]:
    """Safetensors files of at most `limit` bytes of tensors, or of one tensor; made one at a time."""
    share: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if share and size + tensor.nbytes > limit:
            yield _file(share)
            share, size = {}, 0
        share[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if share:
        yield _file(share)


def _file(tensors: dict[str, Tensor]) -> File:
    content = save(tensors)
    return File(content, hashlib.sha256(content).hexdigest())
