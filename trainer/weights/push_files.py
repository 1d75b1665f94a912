"""The tensors of a weight push as safetensors files of a bounded size: all of them, or only the values that changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from safetensors.torch import save
from torch import Tensor

from ngym.errors import UsageError
from ngym.weight_push.delta import INDICES, MAX_VALUES, VALUES, changed_values

from ..recipe.extensions import File

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names
FILE_BYTES = 16 << 20  # of tensors; above 32 MiB malloc uses fresh pages for each file, which is three times slower
WORTHWHILE = 0.5  # of the checkpoint's bytes: a larger delta is not sent


def checkpoint(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name; of tensors that share memory (a tied head) only the first.

    Raises:
        UsageError: a tensor's dtype is not supported.
    """
    tensors: dict[str, Tensor] = {}
    places = set()
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES:
            raise UsageError(f"tensor {name}: has the dtype {tensor.dtype}; float32, bfloat16 or float16 can be pushed")
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in places or tensor.numel() == 0:
            tensors[name] = tensor.detach()
        places.add(place)
    return tensors


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise UsageError unless all values are finite."""
    for name, tensor in tensors.items():
        if tensor.numel() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):  # a NaN is both
            raise UsageError(f"tensor {name}: not every value is finite")


def safetensors_files(tensors: Mapping[str, Tensor], limit: int = FILE_BYTES) -> Iterator[File]:
    """Safetensors files of at most `limit` bytes of tensors, or of one tensor; created one at a time."""
    return _files(({name: tensor.cpu().contiguous()} for name, tensor in tensors.items()), limit)


def _files(groups: Iterable[dict[str, Tensor]], limit: int) -> Iterator[File]:
    """The same; the tensors of a group are in one file."""
    share: dict[str, Tensor] = {}
    size = 0
    for group in groups:
        group_bytes = sum(tensor.nbytes for tensor in group.values())
        if share and size + group_bytes > limit:
            yield _file(share)
            share, size = {}, 0
        share |= group
        size += group_bytes
    if share:
        yield _file(share)


def _file(tensors: dict[str, Tensor]) -> File:
    content = save(tensors)
    return File(content, hashlib.sha256(content).hexdigest())


class WeightDeltas:
    """A copy in host memory of the weights that were pushed last, for the transport `delta`.

    Attributes:
        version: the policy version of the copy; 0 before the first push.
    """

    def __init__(self) -> None:
        self.version = 0
        self._copy: dict[str, Tensor] = {}
        self._changes: dict[str, tuple[Tensor, Tensor]] | None = None

    def files(self, tensors: Mapping[str, Tensor]) -> list[File] | None:
        """The values of these tensors that differ from the copy; None if the whole checkpoint should be sent."""
        self._changes = None
        if not self._is_comparable(tensors):
            return None
        changes = {}
        room = WORTHWHILE * sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            indices, values = changed_values(tensor.cpu(), self._copy[name])
            room -= indices.nbytes + values.nbytes
            if room < 0:
                return None
            if len(indices):
                changes[name] = (indices, values)
        self._changes = changes
        pairs = ({name + INDICES: indices, name + VALUES: values} for name, (indices, values) in changes.items())
        return list(_files(pairs, FILE_BYTES))

    def keep(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make these tensors the copy; all servers have them now. They are those of the last call of `files`."""
        if self._changes is None:
            self._copy = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        else:
            for name, (indices, values) in self._changes.items():
                self._copy[name].view(-1)[indices] = values
        self.version, self._changes = version, {}

    def _is_comparable(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._copy.keys() == tensors.keys() and all(
            (tensor.shape, tensor.dtype) == (self._copy[name].shape, self._copy[name].dtype)
            and tensor.numel() <= MAX_VALUES
            for name, tensor in tensors.items()
        )
