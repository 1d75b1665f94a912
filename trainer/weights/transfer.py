"""Transfers weights from the trainer's GPU into the servers' GPUs with vLLM's weight transfer: `nccl`, or `ipc` on one
GPU.

    begin (names, shapes) -> connect -> start -> the tensors -> commit; all servers at once, as one group

No server can go back after `start`: if the push fails then, the servers exit, restart with their initial weights and
get a new push. Partially loaded weights are never served. The proof after the push replaces the checksums of the other
transports.
"""

from __future__ import annotations

import base64
import pickle  # noqa: TID251  (written, never loaded)
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from ngym.errors import NgymError
from ngym.schema import Json

from ..engine.distributed import in_daemon_thread
from ..recipe.extensions import Mode, OnAll, PushFailed

GRACE_S = 10.0
BUFFER_BYTES = 256 << 20

Result = TypeVar("Result")
# The records of vLLM's trainer engines, by backend: (our address, the number of processes) -> the record.
INTRODUCTIONS: dict[str, Callable[[str, int], TrainerInitInfo]] = {
    "nccl": lambda address, world: NCCLTrainerInitInfo(
        rank=0,
        master_address=address,
        master_port=_free_port(address),
        world_size=world,
        packed_buffer_size_bytes=BUFFER_BYTES,
    ),
    "ipc": lambda address, world: IPCTrainerInitInfo(rank=0),
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


class Replica(Protocol):
    """One server, during a push; see weights.push."""

    url: str

    def weights(self) -> Json: ...

    def connect(self, info: Json) -> str: ...

    def start(self, mode: Mode) -> None: ...

    def update(self, info: Json) -> None: ...

    def commit(self, mode: Mode) -> None: ...


class Servers:
    """The servers' side for vLLM's engine (a VLLMWeightSyncClient), through our routes.

    Attributes:
        failed: holds the first error; this side may still be waiting.
    """

    def __init__(self, replicas: Sequence[Replica], workers: Sequence[int], on_all: OnAll, mode: Mode) -> None:
        self._replicas = replicas
        self._workers = workers
        self._on_all = on_all
        self._mode: Mode = mode
        self.failed: futures.Future[NgymError] = futures.Future()
        self.connections: dict[Replica, str] = {}

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        offsets = dict(zip(self._replicas, _offsets(self._workers), strict=True))

        def introduced(replica: Replica) -> Json:
            return {**init_info, "rank_offset": offsets[replica]} if "rank_offset" in init_info else init_info

        answers = self._all(lambda replica: replica.connect(introduced(replica)))
        self.connections = dict(zip(self._replicas, answers, strict=True))

    def start_weight_update(self) -> None:
        self._all(lambda replica: replica.start(self._mode))

    def update_weights(self, update_info: Any) -> None:
        info = _as_json(update_info)
        self._all(lambda replica: replica.update(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda replica: replica.commit(self._mode))

    def _all(self, call: Callable[[Replica], Result]) -> list[Result]:
        try:
            return self._on_all(self._replicas, call)
        except NgymError as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise


class Transfer:
    """The trainer's side, for the duration of a run.

    Args:
        backend: vLLM's name of the backend.
        patience_s: limit of the time for a connection or a push.
    """

    def __init__(self, backend: str, on_all: OnAll, mode: Mode, patience_s: float) -> None:
        self._backend = backend
        self._on_all = on_all
        self._mode: Mode = mode
        self._patience_s = patience_s
        self._weights = Weights()
        self._servers: Servers | None = None
        self._engine: Any = None

    def connect(self, replicas: Sequence[Replica]) -> None:
        """Connect to these servers, which have begun a push, unless the connection still exists.

        Raises:
            PushFailed: it is impossible, or a server does not connect; all keep their previous weights.
        """
        told = [replica.weights() for replica in replicas]
        connections = {replica: one["connection"] for replica, one in zip(replicas, told, strict=True)}
        if self._servers is not None and self._servers.connections == connections:
            return
        workers = [one["workers"] for one in told]
        self._refuse(workers)
        self.close()
        servers = Servers(replicas, workers, self._on_all, self._mode)
        introduction = INTRODUCTIONS[self._backend](_our_address(replicas[0].url), 1 + sum(workers))
        self._engine = self._within(
            lambda: WeightTransferTrainerFactory.trainer_init(introduction, client=servers, source=self._weights),
            servers,
        )
        self._servers = servers

    def push(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors to the connected servers, and commit.

        Raises:
            TransientPushError, PushFailed: a server failed; servers that had started exit and need another push.
        """
        servers, engine = self._servers, self._engine
        assert servers is not None
        self._weights.tensors = tensors
        try:
            self._within(engine.send_weights, servers)
        except BaseException:
            self._servers = self._engine = None  # the group is broken: the next push reconnects
            raise
        finally:
            self._weights.tensors = {}

    def close(self) -> None:
        engine, self._engine, self._servers = self._engine, None, None
        if engine is not None:
            engine.shutdown()

    def _refuse(self, workers: Sequence[int]) -> None:
        if self._backend != "ipc":
            return
        if max(workers) > 1 or (distributed.is_initialized() and distributed.get_world_size() > 1):
            raise PushFailed(
                "transport ipc: shares one GPU between one rank of the trainer and servers of one worker each; "
                "use nccl or http"
            )

    def _within(self, act: Callable[[], Result], servers: Servers) -> Result:
        """Run act and return its result. It may hang if a server has failed, because NCCL has no timeout."""
        done = in_daemon_thread("transfer", act)
        either: list[futures.Future[Any]] = [done, servers.failed]
        futures.wait(either, self._patience_s, futures.FIRST_COMPLETED)
        if not done.done():
            futures.wait([done], GRACE_S)
        if not done.done():
            reason = servers.failed.result() if servers.failed.done() else f"nothing for {self._patience_s:.0f} s"
            raise PushFailed(f"{reason}; transport {self._backend} hangs, restart this run")
        try:
            return done.result()
        except NgymError:
            raise
        except Exception as error:
            raise PushFailed(f"transport {self._backend}: {type(error).__name__}: {error}") from error


def _offsets(workers: Sequence[int]) -> list[int]:
    """The first rank of each server in the group; rank 0 is the trainer."""
    return [1 + sum(workers[:place]) for place in range(len(workers))]


def _as_json(update_info: Json) -> Json:
    """Handles of GPU memory are Python objects; they are pickled, as in vLLM's own client."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    rest = {key: value for key, value in update_info.items() if key not in ("ipc_handles", "ipc_handles_pickled")}
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}


def _our_address(url: str) -> str:
    """Our address as that server sees it."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "127.0.0.1", place.port or 80), timeout=10) as connection:
        address: str = connection.getsockname()[0]
        return address


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
