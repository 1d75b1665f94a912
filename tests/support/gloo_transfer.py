"""vLLM's weight transfer over gloo: its `nccl` backend with another collective, for machines without a GPU.

A plugin of vLLM (the test puts it onto the server's path as a distribution of its own), and the trainer's end. Everything
but the broadcast itself is vLLM's: the sequence of calls, its layerwise reload, what a worker and a trainer tell each other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import BroadcastOptions
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

NAME = "gloo"


def register() -> None:
    """vLLM calls it in each of its processes, maybe more than once."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Receiver)
        WeightTransferTrainerFactory.register_engine(NAME, Sender)


def meet(address: str, port: int, rank: int, world: int) -> ProcessGroup:
    group = stateless_init_torch_distributed_process_group(address, port, rank, world, backend="gloo")
    assert isinstance(group, ProcessGroup)
    return group


def broadcast(group: ProcessGroup, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


class Receiver(NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        assert init_info.master_address is not None and init_info.master_port is not None
        self.group = meet(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, weight)
            self.model.load_weights([(name, weight)])


@dataclass
class SenderInfo(TrainerInitInfo):
    backend: ClassVar[str] = NAME

    master_address: str
    master_port: int
    world_size: int


class Sender(NCCLTrainerWeightTransferEngine):
    meetings = 0

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Sender:
        sender = cls(client=client, source=source, packed=False)
        trainer_info = NCCLWeightTransferInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
        )
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(client.init_weight_transfer_engine, worker_init_payload(trainer_info))
            sender.group = meet(init_info.master_address, init_info.master_port, 0, init_info.world_size)
            future.result()
        cls.meetings += 1
        return sender

    def _broadcast(self, source: Any, meta: Any) -> None:
        for _, tensor in self._checked_iter(source, meta):
            broadcast(self.group, tensor.contiguous())
