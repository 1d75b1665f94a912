"""The server's side of the transport `ipc`: the trainer's weights, copied from its memory.

Until the commit, what arrives is only opened, so a transfer that breaks leaves the old weights in service.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from torch import Tensor

from ngym.errors import BadRequest, ServiceError
from ngym.runtime.event_loop import log_error
from ngym.schema import Json
from ngym.services.base.request_bodies import validate
from ngym.weight_push.shared_memory import SharedTensors, device_id, open_tensor
from ngym.weight_push.stage import Shapes

if TYPE_CHECKING:
    from .engine import Engine


class Transfer:
    """A `PushTransfer`.

    Args:
        ours: the shapes of the checkpoint.
    """

    backend: str | None = "ipc"

    def __init__(self, engine: Engine, ours: Shapes) -> None:
        self._engine = engine
        self._ours = ours
        self._received: dict[str, Tensor] = {}
        self._resuming: asyncio.Task[None] | None = None
        self.connection: str | None = None

    @property
    def connection_info(self) -> Json:
        """The parameters that a trainer needs to connect."""
        return {"connection": self.connection, "workers": 1}

    async def connect(self, init_info: Json) -> str:
        """Raises BadRequest: the trainer's weights are on another device."""
        here = device_id(self._engine.device)
        if init_info.get("device") != here:
            raise BadRequest(
                f"transport ipc: the trainer's weights are on the device {init_info.get('device')}, and this server's "
                f"on {here}; use http"
            )
        self.connection = secrets.token_urlsafe(8)
        return self.connection

    async def start(self) -> None:
        self._received.clear()

    async def update(self, update_info: Json) -> None:
        """Open tensors of the trainer. Raises BadRequest: they are not those of this model."""
        for shared in validate(SharedTensors, update_info, "the tensors of a transfer").tensors:
            if self._ours.get(shared.name) != shared.shape or shared.name in self._received:
                raise BadRequest(f"tensor {shared.name}: is not one that is missing, with the shape {shared.shape}")
            self._received[shared.name] = open_tensor(shared, self._engine.device)

    async def finish(self, version: int) -> None:
        """Copy the tensors and resume generation. Raises BadRequest: some are missing."""
        if missing := [name for name in self._ours if name not in self._received]:
            raise BadRequest(f"{len(missing)} tensors are missing: {', '.join(missing[:3])} ...")
        await self._engine.switch_tensors(self._received, version)
        self._received = {}

    def abort(self, reason: str) -> ServiceError:
        """Resume generation with the old weights."""
        self._received = {}
        self._resuming = asyncio.get_running_loop().create_task(self._engine.resume(), name="resuming the engine")
        self._resuming.add_done_callback(log_error)
        return ServiceError(f"a weight transfer failed: {reason}; the old weights are served", retryable=True)
