"""Services on a Ray cluster: one actor per process, in a placement group, forks and watches it with our own zygote.

    head (ng_run) --actor calls--> Host on a node --zygote--> the service's process, which listens on the node's address

Ray decides the node, assigns GPUs and moves the actor's bundle if the node dies; then the process is started again
there, with another URL. An actor ends with its driver, and a zygote with its actor, so nothing is left behind. Specs,
with the run's tokens, travel as arguments of actor calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ngym.cluster.ray_membership import is_lost, watch_membership
from ngym.config.service_config import Config, Resources, Stanza
from ngym.errors import ConfigError, NgymError, UsageError
from ngym.runtime.event_loop import log_error
from ngym.supervise.node_group import NodeGroup
from ngym.supervise.placement import asked_cores
from ngym.supervise.service import EXIT_LOST, ProcessHost, StartedProcess, free_port, listen, url_of
from ngym.supervise.zygote_client import Child, ZygoteClient

MIN_CPU = 0.1  # of a process whose stanza asks for none: a bundle cannot be empty
POOL_SHARE = 0.001  # of the custom resource: it only says which nodes are meant
CHUNK_BYTES = 32 << 10
CONNECT_S = 10.0
CLOSE_S = 5.0
SCHEDULED_S = 0.5
ATTEMPTS = 5  # to create an actor: nodes may die meanwhile


class Host:
    """The actor beside one process. It holds the listening socket, which stays bound while the process restarts."""

    def __init__(self) -> None:
        self._launcher = ZygoteClient.start()  # inherits the GPUs that Ray has assigned to this actor
        self._child: Child | None = None
        self._output: asyncio.StreamReader | None = None
        self._socket: socket.socket | None = None

    async def listen(self, port: int, tls: bool) -> tuple[str, str]:
        """Bind this node's address; returns the URL and the node's name."""
        address = ray.util.get_node_ip_address()
        if self._socket is None:
            self._socket = listen(address, port, "this service", "leave `port` out of its stanza to get a free one")
        return url_of(self._socket, tls), f"{address} ({ray.get_runtime_context().get_node_id()[:6]})"

    async def start(self, title: str, spec: dict[str, Any], python: str | None, environment: Mapping[str, str]) -> int:
        """Fork the process; returns its pid."""
        assert self._socket is not None
        read, write = os.pipe()
        self._output = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._output)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read, "rb", buffering=0))
        own = Path(python) if python else None
        self._child = await self._launcher.fork("run", title, spec, write, [self._socket], own, environment)
        return self._child.pid.result()

    async def output(self) -> bytes:
        """The output of the process since the last call; waits for some. b"": its last writer is gone."""
        assert self._output is not None
        return await self._output.read(CHUNK_BYTES)

    async def exit_code(self) -> int:
        assert self._child is not None
        return await asyncio.shield(self._child.exit_code)

    async def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(signal.Signals(number))

    async def free_port(self) -> int:
        return free_port(ray.util.get_node_ip_address())

    async def stop_listening(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def close(self) -> None:
        self._launcher.close()


class RayProcess:
    """A process on a node, as the head sees it."""

    def __init__(self, host: Any, pid: int, log: int) -> None:
        loop = asyncio.get_running_loop()
        self._host = host
        self.pid: asyncio.Future[int] = loop.create_future()
        self.pid.set_result(pid)
        self.exit_code: asyncio.Future[int] = loop.create_future()
        self._tasks = [
            loop.create_task(self._end(), name=f"the watch of process {pid}"),
            loop.create_task(self._copy(log), name=f"the output of process {pid}"),
        ]
        for task in self._tasks:
            task.add_done_callback(log_error)

    def signal(self, number: signal.Signals) -> None:
        if not self.exit_code.done():
            self._host.signal.remote(int(number))

    async def drain(self) -> None:
        """Wait until everything that the dead process wrote has been copied."""
        await asyncio.wait(self._tasks, timeout=CLOSE_S)

    async def _end(self) -> None:
        try:
            code = await self._host.exit_code.remote()
        except RayError:
            code = EXIT_LOST
        except Exception as error:
            if not self.exit_code.done():
                self.exit_code.set_exception(error)
            raise
        if not self.exit_code.done():
            self.exit_code.set_result(code)

    async def _copy(self, log: int) -> None:
        """Copy the output into the head's log of this service. It is read to its end, also after the log was closed: without
        a reader, the process would wait forever.
        """
        can_write = True
        try:
            with suppress(RayError), os.fdopen(log, "wb", buffering=0) as file:
                while chunk := await self._host.output.remote():
                    try:
                        if can_write:
                            await asyncio.to_thread(file.write, chunk)  # the pipe's reader is on this event loop
                    except OSError:
                        can_write = False
        except (OSError, asyncio.CancelledError):
            return


class _OnRay:
    """One bundle of the placement group, and the actor in it; a new actor where the bundle's node has died."""

    def __init__(self, stanza: Stanza, port: int, tls: bool, create: Callable[[], Any]) -> None:
        self.url = self.node = ""
        self._port, self._tls = port, tls
        self._create = create
        self._environment = asked_cores(stanza) | _named_secrets(stanza)
        self._host: Any = None

    async def bind(self) -> None:
        """Wait until the actor listens."""
        for attempts_left in reversed(range(ATTEMPTS)):
            self._host = self._host or self._create()
            try:
                self.url, self.node = await self._host.listen.remote(self._port, self._tls)
                return
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, NgymError) else error from None
            except RayActorError as error:  # its node has died, or ngym is not installed there
                self._host = None
                if not attempts_left:
                    raise NgymError(f"a node of the Ray cluster cannot run a service: {last_line(error)}") from None
                await asyncio.sleep(SCHEDULED_S)

    async def start(self, title: str, spec: dict[str, Any], log: int, python: Path | None) -> StartedProcess:
        try:
            while True:
                await self.bind()
                with suppress(RayActorError):
                    own = str(python) if python else None
                    pid = await self._host.start.remote(title, spec, own, self._environment)
                    return RayProcess(self._host, pid, log)
        except BaseException:
            os.close(log)
            raise

    async def rendezvous(self) -> tuple[str, int]:
        while True:
            await self.bind()
            with suppress(RayActorError):
                return urlsplit(self.url).hostname or "", await self._host.free_port.remote()

    async def stop_listening(self) -> None:
        with suppress(RayError):
            await self._host.stop_listening.remote()

    async def close(self) -> None:
        if self._host is not None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._host.close.remote()
            ray.kill(self._host)


