"""Weight pushes of only the values that changed (transport `delta`), over the files of the push before.

In bfloat16, an update of reinforcement learning changes few values: the others are rounded to what they were. A delta
file has two tensors for each tensor that changed: `NAME#indices`, I32 [K], into the flattened tensor, and `NAME#values`
[K]. A server that kept the files of the last push applies them and loads the result as a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from torch import Tensor

from ngym.errors import BadRequest
from ngym.runtime.cpu_threads import usable_cores

from .stage import DTYPES, AnnouncedTensor, Stage

INDICES, VALUES = "#indices", "#values"
MAX_VALUES = 2**31 - 1  # of a tensor, because indices are I32
CHUNK = 1 << 20  # values that are compared at once: they stay in the processor's cache
THREADS = 8  # that compare, at most
Values = npt.NDArray[Any]  # [K]


class Delta(BaseModel):
    """Announces a push of changed values.

    base: the id of the push that the server must have kept. files: how many will follow. bytes: of all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    files: int = Field(ge=0)
    bytes: int = Field(ge=0)


def changed_values(tensor: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The indices [K] and new values [K] of the elements whose bits differ; both tensors have one shape and dtype."""
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    new, old = (each.reshape(-1).view(bits).numpy() for each in (tensor, kept))

    def compare(start: int) -> tuple[Values, Values]:
        part = new[start : start + CHUNK]
        found = np.flatnonzero(part != old[start : start + CHUNK])
        return (found + start).astype(np.int32), part[found]

    starts = range(0, max(1, len(new)), CHUNK)
    if len(starts) == 1:
        indices, values = compare(0)
    else:
        with ThreadPoolExecutor(min(THREADS, usable_cores())) as threads:  # NumPy lets other threads run
            parts = list(threads.map(compare, starts))
        indices, values = (np.concatenate(several) for several in zip(*parts, strict=True))
    return torch.from_numpy(indices), torch.from_numpy(values).view(tensor.dtype)


class DeltaStage(Stage):
    """The delta files of one push."""

    def __init__(self, announced: list[AnnouncedTensor], dtype: torch.dtype, delta: Delta) -> None:
        super().__init__(announced, dtype, delta.bytes)
        self._expected_files = delta.files

    def check_complete(self) -> None:
        if self._files != self._expected_files:
            raise BadRequest(f"{self._files} of the {self._expected_files} announced files have arrived")

    def _check(self, name: str, tensors: safe_open) -> None:
        owner, _, part = name.rpartition("#")
        pair = {owner + INDICES, owner + VALUES}
        if name not in pair or not pair <= set(tensors.keys()):
            raise BadRequest(f"tensor {name}: a delta has the tensors NAME{INDICES} and NAME{VALUES} for each NAME")
        if f"#{part}" == VALUES:
            return  # checked with its indices
        announced = self._take(owner)
        indices, values = tensors.get_tensor(name), tensors.get_tensor(owner + VALUES)
        if indices.dtype != torch.int32 or values.dtype != DTYPES[announced.dtype] or values.ndim != 1:
            raise BadRequest(f"tensor {owner}: needs indices in I32 and values in {announced.dtype}, both [K]")
        if indices.shape != values.shape:
            raise BadRequest(f"tensor {owner}: {list(indices.shape)} indices for {list(values.shape)} values")
        if indices.numel():
            low, high = (int(bound) for bound in indices.aminmax())
            if low < 0 or high >= announced.count:
                raise BadRequest(f"tensor {owner}: an index of {low} to {high} is not in its {announced.count} values")
        self._check_finite(owner, values)


class KeptCheckpoint:
    """The files of the last push, to which the next one may be a delta.

    Attributes:
        push: the id of that push.
        folder: of its files.
    """

    def __init__(self, push: str, stage: Stage, announced: list[AnnouncedTensor]) -> None:
        self.push = push
        self.folder = stage.folder
        self._stage = stage  # whose end removes the folder
        self._announced = {tensor.name: tensor for tensor in announced}

    def remove(self) -> None:
        """Delete the files; may be called more than once."""
        self._stage.remove()

    def is_base_of(self, delta: Delta, announced: Iterable[AnnouncedTensor]) -> bool:
        """Whether it is the named push, of the same tensors."""
        return delta.base == self.push and self._announced == {tensor.name: tensor for tensor in announced}

    def apply(self, delta_folder: Path, push: str) -> None:
        """Write the changed values into the files; they are then those of `push`.

        Each changed file is replaced by a new one, because an engine may have mapped the old one into its memory.
        After an error the files are a mixture of both.
        """
        changes: dict[str, tuple[Tensor, Tensor]] = {}
        for path in sorted(delta_folder.glob("*.safetensors")):
            with safe_open(path, "pt") as tensors:
                for owner in {name.rpartition("#")[0] for name in tensors.keys()}:  # noqa: SIM118  # not a dict
                    changes[owner] = (tensors.get_tensor(owner + INDICES), tensors.get_tensor(owner + VALUES))
        files = sorted(self.folder.glob("*.safetensors"))
        largest = max((path.stat().st_size for path in files), default=0)
        buffer = memoryview(bytearray(largest))  # for all files: new pages of memory are slow
        for path in files:
            _change_file(path, changes, buffer)
        self.push = push


class _Place(NamedTuple):
    """The place of a tensor's values in a safetensors file: the offset in bytes, and their number."""

    offset: int
    values: int


def _change_file(path: Path, changes: Mapping[str, tuple[Tensor, Tensor]], buffer: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        content = buffer[: _read_all(file, buffer)]
    changed = False
    for name, place in _places(content):
        if name in changes and len(changes[name][0]):
            indices, values = changes[name]
            bits = np.dtype(f"<u{values.element_size()}")
            unsigned = {2: torch.uint16, 4: torch.uint32}[values.element_size()]
            np.frombuffer(content, bits, place.values, place.offset)[indices.numpy()] = values.view(unsigned).numpy()
            changed = True
    if changed:
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.rename(path)


def _read_all(file: FileIO, buffer: memoryview) -> int:
    """The number of bytes of the file, which are then in the buffer. One read is at most 2 GiB."""
    size = 0
    while count := file.readinto(buffer[size:]):
        size += count
    return size


def _places(content: memoryview) -> Iterator[tuple[str, _Place]]:
    """The tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, the values."""
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in orjson.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, _Place(start + first, (last - first) // DTYPES[entry["dtype"]].itemsize)
