"""Placement: where the processes of a config run, and the GPUs that each gets.

An engine places processes and starts them: on this machine (`LocalPlacer`), or on a cluster (`ngym.cluster`).
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from ngym.config.service_config import VLLM, Config, ReplicaRange, Resources, Stanza
from ngym.errors import ConfigError
from ngym.runtime.cpu_threads import CPUS, PROCESSES, usable_cores
from ngym.supervise import warm_zygote
from ngym.supervise.node_group import NodeGroup
from ngym.supervise.service import ProcessHost, StartedProcess, free_port, listen, url_of
from ngym.supervise.zygote_client import ZygoteClient

VISIBLE = "CUDA_VISIBLE_DEVICES"
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_S = 30.0
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # of vLLM: each multiplies its GPUs
MEMORY_SHARE, SHARES = "gpu_memory_utilization", 0.5  # of vLLM; with at most this, several are to share a GPU


class ProcessPlacer(Protocol):
    """`places` reserves resources and addresses for all services, or raises ConfigError before anything starts."""

    started: float

    async def places(self, config: Config) -> Mapping[str, list[ProcessHost]]: ...

    async def more(self, config: Config, stanza: Stanza) -> ProcessHost | None:
        """A place for one more replica; None if there is no room."""
        ...

    async def release(self, place: ProcessHost) -> None:
        """Free what `more` has reserved; the process there has ended."""
        ...

    async def watch(self) -> None:
        """Wait forever. Raises NgymError when no process can be started or watched any more."""
        ...

    async def close(self) -> None: ...


class _LocalHost:
    """A socket of this machine, which stays bound while the process restarts, and the process' own variables."""

    node = ""

    def __init__(self, placer: LocalPlacer, sock: socket.socket, tls: bool, environment: Mapping[str, str]) -> None:
        self.url = url_of(sock, tls)
        self._placer = placer
        self._socket = sock
        self.environment = environment

    async def rendezvous(self) -> tuple[str, int]:
        address = urlsplit(self.url).hostname or ""
        return address, free_port(address)

    async def stop_listening(self) -> None:
        self._socket.close()

    async def start(self, title: str, spec: dict[str, Any], log: int, python: Path | None) -> StartedProcess:
        launcher = await self._placer.launcher(Path(spec["app_file"]), python)
        return await launcher.fork("run", title, spec, log, [self._socket], python, self.environment)