class RayPlacer:
    """The processes of a Ray cluster. `RayPlacer.connect("ray")` or `("ray://HOST:PORT")`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.started = time.monotonic()
        self._say = say
        self._places: dict[_OnRay, PlacementGroup] = {}
        self._disconnects = False

    @classmethod
    def connect(cls, to: str, say: Callable[[str], None] = lambda text: None) -> RayPlacer:
        """Connect to a cluster that this machine is a node of.

        Raises:
            UsageError: no cluster answers, or it refuses this process.
        """
        engine = cls(say)
        connect(to)
        engine._disconnects = True
        return engine

    def reachable(self, config: Config) -> Config:
        """The config with the head at this node's address, where it says nothing else: other nodes call it."""
        settings, own = config.settings, {"host": ray.util.get_node_ip_address()}
        head = settings.head if "host" in settings.head.model_fields_set else settings.head.model_copy(update=own)
        host = {} if "host" in settings.model_fields_set else own
        return config.model_copy(update={"settings": settings.model_copy(update={"head": head, **host})})

    async def places(self, config: Config) -> Mapping[str, list[ProcessHost]]:
        own = [stanza for stanza in config.services.values() if not stanza.external]
        everywhere = [stanza for stanza in own if stanza.replicas == "per_node"]
        large = [stanza for stanza in own if stanza.nodes > 1]
        rest = [stanza for stanza in own if stanza not in everywhere and stanza not in large]
        processes = [stanza for stanza in rest for _ in range(stanza.first_replicas)]
        hosts: dict[str, list[ProcessHost]] = {stanza.name: [] for stanza in own}
        groups = [(processes, "PACK")] if processes else []
        groups += [([stanza] * nodes_for(stanza), "STRICT_SPREAD") for stanza in everywhere]
        for stanzas, strategy in groups:
            for stanza, place in zip(stanzas, await self._reserve(config, stanzas, strategy), strict=True):
                hosts[stanza.name].append(place)
        for stanza in large:
            hosts[stanza.name] = [await self._replica(config, stanza) for _ in range(stanza.first_replicas)]
        await asyncio.gather(*(place.bind() for place in self._places))
        return hosts

    async def more(self, config: Config, stanza: Stanza) -> ProcessHost | None:
        try:
            place = await self._replica(config, stanza)
        except ConfigError:
            return None
        bound = await asyncio.gather(*(host.bind() for host in _hosts(place)), return_exceptions=True)
        errors = [each for each in bound if isinstance(each, BaseException)]
        if not errors:
            return place
        await self.release(place)
        if not isinstance(errors[0], NgymError):
            raise errors[0]
        self._say(str(errors[0]))  # the run goes on without it
        return None

    async def release(self, place: ProcessHost) -> None:
        for host in _hosts(place):
            await host.close()
            _remove(self._places.pop(host))

    async def watch(self) -> None:
        await watch_membership()

    async def _replica(self, config: Config, stanza: Stanza) -> ProcessHost:
        """A place for one replica; those of its processes are on different nodes."""
        places = await self._reserve(config, [stanza] * stanza.nodes, "STRICT_SPREAD")
        return places[0] if len(places) == 1 else NodeGroup(places)

    async def _reserve(self, config: Config, stanzas: Sequence[Stanza], strategy: str) -> list[_OnRay]:
        """A placement group with a place for each of these stanzas."""
        bundles = [bundle_of(stanza) for stanza in stanzas]
        names = [stanza.name for stanza in stanzas]
        group = await reserve_group(names, bundles, config.settings.ready_timeout_s, self._say, strategy)
        tls = config.settings.tls is not None
        places = [
            _OnRay(stanza, _port(stanza, index), tls, _creator(group, index, bundle))
            for index, (stanza, bundle) in enumerate(zip(stanzas, bundles, strict=True))
        ]
        self._places |= dict.fromkeys(places, group)
        return places

    async def close(self) -> None:
        if is_lost():
            return
        await asyncio.gather(*(place.close() for place in self._places))
        for group in {group.id: group for group in self._places.values()}.values():
            _remove(group)
        if self._disconnects:
            ray.shutdown()


