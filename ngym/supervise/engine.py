"""Engines place and start the processes of services: this machine's, or that of a cluster (`ngym.cluster`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ngym.config.service_config import Config, ReplicaRange, Resources, Stanza
from ngym.errors import ConfigError
from ngym.supervise.launcher import Launcher
from ngym.supervise.placement import VISIBLE, Machine, gpu_slices, spare_gpus, this_machine
from ngym.supervise.service import Place, Running, listen, url_of


class Engine(Protocol):
    """`places` reserves resources and addresses for all services, or raises ConfigError before anything starts."""

    started: float

    async def places(self, config: Config) -> Mapping[str, list[Place]]: ...

    async def more(self, config: Config, stanza: Stanza) -> Place | None:
        """A place for one more replica; None if there is no room."""
        ...

    async def release(self, place: Place) -> None:
        """Free what `more` has reserved; the process there has ended."""
        ...

    async def close(self) -> None: ...


class _Here:
    """A socket of this machine, which stays bound while the process restarts, and the process' own variables."""

    node = ""

    def __init__(self, launcher: Launcher, sock: socket.socket, tls: bool, environment: Mapping[str, str]) -> None:
        self.url = url_of(sock, tls)
        self._launcher = launcher
        self._socket = sock
        self._environment = environment

    async def shut(self) -> None:
        self._socket.close()

    async def start(self, title: str, spec: dict[str, Any], log: int, python: Path | None) -> Running:
        return await self._launcher.fork("run", title, spec, log, [self._socket], python, self._environment)


class LocalEngine:
    """The processes of this machine, forked by the zygote."""

    def __init__(self, launcher: Launcher) -> None:
        self.started = launcher.started
        self._launcher = launcher
        self._places: dict[_Here, tuple[Resources, tuple[str, ...]]] = {}
        self._machine: Machine | None = None

    async def places(self, config: Config) -> Mapping[str, list[Place]]:
        slices = gpu_slices(config)
        own = [stanza for stanza in config.services.values() if not stanza.external]
        for stanza in own:
            check_port(stanza)
        return {
            stanza.name: [
                self._place(config, stanza, slices.get((stanza.name, replica)))
                for replica in range(stanza.first_replicas)
            ]
            for stanza in own
        }

    async def more(self, config: Config, stanza: Stanza) -> Place | None:
        asked, gpus = stanza.resources, None
        if asked is not None:
            if self._machine is None:
                self._machine = await asyncio.to_thread(this_machine)
            gpus = spare_gpus(asked, self._places.values(), self._machine)
            if gpus is None:
                return None
        return self._place(config, stanza, gpus if asked and asked.gpus is not None else None)

    async def release(self, place: Place) -> None:
        assert isinstance(place, _Here)
        del self._places[place]
        await place.shut()

    def _place(self, config: Config, stanza: Stanza, gpus: tuple[str, ...] | None) -> Place:
        remedy = f"stop that program, or leave `port` out of {stanza.name!r} ({stanza.where}) to get a free one"
        sock = listen(config.settings.host, stanza.port or 0, f"service {stanza.name!r}", remedy)
        environment = {} if gpus is None else {VISIBLE: ",".join(gpus)}
        place = _Here(self._launcher, sock, config.settings.tls is not None, environment)
        self._places[place] = (stanza.resources or Resources(), gpus or ())
        return place

    async def close(self) -> None:
        self._launcher.close()
        for place in self._places:
            await place.shut()


def check_port(stanza: Stanza) -> None:
    """Raise a ConfigError if several processes have the same port."""
    most = stanza.replicas.max if isinstance(stanza.replicas, ReplicaRange) else stanza.first_replicas
    if stanza.port and most > 1:
        where = stanza.key_where.get("port", stanza.where)
        raise ConfigError(f"{where}: {stanza.name!r} has {most} replicas and one port; leave `port` out")
