"""The ranks of a run: the process group, and the heartbeat that detects dead or hung ranks.

A rank whose process dies breaks the others' next collective (gloo at once, NCCL never); a rank that hangs breaks
nothing. The heartbeats go through the rendezvous store (on rank 0 or in torchrun's agent), over separate connections.
Time is counted in this rank's own checks of the others: if all ranks were stopped together, none has missed a
heartbeat. After a timeout of the store the rank reconnects, so that a paused rank or a short network failure does not
end the run.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import orjson
import torch
from torch import distributed
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from ngym.errors import NgymError
from ngym.net.addresses import interface_of, route_to
from ngym.net.auth import is_loopback

from ..recipe.recipe import Launch

RENDEZVOUS_TIMEOUT_S = 90  # seconds, from the arrival of the first rank; no rank has loaded a model yet
SAY_AFTER_S = 15  # seconds, until rank 0 says which ranks it waits for
HEARTBEAT_CHECK_S = 1.0
STORE_S = 5  # seconds, for an answer of the store
MISSED_AFTER_ERROR = 5  # checks without a heartbeat, once a collective has failed
MISSED_HEARTBEATS = 45  # checks without a heartbeat while nothing has failed: slow ranks are waited for
Result = TypeVar("Result")
# Ranks wait while rank 0 collects, evaluates, or waits out an outage; the heartbeat finds lost ranks.
COLLECTIVE_TIMEOUT = timedelta(days=7)


FIRST, DONE, FAILED = b"0", b"done", b"failed"


class RankGone(NgymError):
    """A rank is dead, hangs or ended before the others."""


class RankHost(NamedTuple):
    """A rank's machine. address: its own one on the way to rank 0; may be loopback on the machine of rank 0."""

    name: str
    address: str

    @classmethod
    def this(cls) -> RankHost:
        return cls(socket.gethostname(), _address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")))


def machine_names(hosts: Sequence[RankHost]) -> list[str]:
    """The name of each rank's machine; with its address where machines have equal names.

    A loopback address is not shown. Only the machine of rank 0 can have one, so it is the one without an address.
    """
    addresses = {host.name: {other.address for other in hosts if other.name == host.name} for host in hosts}
    return [
        host.name if len(addresses[host.name]) == 1 or is_loopback(host.address) else f"{host.name} at {host.address}"
        for host in hosts
    ]


class LastHeartbeat(NamedTuple):
    """A rank's last heartbeat, and the check at which it was new."""

    value: bytes
    check: int


class Heartbeat:
    """This rank's membership in the process group, from rendezvous to exit.

    Attributes:
        hosts: the machine of each rank.

    Raises:
        RankGone: a rank did not arrive.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._peers = [peer for peer in range(ranks) if peer != rank]
        self._store = self._join_store()  # on rank 0 the store lives as long as this object
        self.hosts = [
            RankHost(*orjson.loads(host)) for host in self._store.multi_get(list(map(_host_key, range(ranks))))
        ]
        self._machines = machine_names(self.hosts)
        self._last_seen = dict.fromkeys(self._peers, LastHeartbeat(FIRST, 0))
        self._checks = 0
        self._connection: TCPStore | None = self._store
        self._stopped = threading.Event()
        self._last = FAILED
        # In two threads: a request to the store of a stopped rank blocks until that rank continues.
        self._watch = threading.Thread(target=self._watch_peers, name="look for the others", daemon=True)
        self._sender = threading.Thread(target=self._exchange_heartbeats, name="signs of life", daemon=True)
        self._watch.start()
        self._sender.start()

    def _join_store(self) -> TCPStore:
        """The store, once each rank's first heartbeat has arrived."""
        host, port = _address()
        has_it = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        try:
            store = _run_within(
                lambda: TCPStore(
                    host,
                    port,
                    is_master=has_it,
                    timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
                    wait_for_workers=False,
                    multi_tenant=True,
                ),
                RENDEZVOUS_TIMEOUT_S,
            )
        except RuntimeError as error:
            if has_it:
                why = str(error).splitlines()[0]
                raise NgymError(
                    f"MASTER_PORT: rank 0 cannot listen on {host}:{port}: {why}; choose a free one"
                ) from error
            raise RankGone(self._missing_ranks_message([0])) from error
        try:
            store.set(_host_key(self._rank), orjson.dumps(list(RankHost.this())))  # type: ignore[arg-type]
            store.set(_key(self._rank), FIRST)  # type: ignore[arg-type]  # bytes are accepted too
            self._wait_for_peers(store)
            store.set_timeout(timedelta(seconds=STORE_S))
        except RuntimeError as error:
            missing = [0]  # unless the store answers
            with suppress(RuntimeError):
                missing = self._missing_ranks(store)
            raise RankGone(self._missing_ranks_message(missing)) from error
        return store

    def _wait_for_peers(self, store: TCPStore) -> None:
        """Wait until all have arrived; rank 0 says which ones it waits for. RuntimeError: one did not arrive in time."""

        def wait(within_s: float) -> None:
            _run_within(lambda: store.wait(list(map(_key, self._peers)), timedelta(seconds=within_s)), within_s)

        if self._rank == 0:
            with suppress(RuntimeError):
                wait(SAY_AFTER_S)
                return
            missing = _at_rendezvous(self._missing_ranks(store), "has not arrived")
            rest = RENDEZVOUS_TIMEOUT_S - SAY_AFTER_S
            print(f"ng_train: {missing} yet; waiting up to {rest} s for it", file=sys.stderr, flush=True)
            wait(rest)
        else:
            wait(RENDEZVOUS_TIMEOUT_S)

    def _missing_ranks_message(self, missing: Sequence[int]) -> str:
        return (
            f"{_at_rendezvous(missing, 'did not arrive')} in time (about {RENDEZVOUS_TIMEOUT_S} s), so rank {self._rank} "
            "ends too; see the output of the former; start all ranks again"
        )

    def _missing_ranks(self, store: TCPStore) -> list[int]:
        return _run_within(lambda: [peer for peer in self._peers if not store.check([_key(peer)])], STORE_S)

    def leave(self, last: bytes) -> None:
        """Announce that this rank has finished: DONE or FAILED."""
        self._last = last
        self._stopped.set()
        self._watch.join()
        self._sender.join(STORE_S)

    def dead_rank(self) -> str | None:
        """Names a rank without a heartbeat since a collective failed, or None if all ranks sent one; takes a few
        checks.
        """
        failed = self._checks
        while self._checks <= failed + MISSED_AFTER_ERROR + 3:  # its last heartbeat may have come while this one failed
            if message := self._dead_ranks_message(MISSED_AFTER_ERROR):
                return message
            time.sleep(HEARTBEAT_CHECK_S / 4)
        return None

    def _watch_peers(self) -> None:
        self._repeat(self._check_peers)

    def _check_peers(self) -> None:
        self._checks += 1
        if message := self._dead_ranks_message(MISSED_HEARTBEATS):
            try:
                print(f"ng_train: {message}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)  # the main thread may hang in a collective

    def _exchange_heartbeats(self) -> None:
        self._repeat(self._exchange_heartbeat)
        if self._connection is not None:
            with suppress(RuntimeError):
                self._connection.set(_key(self._rank), self._last)  # type: ignore[arg-type]

    def _exchange_heartbeat(self) -> None:
        # After an error, a late answer on this connection would be taken for that of another request.
        store, self._connection = self._connection, None
        with suppress(RuntimeError):  # the store died with its rank and heartbeats grow old, or it is unreachable
            store = store or _reconnect()
            store.set(_key(self._rank), str(self._checks))
            values = store.multi_get(list(map(_key, self._peers)))
            self._connection = store
            for peer, value in zip(self._peers, values, strict=True):
                if value != self._last_seen[peer].value:
                    self._last_seen[peer] = LastHeartbeat(value, self._checks)

    def _repeat(self, check: Callable[[], None]) -> None:
        """Repeat this until the rank leaves, also after an unexpected error: the others would take the rank for dead.

        An error equal to the last one is not shown again.
        """
        shown = ""
        while not self._stopped.wait(HEARTBEAT_CHECK_S):
            try:
                check()
            except Exception as error:  # noqa: BLE001 (no caller gets it)
                if repr(error) != shown:
                    shown = repr(error)
                    with suppress(OSError):  # no one reads the output any more
                        traceback.print_exc()

    def _dead_ranks_message(self, checks: int) -> str | None:
        working = {rank: heartbeat for rank, heartbeat in self._last_seen.items() if heartbeat.value != DONE}
        silent = [rank for rank, heartbeat in working.items() if self._checks - heartbeat.check > checks]
        failed = [
            rank
            for rank, heartbeat in working.items()
            if heartbeat.value == FAILED and self._checks - heartbeat.check >= checks - MISSED_AFTER_ERROR
        ]
        if not silent and not failed:
            return None
        ranks = "rank " + ", ".join(map(self._name, failed or silent))
        reason = "has failed" if failed else f"has given no sign of life for {checks * HEARTBEAT_CHECK_S:.0f} s"
        return (
            f"{ranks} {reason}, so rank {self._rank} ends too; see the output of the former; to continue, run the same "
            "command with --resume"
        )

    def _name(self, rank: int) -> str:
        """The number of a rank, with its machine if that is another one."""
        machine = self._machines[rank]
        return str(rank) if machine == self._machines[self._rank] else f"{rank} on {machine}"


def in_daemon_thread(name: str, act: Callable[[], Result]) -> Future[Result]:
    """The result of `act`, in a thread that may hang and ends with the process."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:  # noqa: BLE001 (the waiting thread gets it)
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def _run_within(ask: Callable[[], Result], within_s: float) -> Result:
    """Ask the store with a timeout. Its own timeout fails against a listener that never answers; the thread is then
    abandoned.

    Raises:
        RuntimeError: there was no answer.
    """
    try:
        return in_daemon_thread("meet", ask).result(within_s + STORE_S)
    except TimeoutError:
        raise RuntimeError("nothing answers there") from None


def _reconnect() -> TCPStore:
    """A new connection to the store. RuntimeError: it cannot be reached."""
    store = TCPStore(*_address(), is_master=False, timeout=timedelta(seconds=HEARTBEAT_CHECK_S), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=STORE_S))
    return store


def _at_rendezvous(ranks: Sequence[int], what: str) -> str:
    host, port = _address()
    return f"rank {', '.join(map(str, ranks))} {what} at {host}:{port}"


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


@contextmanager
def watch_ranks(rank: int, ranks: int) -> Iterator[Sequence[RankHost]]:
    """Watch the other ranks and name the lost ones; does nothing with a single rank. Yields the machine of each rank.

    Raises:
        RankGone: a collective failed, because a rank is gone.
    """
    if ranks == 1:
        yield []
        return
    heartbeat, last = Heartbeat(rank, ranks), FAILED
    try:
        yield heartbeat.hosts
        last = DONE
    except RuntimeError as error:
        if message := heartbeat.dead_rank():
            raise RankGone(message) from error
        raise
    finally:
        heartbeat.leave(last)


def _key(rank: int) -> str:
    return f"ngym/sign of life/{rank}"


def _host_key(rank: int) -> str:
    return f"ngym/host/{rank}"


@contextmanager
def join_process_group(launch: Launch) -> Iterator[None]:
    """In the process group (the launcher's environment has its address), or alone without a launcher."""
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(launch.local_rank)
    try:
        with watch_ranks(launch.rank, launch.ranks) as hosts:
            if launch.launched:
                if interface := gloo_interface(hosts, launch.rank):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                distributed.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
            else:
                distributed.init_process_group(
                    backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
                )
            yield
    finally:
        _exit_process()


def gloo_interface(hosts: Sequence[RankHost], rank: int) -> str | None:
    """The network interface for gloo; None if its own choice is right: that of the address of this machine's name.

    Debian writes this name with the address 127.0.1.1 into /etc/hosts, where other machines cannot connect.
    """
    with suppress(OSError):
        if not is_loopback(socket.gethostbyname(hosts[rank].name)):
            return None
    addresses = [host.address for host in hosts if not is_loopback(host.address)]
    if not addresses:  # all ranks are on one machine
        return None
    own = hosts[rank].address
    return interface_of(_address_towards(addresses[0]) if is_loopback(own) else own)


def _address_towards(host: str) -> str:
    """This machine's address on the way to a host; a loopback one if there is no way."""
    try:
        return route_to(f"//{host}").own
    except OSError:
        return "127.0.0.1"


def _exit_process() -> None:
    """Leave through DeepSpeed if it was used: it caches groups, and would use dead ones in the next process group."""
    comm: Any = sys.modules.get("deepspeed.comm")
    if comm is not None and comm.is_initialized():
        comm.destroy_process_group()
    elif distributed.is_initialized():
        distributed.destroy_process_group()


def barrier() -> None:
    """Return when every rank has called this."""
    on_gpus = distributed.get_backend() == "nccl"
    # Without its device, PyTorch warns on the screen that it guesses one.
    distributed.barrier(device_ids=[torch.cuda.current_device()] if on_gpus else None)