def _hosts(place: ProcessHost) -> list[_OnRay]:
    return [host for host in (place.hosts if isinstance(place, NodeGroup) else [place]) if isinstance(host, _OnRay)]


def _port(stanza: Stanza, index: int) -> int:
    """The stanza's port, except for the further nodes of a replica. index: in its placement group."""
    return 0 if stanza.nodes > 1 and index else stanza.port or 0


def _creator(group: PlacementGroup, index: int, bundle: Mapping[str, float]) -> Callable[[], Any]:
    actor = ray.remote(Host)
    return lambda: actor.options(scheduling_strategy=in_group(group, index), **of_actor(bundle)).remote()


def _remove(group: PlacementGroup) -> None:
    with suppress(RayError):
        remove_placement_group(group)


def nodes_for(stanza: Stanza) -> int:
    """The number of nodes that have what one process of this stanza asks for. Raises ConfigError: no node has it."""
    requested = bundle_of(stanza)
    count = sum(
        bool(node["Alive"]) and all(node["Resources"].get(name, 0) >= amount for name, amount in requested.items())
        for node in ray.nodes()
    )
    if not count:
        where = stanza.key_where.get("replicas", stanza.where)
        raise ConfigError(f"{where}: replicas: per_node: no node of the Ray cluster has {_resources_text([requested])}")
    return count


