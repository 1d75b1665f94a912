"""The engine's side of vLLM's own weight transfer, with `nccl` or `ipc`: from the trainer's GPU to ours.

    connect -> pause -> start -> update, once or more -> finish

vLLM loads each tensor into the served weights as it arrives. So there is no way back after `start`: generation is
paused until `finish`, and if that is not reached, the engine is broken and the server ends, to be restarted.
"""

from __future__ import annotations

import asyncio
import base64
import pickle  # noqa: TID251  (written, never loaded)
import secrets
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.platforms import current_platform

from ngym.errors import ServiceError
from ngym.schema import Json
from ngym.services.base.request_bodies import validate
from ngym.weight_push.shared_memory import SharedFile, SharedTensor, SharedTensors, cuda_arguments
from ngym.weight_push.stage import DTYPES

if TYPE_CHECKING:
    from ..engine import Engine


class Transfer:
    """The engine's side of a transfer.

    Args:
        patience_s: how long the trainer may take to connect, or to send one update.

    Attributes:
        backend: vLLM's name of the transfer; None: not configured.
        connection: id of the trainer's connection; None: not connected.
        workers: number of engine processes, each of which receives.
    """

    def __init__(self, engine: Engine, patience_s: float) -> None:
        config = engine.vllm_config
        self._engine = engine
        self._patience_s = patience_s
        self.backend = config.weight_transfer_config.backend if config.weight_transfer_config else None
        self.workers = config.parallel_config.world_size * config.parallel_config.data_parallel_size
        self.connection: str | None = None
        self._trainers_gpu = ""

    @property
    def connection_info(self) -> Json:
        """The parameters that a trainer needs to connect."""
        return {"connection": self.connection, "workers": self.workers} if self.backend else {}

    async def connect(self, init_info: Json) -> str:
        """Connect with the trainer. Raises ServiceError if vLLM refuses; without the trainer, the engine is broken."""
        self.connection = None
        self._trainers_gpu = str(init_info.get("device"))
        if self.backend == "ipc":
            init_info = {"packed": False}
        await self._engine.shutdown_weight_transfer_engine()
        try:
            await self._with_timeout(
                self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info)),
                "the trainer did not connect",
            )
        except ServiceError:
            raise
        except Exception as error:
            raise ServiceError(f"vLLM refuses this connection: {error}", status=422) from error
        self.connection = secrets.token_urlsafe(8)
        return self.connection

    async def start(self) -> None:
        """Begin to receive. After this, only `finish` resumes generation."""
        method = "start_packed_update" if current_platform.is_cpu() else "start_weight_update"
        await self._or_broken(self._engine.collective_rpc(method))

    async def update(self, update_info: Json) -> None:
        """Receive tensors. update_info: vLLM's record for the backend; for `ipc` that of `shared_memory`."""
        if self.backend == "ipc":
            shared = validate(SharedTensors, update_info, "the tensors of a transfer").tensors
            if any(isinstance(tensor.memory, SharedFile) for tensor in shared):
                raise self.abort("vLLM reads only the memory of its GPU")
            update_info = to_vllm_request(shared, self._trainers_gpu)
        await self._or_broken(self._engine.update_weights(WeightTransferUpdateRequest(update_info)))

    async def finish(self, version: int) -> None:
        """Resume generation with the received weights."""
        method = "finish_packed_update" if current_platform.is_cpu() else "finish_weight_update"
        await self._or_broken(self._engine.collective_rpc(method))
        await self._or_broken(self._engine.serve_pushed(version))

    async def _or_broken(self, work: Awaitable[Any]) -> None:
        try:
            await self._with_timeout(work, "the trainer sent nothing")
        except BaseException as error:
            raise self.abort(str(error)) from error

    async def _with_timeout(self, work: Awaitable[Any], problem: str) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await work
        except TimeoutError:  # the worker hangs in a collective operation
            raise self.abort(f"{problem} within {self._patience_s:.0f} s") from None

    def abort(self, reason: str) -> ServiceError:
        """Mark the engine as broken: its weights are neither the old nor the new ones, so the server must end."""
        if self._engine.broken is None:
            self._engine.broken = f"a weight transfer failed: {reason}; the server must restart"
        return ServiceError(self._engine.broken, retryable=True)


def to_vllm_request(tensors: Sequence[SharedTensor], gpu: str) -> Json:
    """vLLM's record. It takes handles only pickled; the pickle is made here, of checked numbers and bytes.

    gpu: the UUID of the trainer's GPU.
    """
    handles = [{gpu: cuda_arguments(tensor, 0)} for tensor in tensors]
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [str(DTYPES[tensor.dtype]).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