class LocalPlacer:
    """The processes of this machine, forked by the zygote, or by one that an earlier command left behind.

    warm: leave one behind for each app with a `preload` function (`ng_run --warm`). ranks: of a trainer, which use the
    first GPUs.
    """

    def __init__(self, launcher: ZygoteClient, warm: bool = False, ranks: int = 0) -> None:
        self.started = launcher.started
        self._launcher = launcher
        self._warm = warm
        self._ranks = ranks
        self._resources: dict[str, Resources | None] = {}  # of each process of a service
        self._preloaded: dict[Path, asyncio.Task[ZygoteClient | None]] = {}
        self._places: dict[_LocalHost, tuple[Resources, tuple[str, ...]]] = {}
        self._machine: Machine | None = None

    async def places(self, config: Config) -> Mapping[str, list[ProcessHost]]:
        config = with_own_gpus(config, self._ranks)
        slices = gpu_slices(config)
        own = [stanza for stanza in config.services.values() if not stanza.external]
        self._resources = {stanza.name: stanza.resources for stanza in own}
        return {
            stanza.name: [
                self._replica(
                    config,
                    stanza,
                    [slices.get((stanza.name, replica * stanza.nodes + rank)) for rank in range(stanza.nodes)],
                )
                for replica in range(stanza.first_replicas)
            ]
            for stanza in own
        }

    async def launcher(self, app_file: Path, python: Path | None) -> ZygoteClient:
        """The zygote for the services of this app. python: that of the service's own packages."""
        if python is not None:
            return self._launcher
        if app_file not in self._preloaded:
            start = self._warm and warm_zygote.can_preload(app_file)
            self._preloaded[app_file] = asyncio.create_task(warm_zygote.session(app_file, start))
        return await asyncio.shield(self._preloaded[app_file]) or self._launcher

    async def more(self, config: Config, stanza: Stanza) -> ProcessHost | None:
        resources, slices = self._resources.get(stanza.name, stanza.resources), list[tuple[str, ...] | None]()
        stanza = stanza.model_copy(update={"resources": resources})
        reserved = list(self._places.values())
        for _ in range(stanza.nodes):
            if resources is None:
                slices.append(None)
                continue
            if self._machine is None:
                machine = await asyncio.to_thread(this_machine)
                self._machine = machine._replace(gpus=machine.gpus[self._ranks :])
            gpus = spare_gpus(resources, reserved, self._machine)
            if gpus is None:
                return None
            reserved.append((resources, gpus))
            slices.append(gpus if resources.gpus is not None else None)
        return self._replica(config, stanza, slices)

    async def release(self, place: ProcessHost) -> None:
        for host in place.hosts if isinstance(place, NodeGroup) else [place]:
            assert isinstance(host, _LocalHost)
            del self._places[host]
            await host.stop_listening()

    def _replica(self, config: Config, stanza: Stanza, slices: Sequence[tuple[str, ...] | None]) -> ProcessHost:
        """slices: the GPUs of each process. With `nodes`, this machine stands for all of them."""
        hosts = [
            self._process_host(config, stanza, gpus, 0 if rank else stanza.port or 0)
            for rank, gpus in enumerate(slices)
        ]
        return hosts[0] if len(hosts) == 1 else NodeGroup(hosts)

    def _process_host(self, config: Config, stanza: Stanza, gpus: tuple[str, ...] | None, port: int) -> ProcessHost:
        remedy = f"stop that program, or leave `port` out of {stanza.name!r} ({stanza.where}) to get a free one"
        sock = listen(config.settings.host, port, f"service {stanza.name!r}", remedy)
        environment = (asked_cores(stanza) or shared_cores(stanza)) | shared_memory(stanza)
        if gpus is not None:
            environment[VISIBLE] = ",".join(gpus)
        place = _LocalHost(self, sock, config.settings.tls is not None, environment)
        self._places[place] = (stanza.resources or Resources(), gpus or ())
        return place

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        for session in self._preloaded.values():
            session.cancel()
            (client,) = await asyncio.gather(session, return_exceptions=True)
            if isinstance(client, ZygoteClient):
                client.close()
        self._launcher.close()
        for place in self._places:
            await place.stop_listening()


def asked_cores(stanza: Stanza) -> dict[str, str]:
    """The variable with the cores of each process of a stanza, if its `resources` have `cpus`."""
    cpus = stanza.resources.cpus if stanza.resources is not None else None
    return {} if cpus is None else {CPUS: f"{cpus:g}"}


