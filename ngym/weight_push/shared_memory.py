"""Tensors in the memory of the trainer, which a model server on the same machine reads: the transport `ipc`.

    shared, tensors = share(weights)      # in the trainer; `tensors` must stay alive until the server has copied them
    for each: opened(shared_tensor)       # in the server: a view of the trainer's memory

On a GPU through CUDA IPC; on a CPU through a file in shared memory. What travels is JSON: names, shapes and handles.
"""

from __future__ import annotations

import base64
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ngym.errors import BadRequest
from ngym.weight_push.stage import DTYPES, PREFIX, SHARED_MEMORY, AnnouncedTensor, PrivateFolder

NAMES = {dtype: name for name, dtype in DTYPES.items()}
FOLDER = re.compile(re.escape(PREFIX) + r"\w+")
CONTENT = "tensors"
ALIGNED = 64  # bytes, of each tensor in a file
MAX_AT_ONCE = 4096  # tensors of a request: 3 MB of JSON


def _decode(value: Any) -> bytes:
    return value if isinstance(value, bytes) else base64.b64decode(value, validate=True)


Count = Annotated[int, Field(ge=0)]
Base64 = Annotated[
    bytes, PlainValidator(_decode), PlainSerializer(lambda value: base64.b64encode(value).decode(), return_type=str)
]


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CudaStorage(Body):
    """A storage of a GPU, as PyTorch shares it with one other process: CUDA's handle of the allocation, the bytes and
    the offset in it, the count of its readers, and the event after which it may be read.
    """

    handle: Base64
    bytes: Count
    offset: Count
    counter: Base64
    counter_offset: Count
    event: Base64
    waits: bool


class SharedFile(Body):
    """A part of the file in a private folder of the trainer."""

    folder: str
    offset: Count


class SharedTensor(AnnouncedTensor):
    """A tensor of the trainer. stride, start: its elements in its storage, as in torch.as_strided."""

    stride: tuple[Count, ...]
    start: Count
    memory: CudaStorage | SharedFile


class SharedTensors(Body):
    tensors: list[SharedTensor] = Field(max_length=MAX_AT_ONCE)


class SharedForReader(NamedTuple):
    """The shared tensors, for one reader. source_tensors: must stay alive until the reader has copied the tensors."""

    tensors: list[SharedTensor]
    source_tensors: Any


def device_id(device: torch.device) -> str:
    """Names the memory that two processes can share: `cpu`, or the UUID of a GPU."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def share(tensors: Mapping[str, Tensor]) -> SharedForReader:
    """Share tensors, which are all on the GPU or all on the CPU, with one other process."""
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return _shared_file(tensors)
    source_tensors = [tensor.detach().contiguous() for tensor in tensors.values()]
    return SharedForReader(
        [_export(name, one) for name, one in zip(tensors, source_tensors, strict=True)], source_tensors
    )


def _export(name: str, tensor: Tensor) -> SharedTensor:
    _, arguments = reduce_tensor(tensor)
    _, shape, stride, start, _, dtype, _, handle, size, offset, _, counter, counter_offset, event, waits = arguments
    storage = CudaStorage(
        handle=handle,
        bytes=size,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits=waits,
    )
    return SharedTensor(
        name=name, shape=tuple(shape), dtype=NAMES[dtype], stride=tuple(stride), start=start, memory=storage
    )


def _shared_file(tensors: Mapping[str, Tensor]) -> SharedForReader:
    places, size = [], 0
    for tensor in tensors.values():
        places.append(size)
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    folder = PrivateFolder(size)
    there = torch.from_file(str(folder.path / CONTENT), shared=True, size=max(1, size), dtype=torch.uint8)
    problems = []
    for (name, tensor), place in zip(tensors.items(), places, strict=True):
        whole = tensor.detach().contiguous()
        there[place : place + whole.nbytes] = whole.view(-1).view(torch.uint8)
        memory = SharedFile(folder=folder.path.name, offset=place)
        layout = {"shape": tuple(whole.shape), "stride": whole.stride(), "start": 0}
        problems.append(SharedTensor(name=name, dtype=NAMES[whole.dtype], memory=memory, **layout))
    return SharedForReader(problems, folder)


def open_tensor(shared: SharedTensor, device: torch.device) -> Tensor:
    """The tensor, in the trainer's memory.

    Raises:
        BadRequest: it is not shared memory of this device.
    """
    if isinstance(shared.memory, SharedFile):
        return _of_file(shared, shared.memory)
    if device.type != "cuda":
        raise BadRequest(f"tensor {shared.name}: is on a GPU, and this server's weights are on the {device.type}")
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        tensor: Tensor = rebuild_cuda_tensor(*cuda_arguments(shared, index))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise BadRequest(f"tensor {shared.name}: the GPU's memory cannot be opened: {reason}") from error
    return tensor


def cuda_arguments(shared: SharedTensor, device: int) -> tuple[Any, ...]:
    """The arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor."""
    memory = shared.memory
    assert isinstance(memory, CudaStorage)
    storage = (memory.handle, memory.bytes, memory.offset)
    readers = (memory.counter, memory.counter_offset, memory.event, memory.waits)
    view = (torch.Size(shared.shape), shared.stride, shared.start)
    return (Tensor, *view, torch.storage.TypedStorage, DTYPES[shared.dtype], device, *storage, False, *readers)


def _of_file(shared: SharedTensor, memory: SharedFile) -> Tensor:
    """The folder is a name only, so that no other file is opened."""
    places = (SHARED_MEMORY, Path(tempfile.gettempdir())) if FOLDER.fullmatch(memory.folder) else ()
    path = next((file for place in places if (file := place / memory.folder / CONTENT).is_file()), None)
    if path is None or path.is_symlink():
        raise BadRequest(f"tensor {shared.name}: there is no shared memory {memory.folder!r} on this machine")
    dtype, count = DTYPES[shared.dtype], math.prod(shared.shape)
    end = memory.offset + count * dtype.itemsize
    if shared.start or end > path.stat().st_size or memory.offset % ALIGNED:
        raise BadRequest(f"tensor {shared.name}: is not a part of the shared memory {memory.folder!r}")
    whole = torch.from_file(str(path), shared=True, size=end, dtype=torch.uint8)
    return whole[memory.offset :].view(dtype).view(shared.shape)
