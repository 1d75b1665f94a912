"""Transfers weights into the servers' memory without files: `ipc` between processes of one machine, or vLLM's own weight
transfer (`nccl`).

    begin (names, shapes) -> connect -> start -> the tensors -> commit; all servers at once, as one group

A vLLM server cannot go back after `start`: if the push fails then, the servers exit, restart with their initial weights
and get a new push. Partially loaded weights are never served. The proof after the push replaces the checksums of the
other transports.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed

from ngym.errors import NgymError
from ngym.schema import Json
from ngym.weight_push.shared_memory import MAX_AT_ONCE, SharedForReader, SharedTensors, device_id, share

from ..engine.distributed import in_daemon_thread
from ..recipe.extensions import CallReplicas, Mode, PushFailed, TransientPushError

GRACE_S = 10.0
Result = TypeVar("Result")


class Replica(Protocol):
    """One server, during a push; see weights.push."""

    url: str

    def weights(self) -> Json: ...

    def connect(self, info: Json) -> str: ...

    def start(self, mode: Mode) -> None: ...

    def update(self, info: Json) -> None: ...

    def commit(self, mode: Mode) -> None: ...

    def give_up(self) -> None: ...


class Sender(Protocol):
    """Sends tensors to the connected servers."""

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Start the push on all servers, send the tensors, and commit."""

    def close(self) -> None: ...


class Servers:
    """The servers' side, through our routes; for vLLM's engine a VLLMWeightSyncClient.

    Attributes:
        failed: holds the first error; this side may still be waiting.
    """

    def __init__(self, replicas: Sequence[Replica], workers: Sequence[int], on_all: CallReplicas, mode: Mode) -> None:
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

        answers = self._call_all(lambda replica: replica.connect(introduced(replica)))
        self.connections = dict(zip(self._replicas, answers, strict=True))

    def start_weight_update(self) -> None:
        self._call_all(lambda replica: replica.start(self._mode))

    def update_weights(self, update_info: Any) -> None:
        self._call_all(lambda replica: replica.update(update_info))

    def lend(self, tensors: Mapping[str, Tensor]) -> dict[Replica, SharedForReader]:
        """Share tensors with each server. What is returned must stay alive until the servers have committed."""
        return dict(zip(self._replicas, self._call_all(lambda _: share(tensors)), strict=True))

    def update_shared(self, lent: Mapping[Replica, SharedForReader]) -> None:
        """Tell each server where its tensors are."""

        def update(replica: Replica) -> None:
            tensors = lent[replica].tensors
            for first in range(0, len(tensors), MAX_AT_ONCE):
                part = SharedTensors(tensors=tensors[first : first + MAX_AT_ONCE])
                replica.update(part.model_dump(mode="json"))

        self._call_all(update)

    def give_up(self) -> None:
        """End the push on the servers that have not committed."""
        self._on_all(self._replicas, lambda replica: replica.give_up())

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_all(lambda replica: replica.commit(self._mode))

    def _call_all(self, call: Callable[[Replica], Result]) -> list[Result]:
        try:
            return self._on_all(self._replicas, call)
        except NgymError as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise


class SharingSender:
    """A `Sender` for `ipc`: the servers copy from this process's memory."""

    def __init__(self, servers: Servers, device: torch.device) -> None:
        self._servers = servers
        servers.init_weight_transfer_engine({"device": device_id(device)})

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        device = transfer_device()
        copies = {name: tensor.to(device) for name, tensor in tensors.items()}
        lent = self._servers.lend(copies)
        try:
            self._servers.start_weight_update()
            self._servers.update_shared(lent)
            self._servers.finish_weight_update()
        except BaseException:
            self._servers.give_up()  # they would pause until their lease ends
            raise
        finally:
            del lent
            self.close()

    def close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def transfer_device() -> torch.device:
    """The device of the trainer's weights."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Transfer:
    """The trainer's side, for the duration of a run.

    Args:
        backend: `ipc`, or vLLM's name of its backend.
        patience_s: limit of the time for a connection or a push.
    """

    def __init__(self, backend: str, on_all: CallReplicas, mode: Mode, patience_s: float) -> None:
        self._backend = backend
        self._on_all = on_all
        self._mode: Mode = mode
        self._patience_s = patience_s
        self._servers: Servers | None = None
        self._sender: Sender | None = None

    def connect(self, replicas: Sequence[Replica]) -> None:
        """Connect to these servers, which have started a push, unless the connection still exists.

        Raises:
            PushFailed: it is impossible, or a server does not connect; all keep their previous weights.
        """
        infos = [replica.weights() for replica in replicas]
        connections = {replica: info["connection"] for replica, info in zip(replicas, infos, strict=True)}
        if self._servers is not None and self._servers.connections == connections:
            return
        workers = [info["workers"] for info in infos]
        self._refuse(workers)
        self.close()
        servers = Servers(replicas, workers, self._on_all, self._mode)
        self._sender = self._wait_for(lambda: self._open_sender(servers, replicas[0].url, 1 + sum(workers)), servers)
        self._servers = servers

    def _open_sender(self, servers: Servers, url: str, world: int) -> Sender:
        if self._backend == "ipc":
            return SharingSender(servers, transfer_device())
        from .vllm_transfer import VllmSender

        return VllmSender(self._backend, servers, _trainer_address(url), world)

    def push(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors to the connected servers, and commit.

        Raises:
            TransientPushError, PushFailed: a server failed; servers that had started exit and need another push.
        """
        servers, sender = self._servers, self._sender
        assert servers is not None and sender is not None
        try:
            self._wait_for(lambda: sender.send(tensors), servers)
        except BaseException:
            self._servers = self._sender = None  # the group is broken: the next push reconnects
            raise

    def close(self) -> None:
        sender, self._sender, self._servers = self._sender, None, None
        if sender is not None:
            sender.close()

    def _refuse(self, workers: Sequence[int]) -> None:
        if self._backend != "ipc":
            return
        if max(workers) > 1 or (distributed.is_initialized() and distributed.get_world_size() > 1):
            raise PushFailed(
                "transport ipc: shares the memory of one rank of the trainer with servers of one worker each; "
                "use nccl or http"
            )

    def _wait_for(self, act: Callable[[], Result], servers: Servers) -> Result:
        """Run act and return its result. It may hang if a server has failed, because NCCL has no timeout."""
        done = in_daemon_thread("transfer", act)
        pending: list[futures.Future[Any]] = [done, servers.failed]
        futures.wait(pending, self._patience_s, futures.FIRST_COMPLETED)
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
            futures.wait([servers.failed], GRACE_S)  # a collective fails before the call of the server that has died
            if servers.failed.done():
                raise servers.failed.result() from error
            raise PushFailed(f"transport {self._backend}: {type(error).__name__}: {error}") from error


def _offsets(workers: Sequence[int]) -> list[int]:
    """The first rank of each server in the group; rank 0 is the trainer."""
    return [1 + sum(workers[:place]) for place in range(len(workers))]


def _trainer_address(url: str) -> str:
    """The trainer's address in the network of that server. Raises TransientPushError if it cannot be reached."""
    place = urlsplit(url)
    try:
        with socket.create_connection((place.hostname or "127.0.0.1", place.port or 80), timeout=10) as connection:
            address: str = connection.getsockname()[0]
            return address
    except OSError as error:
        raise TransientPushError(f"{url}: {type(error).__name__}: {error}") from error