def shared_cores(stanza: Stanza) -> dict[str, str]:
    """As `asked_cores`, for processes that ask for none: a fixed number of replicas shares this machine's cores."""
    count = stanza.first_replicas * stanza.nodes
    if isinstance(stanza.replicas, ReplicaRange) or count == 1:
        return {}
    return {CPUS: str(max(1, usable_cores() // count))}


def shared_memory(stanza: Stanza) -> dict[str, str]:
    """The variable with the most processes of a stanza on this machine, which share its memory."""
    return {PROCESSES: str(stanza.most_replicas * stanza.nodes)}


class Machine(NamedTuple):
    """The resources of this machine. gpus: as CUDA_VISIBLE_DEVICES names them."""

    gpus: tuple[str, ...]
    cpus: int
    memory_gb: float


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The GPUs of CUDA_VISIBLE_DEVICES if that is set, else those that nvidia-smi lists; usable cores; memory."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the limit of a container
        size = min(size, int(CGROUP_LIMIT.read_text()))
    return Machine(visible_gpus(environ), usable_cores(), size / 2**30)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    if VISIBLE in environ:
        names = (name.strip() for name in environ[VISIBLE].split(","))
        return tuple(takewhile(lambda name: name not in ("", "-1"), names))  # CUDA, too, stops at the first invalid one
    with suppress(OSError, subprocess.SubprocessError):
        return tuple(subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=QUERY_S).stdout.split())
    return ()


def processes(config: Config) -> Iterator[tuple[Stanza, int, Resources]]:
    """Every process that asks for resources: its stanza, its number, and what it asks for."""
    for stanza in config.services.values():
        if stanza.resources is not None and not stanza.external:
            for number in range(stanza.first_replicas * stanza.nodes):
                yield stanza, number, stanza.resources


def with_own_gpus(config: Config, ranks: int = 0, machine: Machine | None = None) -> Config:
    """The config with `resources.gpus` for each process of models/vllm. Without it, all processes use the first GPUs, and
    each takes nearly all of their memory. The config does not change for a single process, or with too few GPUs.

    A stanza keeps its own `resources.gpus`. It shares GPUs if it asks vLLM for at most half of the memory, for sleep mode,
    or for weights through the trainer's memory (ipc).

    ranks: of a trainer on this machine, which use its first GPUs.
    """
    gpus_by_service = {stanza.name: each for stanza in config.services.values() if (each := _gpus_per_process(stanza))}
    most = sum(config.stanza(name).most_replicas * config.stanza(name).nodes for name in gpus_by_service)
    if not most or ranks + most < 2:
        return config
    machine = machine or this_machine()
    changed = config
    for name, gpus in gpus_by_service.items():
        requested = config.stanza(name).resources or Resources()
        changed = changed.with_changes(name, resources=requested.model_copy(update={"gpus": gpus}))
    total_gpus = ranks + sum(requested.gpus or 0 for _, _, requested in processes(changed))
    return changed if total_gpus <= len(machine.gpus) else config


def _gpus_per_process(stanza: Stanza) -> int | None:
    """The number of GPUs that each process of a stanza fills without asking for them; None for other stanzas."""
    engine = stanza.options.get("engine") or {}
    asks = stanza.resources is not None and stanza.resources.gpus is not None
    if stanza.app is None or not stanza.app.endswith(VLLM) or asks or not isinstance(engine, Mapping):
        return None
    share, transfer = engine.get(MEMORY_SHARE), engine.get("weight_transfer_config")
    is_small = isinstance(share, int | float) and share <= SHARES
    by_ipc = isinstance(transfer, Mapping) and transfer.get("backend") == "ipc"
    if is_small or by_ipc or engine.get("enable_sleep_mode"):
        return None
    gpus = math.prod(size for key in PARALLEL if isinstance(size := engine.get(key), int))
    return math.ceil(gpus / stanza.nodes)


def gpu_slices(config: Config, machine: Machine | None = None) -> dict[tuple[str, int], tuple[str, ...]]:
    """(service, number of the process) -> its GPUs, for every process whose stanza has `resources.gpus`.

    Services get the last GPUs of the machine, in the config's order, because a trainer without a launcher uses the
    first one.

    Raises:
        ConfigError: the resources do not fit this machine, or a service needs several machines.
    """
    asking = list(processes(config))
    if not asking:
        return {}
    machine = machine or this_machine()
    _check_fits(asking, machine)
    slices: dict[tuple[str, int], tuple[str, ...]] = {}
    begin = len(machine.gpus) - sum(resources.gpus or 0 for _, _, resources in asking)
    for stanza, number, resources in asking:
        if resources.gpus is not None:
            slices[stanza.name, number] = machine.gpus[begin : begin + resources.gpus]
            begin += resources.gpus
    return slices


def spare_gpus(
    requested: Resources, reserved: Collection[tuple[Resources, Sequence[str]]], machine: Machine
) -> tuple[str, ...] | None:
    """The GPUs of one more process: the last free ones. None: the machine has no room for it.

    reserved: what the other processes asked for, and their GPUs.
    """
    used = {gpu for _, gpus in reserved for gpu in gpus}
    free = [gpu for gpu in machine.gpus if gpu not in used]
    for key, there in (("cpus", machine.cpus), ("memory_gb", machine.memory_gb)):
        if sum(getattr(one, key) or 0 for one in (requested, *(one for one, _ in reserved))) > there:
            return None
    count = requested.gpus or 0
    return tuple(free[len(free) - count :]) if count <= len(free) else None


def _check_fits(asking: list[tuple[Stanza, int, Resources]], machine: Machine) -> None:
    for key, there in (("gpus", len(machine.gpus)), ("cpus", machine.cpus), ("memory_gb", machine.memory_gb)):
        parts: dict[str, float] = {}
        for stanza, _, resources in asking:
            parts[stanza.name] = parts.get(stanza.name, 0) + (getattr(resources, key) or 0)
        if (total := sum(parts.values())) > there:
            each = ", ".join(f"{name} {part:g}" for name, part in parts.items() if part)
            largest = max((stanza for stanza, _, _ in asking), key=lambda stanza: parts[stanza.name])
            where = largest.key_where.get(f"resources.{key}", largest.where)
            raise ConfigError(
                f"{where}: resources.{key}: this machine has {there:.4g}, the services ask for {total:g} ({each}); "
                "ask for less, or run on several machines (docs/scale.md)"
            )
