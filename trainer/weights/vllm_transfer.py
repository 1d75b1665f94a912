"""The trainer's side of vLLM's own weight transfer: `nccl`, or a plugin of vLLM. Imports vLLM, which takes seconds."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

BUFFER_BYTES = 256 << 20

# The records of vLLM's trainer engines, by backend: (our address, the number of processes) -> the record.
TRAINER_INIT_INFO: dict[str, Callable[[str, int], TrainerInitInfo]] = {
    "nccl": lambda address, world: NCCLTrainerInitInfo(
        rank=0,
        master_address=address,
        master_port=_free_port(address),
        world_size=world,
        packed_buffer_size_bytes=BUFFER_BYTES,
    ),
}


class Weights(WeightSource):  # type: ignore[misc]  # mypy does not read vLLM
    """The source for vLLM's engine: the tensors of the current push, on the trainer's device."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        return ((name, tensor.to(device)) for name, tensor in self.tensors.items())


class VllmSender:
    """A `transfer.Sender`: vLLM's trainer engine of a backend, connected with the servers.

    Args:
        client: the servers, as vLLM's VLLMWeightSyncClient.
        world: the number of processes, this one included.
    """

    def __init__(self, backend: str, client: Any, address: str, world: int) -> None:
        self._weights = Weights()
        introduction = TRAINER_INIT_INFO[backend](address, world)
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(introduction, client=client, source=self._weights)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        self._weights.tensors = tensors
        try:
            self._engine.send_weights()
        finally:
            self._weights.tensors = {}

    def close(self) -> None:
        self._engine.shutdown()


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
