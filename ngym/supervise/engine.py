"""Engines place and start the processes of services: this machine's, or that of a cluster (`ngym.cluster`)."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ngym.config.service_config import Config, Stanza
from ngym.errors import ConfigError
from ngym.supervise.launcher import Launcher
from ngym.supervise.placement import VISIBLE, gpu_slices
from ngym.supervise.service import listen, url_of


class Running(Protocol):
    """A started process: its pid on its machine, and its exit code once it has ended (negative: a signal's number)."""

    pid: asyncio.Future[int]
    exit_code: asyncio.Future[int]

    def signal(self, number: signal.Signals) -> None: ...


class Place(Protocol):
    """Where one process of a service runs. url: where it listens; it changes if the process moves to another node.

    node: the machine's name in the cluster; "": this machine.
    """

    url: str
    node: str

    async def start(self, title: str, spec: dict[str, Any], log: int, python: Path | None) -> Running:
        """Start the process. log: the descriptor for its output, closed here."""
        ...


class Engine(Protocol):
    """`places` reserves resources and addresses for all services, or raises ConfigError before anything starts."""

    started: float

    async def places(self, config: Config) -> Mapping[str, list[Place]]: ...

    async def close(self) -> None: ...


class _Here:
    """A socket of this machine, which stays bound while the process restarts, and the process' own variables."""

    node = ""

    def __init__(self, launcher: Launcher, sock: socket.socket, tls: bool, environment: Mapping[str, str]) -> None:
        self.url = url_of(sock, tls)
        self._launcher = launcher
        self._socket = sock
        self._environment = environment

    async def start(self, title: str, spec: dict[str, Any], log: int, python: Path | None) -> Running:
        return await self._launcher.fork("run", title, spec, log, [self._socket], python, self._environment)


class LocalEngine:
    """The processes of this machine, forked by the zygote."""

    def __init__(self, launcher: Launcher) -> None:
        self.started = launcher.started
        self._launcher = launcher
        self._sockets: list[socket.socket] = []

    async def places(self, config: Config) -> Mapping[str, list[Place]]:
        slices = gpu_slices(config)
        own = [stanza for stanza in config.services.values() if not stanza.external]
        return {stanza.name: self._places(config, stanza, slices) for stanza in own}

    def _places(self, config: Config, stanza: Stanza, slices: Mapping[tuple[str, int], tuple[str, ...]]) -> list[Place]:
        check_port(stanza)
        remedy = f"stop that program, or leave `port` out of {stanza.name!r} ({stanza.where}) to get a free one"
        places: list[Place] = []
        for replica in range(stanza.replicas):
            sock = listen(config.settings.host, stanza.port or 0, f"service {stanza.name!r}", remedy)
            self._sockets.append(sock)
            gpus = slices.get((stanza.name, replica))
            environment = {} if gpus is None else {VISIBLE: ",".join(gpus)}
            places.append(_Here(self._launcher, sock, config.settings.tls is not None, environment))
        return places

    async def close(self) -> None:
        self._launcher.close()
        for sock in self._sockets:
            sock.close()


def check_port(stanza: Stanza) -> None:
    """Raise a ConfigError if several processes have the same port."""
    if stanza.port and stanza.replicas > 1:
        where = stanza.key_where.get("port", stanza.where)
        raise ConfigError(f"{where}: {stanza.name!r} has {stanza.replicas} replicas and one port; leave `port` out")