def connect(to: str) -> None:
    """Join the Ray cluster that `ray` (of this machine, or RAY_ADDRESS) or `ray://HOST:PORT` names.

    Raises:
        UsageError: no cluster answers, or it refuses this process.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    address = to.removeprefix("ray").removeprefix("://") or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RayError, RuntimeError, ValueError) as error:
        raise UsageError(f"--on {to}: {_connection_error(error)} (docs/scale.md)") from None


def _connection_error(error: BaseException) -> str:
    """The reason why `ray.init` failed, and advice. Ray names a refused token in the traceback that is the cause's
    text.
    """
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, AuthenticationError):  # there was no token to send
        reason = reason.partition(". Ensure ")[0]  # Ray's own advice
        return (
            f"no token for the Ray cluster ({reason}); set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that of the cluster"
        )
    if "InvalidAuthToken" in str(error.__cause__):
        return (
            f"the Ray cluster refuses the token ({reason}); set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH to that of the cluster"
        )
    return f"no Ray cluster to join ({reason}); start one with `ray start --head`, and run this command on one of its nodes"


async def reserve_group(
    names: Sequence[str],
    bundles: list[dict[str, float]],
    within_s: float,
    say: Callable[[str], None],
    strategy: str = "PACK",
) -> PlacementGroup:
    """A placement group with these bundles. names: of their processes.

    Raises:
        ConfigError: the cluster has no room for them within this time.
    """
    group: PlacementGroup = placement_group(bundles, strategy=strategy)
    ready = asyncio.ensure_future(_await(group.ready()))
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ready), SCHEDULED_S)
    room = _resources_text(bundles) + (
        f"; on {len(bundles)} nodes" if strategy == "STRICT_SPREAD" and len(bundles) > 1 else ""
    )
    if not ready.done():
        room += _largest_text(names, bundles)
        say(f"waiting for room on the cluster: {room}")
    try:
        await asyncio.wait_for(ready, within_s)
    except TimeoutError:
        remove_placement_group(group)
        raise ConfigError(f"the Ray cluster has no room within {within_s:g} s: {room}") from None
    return group


def last_line(error: BaseException) -> str:
    """The last line of an error of Ray's, which is that of the remote traceback."""
    return str(error).strip().rpartition("\n")[2]


async def _await(result: Awaitable[Any]) -> Any:
    return await result


def _resources_text(bundles: list[dict[str, float]]) -> str:
    requested: Counter[str] = Counter()
    for bundle in bundles:
        requested.update(bundle)
    there, free = ray.cluster_resources(), ray.available_resources()
    return "; ".join(
        f"{name.lower()}: {_amount(name, amount)} asked, {_amount(name, free.get(name, 0))} free of "
        f"{_amount(name, there.get(name, 0))}"
        for name, amount in requested.items()
    )


def _largest_text(names: Sequence[str], bundles: list[dict[str, float]]) -> str:
    """What the largest process needs, and the node that has the largest part of it free; "" if Ray does not say."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:  # no public function says so
        return ""
    size = [[bundle.get(name, 0) for name in ("GPU", "memory", "CPU")] for bundle in bundles]
    index = size.index(max(size))
    largest = bundles[index]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    free: dict[str, dict[str, float]] = {
        addresses[node]: room for node, room in available_resources_per_node().items() if node in addresses
    }

    def part(address: str) -> float:
        return min(free[address].get(name, 0) / amount for name, amount in largest.items())

    def text(amounts: Mapping[str, float]) -> str:
        return ", ".join(f"{name.lower()} {_amount(name, amounts.get(name, 0))}" for name in largest)

    if not free:
        return ""
    best = max(free, key=part)
    return f"; {names[index]} needs {text(largest)} on one node, and {best} has the most free: {text(free[best])}"


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB" if name == "memory" else f"{amount:.4g}"


def bundle_of(stanza: Stanza) -> dict[str, float]:
    """The resources that Ray reserves for each process of a stanza."""
    return bundle(stanza.resources or Resources(), stanza.pool)


def bundle(resources: Resources, pool: str | None) -> dict[str, float]:
    """Ray's names for these resources; those of zero are left out."""
    memory = float(int((resources.memory_gb or 0) * 2**30))
    whole = {"CPU": resources.cpus or MIN_CPU, "GPU": float(resources.gpus or 0), "memory": memory}
    return {name: amount for name, amount in whole.items() if amount} | ({pool: POOL_SHARE} if pool else {})


def of_actor(bundle: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that uses the whole bundle."""
    rest = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": rest}
    return options | ({"memory": bundle["memory"]} if "memory" in bundle else {})


def in_group(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, index)


def _named_secrets(stanza: Stanza) -> dict[str, str]:
    """The variables that the stanza's options name (`api_key_env: OPENAI_API_KEY`), which nodes need not have."""
    names = [value for key, value in stanza.options.items() if key.endswith("_env") and isinstance(value, str)]
    return {name: os.environ[name] for name in names if name in os.environ}
