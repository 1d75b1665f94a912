"""Supervises all services of a config: `async with Supervisor(config) as stack` starts, watches and stops them."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from ngym.config.service_config import Config, ReplicaRange, Stanza, missing_models, secrets_of
from ngym.config.shipped_files import app_file
from ngym.errors import ConfigError
from ngym.net.auth import ADMIN_TOKEN, RUN_TOKEN, is_loopback, new_token, token_from
from ngym.peers import FOLLOW_S, Peers, given_up
from ngym.schema import Kind
from ngym.supervise.head import Head
from ngym.supervise.head_file import HeadFile, RunningHead
from ngym.supervise.metrics_scraper import load_of
from ngym.supervise.placement import LocalPlacer, ProcessPlacer
from ngym.supervise.scaling import ReplicaLoad, follow_load
from ngym.supervise.service import (
    READY_POLL_S,
    PolledReplica,
    ProcessHost,
    ReplicaState,
    RestartLimits,
    ServiceProcess,
    Spares,
    called_urls,
)
from ngym.supervise.venvs import venv_of
from ngym.supervise.zygote_client import ZygoteClient
from ngym.telemetry.log_format import Redactor

TRAINED_S = 30.0  # since a trainer's last word, until replicas without its weights are called
IDLE_POLLS = 2  # without a call, FOLLOW_S apart, until a replica that leaves is stopped
GUEST_POLLS = 5  # without readiness, until a replica that joined is forgotten
GRACE_S = 3.5  # of the 5 s limit for the whole shutdown; a service's own grace period for requests in flight is 3 s


class Supervisor:
    """Starts every service that is not external, waits until each is ready, restarts what dies, stops all together.

    Args:
        config: the global config.
        on_event: called with each change of a service's state.
        launcher: already started before the config was read, to save its start-up time.
        engine: places and starts the processes; default: on this machine, with the launcher.
        strict: a gym server that refuses to start, such as for a missing package, ends the run. Otherwise it is given
            up, and the agents that need it are not ready, as long as another gym server runs.

    `run_token` is the token that its services require (None: no token), `admin_token` the one for weight updates.
    While it runs: `head_url`, `urls` (service name -> URLs of its replicas) and `states`. Entering raises ServiceFailed
    or ConfigError when a service cannot be started; then nothing is left running. `ready_after_s` counts from the
    launcher's start.
    """

    def __init__(
        self,
        config: Config,
        on_event: Callable[[ReplicaState], None] = lambda state: None,
        launcher: ZygoteClient | None = None,
        engine: ProcessPlacer | None = None,
        strict: bool = True,
    ) -> None:
        self.config = config
        self._strict = strict
        self.urls: dict[str, list[str]] = {}
        self.admin_token = token_from(ADMIN_TOKEN) or new_token()
        self.run_token = run_token(config)
        self.ready_after_s: float | None = None
        self._on_event = on_event
        self._launcher = launcher
        self._engine = engine
        self._watched: list[PolledReplica] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._guests: set[asyncio.Task[None]] = set()
        self._grown: dict[ServiceProcess, tuple[ProcessHost, asyncio.Task[None]]] = {}
        self._trainers: dict[str, asyncio.TimerHandle] = {}
        self._hurry = asyncio.Event()
        self._head: Head | None = None
        self._head_file: HeadFile | None = None

    @property
    def notice(self) -> str:
        """What to know if another run owns the folder: commands there find that one. Empty otherwise."""
        if self._head_file is None or (owner := self._head_file.owner) is None:
            return ""
        return (
            f"another run (process {owner.pid}, {owner.url}) is in this folder, and commands use that one; "
            f"for this run, give them --head {self.head_url}. Its logs are in {self._head_file.logs}"
        )

    @property
    def head_url(self) -> str:
        assert self._head is not None, "the head exists while the supervisor runs"
        return self._head.url

    @property
    def states(self) -> list[ReplicaState]:
        """Every process of every service, and every URL of external ones, in the config's order."""
        return [watched.state for watched in self._watched]

    def log_tail(self, label: str) -> tuple[Path, list[str]] | None:
        """The file and the last lines of the log of this process; None: it is not a process of ours."""
        processes = [each for each in self._watched if isinstance(each, ServiceProcess) and each.state.label == label]
        return processes[0].log_tail() if processes else None

    async def __aenter__(self) -> Self:
        self._engine = self._engine or LocalPlacer(self._launcher or ZygoteClient.start())
        try:
            await self._start()
            await self._all_ready()
        except BaseException:
            await self._stop_all()
            raise
        self.ready_after_s = time.monotonic() - self._engine.started
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if await self._stop_all() and kind is None:
            raise asyncio.CancelledError

    def peers(self, owner: str) -> Peers:
        """Its services and the external ones of the config, for this caller; close them before the supervisor ends."""
        return Peers(self.urls, self.head_url, self.run_token, owner=owner, others=self.config.others)

    def join(self, name: str, url: str) -> ReplicaState:
        """Add a replica that runs elsewhere: it is listed while it is ready, and forgotten when it stays away.

        Raises:
            ConfigError: there is no such service.
        """
        stanza = self.config.stanza(name)
        if state_of_url := next((state for state in self.states if state.name == name and state.url == url), None):
            return state_of_url
        label, node = f"{name}@{urlsplit(url).netloc}", urlsplit(url).hostname or ""
        replica = 1 + max((state.replica for state in self.states if state.name == name), default=-1)
        is_held = name in self._trainers
        state = ReplicaState(name, stanza.kind, stanza.app, label, replica, url, node=node, listed=False, held=is_held)
        guest = PolledReplica(state, self._changed, self.run_token, is_guest=True)
        self._watched.append(guest)
        self._guests.add(task := asyncio.create_task(self._watch_guest(guest)))
        task.add_done_callback(self._guests.discard)
        return state

    async def _watch_guest(self, guest: PolledReplica) -> None:
        """Watch a guest until it was not ready for several polls, or not for the first time within the startup limit."""
        limit_s = self._ready_timeout_s(guest.state.kind)
        watch, missed = asyncio.create_task(guest.watch(limit_s)), 0
        try:
            while missed < GUEST_POLLS and not watch.done():
                await asyncio.sleep(READY_POLL_S)
                missed = 0 if guest.state.status == "ready" else missed + (guest.ready_at is not None)
        finally:
            watch.cancel()
            [ended] = await asyncio.gather(watch, return_exceptions=True)
            self._watched.remove(guest)
        match ended:
            case TimeoutError():
                detail = f"was not ready within {limit_s:g} s: {ended}"
            case Exception():
                detail = str(ended)
            case _:  # it was cancelled here
                detail = "left the run"
        guest.change(status="stopped", detail=detail, listed=False)

    def _ready_timeout_s(self, kind: Kind) -> float:
        settings = self.config.settings
        return settings.model_ready_timeout_s if kind == "model" else settings.ready_timeout_s

    def record_proof(self, name: str, version: int, proved: Collection[str]) -> list[str]:
        """Record that a trainer has proved this policy version at these URLs of a model; returns the ready replicas that
        wait for it.

        They get no calls until they are named here, or until the trainer has been silent for TRAINED_S.

        Raises:
            ConfigError: there is no such model.
        """
        stanza = self.config.stanza(name)
        if stanza.kind != "model":
            raise ConfigError(f"{stanza.where}: {name!r} is a {stanza.kind}, not a model")
        self._forget_trainer(name)
        self._trainers[name] = asyncio.get_running_loop().call_later(TRAINED_S, self._release, name)
        replicas = [watched for watched in self._watched if watched.state.name == name]
        for each in replicas:
            died = isinstance(each, ServiceProcess) and each.state.status not in ("ready", "not ready")
            if each.state.url in proved and not died:
                each.change(version=version, held=False)
            elif each.state.version != version:
                each.change(held=True)
        return [each.state.url for each in replicas if each.state.held and each.state.status == "ready"]

    def _forget_trainer(self, name: str) -> None:
        if name in self._trainers:
            self._trainers.pop(name).cancel()

    def _release(self, name: str) -> None:
        """The trainer has ended: every replica gets calls."""
        self._forget_trainer(name)
        for watched in self._watched:
            if watched.state.name == name:
                watched.change(version=None, held=False)

    async def _scale(self, stanza: Stanza, bounds: ReplicaRange) -> None:
        """Follow the load of a model."""

        def replicas() -> list[ServiceProcess]:
            return [
                each for each in self._watched if isinstance(each, ServiceProcess) and each.state.name == stanza.name
            ]

        async def look() -> ReplicaLoad | None:
            own_replicas = replicas()
            ready = [each.state.url for each in own_replicas if each.state.status == "ready" and each.state.listed]
            failed = sum(each in self._grown and each.given_up is not None for each in own_replicas)
            load = await load_of(ready, len(own_replicas) - len(ready) - failed, self.run_token)
            return load and load._replace(failed=failed)

        async def change(by: int) -> None:
            if by > 0:
                await self._grow(stanza)
                return
            grown = [each for each in replicas() if each in self._grown]
            await self._shrink(next((each for each in grown if each.given_up), grown[-1]))

        await follow_load(bounds, look, change)

    async def _grow(self, stanza: Stanza) -> None:
        assert self._engine is not None
        place = await self._engine.more(self.config, stanza)
        if place is None:
            first = next(state for state in self.states if state.name == stanza.name)
            self._on_event(replace(first, detail="calls wait, and there is no room for another replica"))
            return
        used = {state.replica for state in self.states if state.name == stanza.name}
        index = next(number for number in itertools.count() if number not in used)
        state = ReplicaState(
            stanza.name,
            stanza.kind,
            stanza.app,
            f"{stanza.name}-{index}",
            index,
            place.url,
            node=place.node,
            listed=False,
            held=stanza.name in self._trainers,
        )
        process = self._process(stanza, state, place, "failures", at_new_address=True)  # the run continues without it
        self._watched.append(process)
        task = asyncio.create_task(process.run(), name=f"the watch of {state.label}")
        self._grown[process] = (place, task)

    async def _shrink(self, process: ServiceProcess) -> None:
        """Let its calls end, then stop it. Callers that still have its address are refused, and call another."""
        assert self._engine is not None
        process.leave()
        quiet = 0
        while quiet < IDLE_POLLS and process.state.status == "ready":
            await asyncio.sleep(FOLLOW_S)
            load = await load_of([process.state.url], 0, self.run_token)
            quiet = quiet + 1 if load is not None and not load.running else 0
        place, task = self._grown[process]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await place.stop_listening()
        await process.stop(GRACE_S, self._hurry)
        process.change(status="stopped", detail="")  # also one that had failed
        del self._grown[process]
        self._watched.remove(process)
        self._changed(process.state)
        await self._engine.release(place)

    def _changed(self, state: ReplicaState) -> None:
        """Keep the addresses of its service current, in the list that later specs share, and report the change."""
        self.urls[state.name][:] = called_urls([each for each in self.states if each.name == state.name])
        self._on_event(state)

    async def failure(self) -> None:
        """Wait forever; raises ServiceFailed (or ConfigError) when a service is given up, at once if one has been."""
        for task in self._tasks:
            if task.done():
                task.result()
        finished, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()

    def hurry(self) -> None:
        """Kill services instead of waiting for them to stop."""
        self._hurry.set()

    async def _stop_all(self) -> bool:
        """Stop everything; returns whether it was cancelled meanwhile. A cancellation only speeds it up and hides no
        earlier error.
        """
        stopping, cancelled = asyncio.create_task(self._stop()), False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                if stopping.cancelled():
                    raise
                cancelled = True
                self.hurry()
        stopping.result()
        return cancelled

    async def _stop(self) -> None:
        """Stop everything within 5 s; no process is left afterwards."""
        for name in list(self._trainers):
            self._forget_trainer(name)
        watching = [*self._tasks, *self._guests, *(task for _, task in self._grown.values())]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        stopping = [
            watched.stop(GRACE_S, self._hurry) for watched in self._watched if isinstance(watched, ServiceProcess)
        ]
        await asyncio.gather(*stopping)
        if self._engine:
            await self._engine.close()
        if self._head_file:
            self._head_file.remove()
        if self._head:
            await self._head.close()

    async def _start(self) -> None:
        """Reserve every address, so that all are known, then start everything at once."""
        config = self.config
        assert self._engine is not None
        if missing := missing_models(config):
            raise ConfigError("\n".join(missing))
        places = await self._engine.places(config)
        for stanza in config.services.values():
            external = stanza.external
            self.urls[stanza.name] = stanza.external_urls if external else [each.url for each in places[stanza.name]]
        self._head = Head(self)
        self._head_file = HeadFile.claim(config.root, self._running_head())
        for stanza in config.services.values():
            self._watched += self._external(stanza) if stanza.external else self._processes(stanza, places[stanza.name])
        self._head.start()
        self._tasks.append(asyncio.create_task(self._engine.watch()))
        for watched in self._watched:
            run = watched.run() if isinstance(watched, ServiceProcess) else watched.watch()
            self._tasks.append(asyncio.create_task(run))
        for stanza in config.services.values():
            if isinstance(stanza.replicas, ReplicaRange) and not stanza.external:
                self._tasks.append(asyncio.create_task(self._scale(stanza, stanza.replicas)))

    def _running_head(self) -> RunningHead:
        tls = self.config.settings.tls
        ca = str(tls.ca) if tls and tls.ca else None
        return RunningHead(self.head_url, os.getpid(), self.admin_token, self.run_token, ca)

    def _external(self, stanza: Stanza) -> list[PolledReplica]:
        token = self.config.others.get(stanza.name, self.run_token)
        states = [self._state(stanza, index) for index in range(len(stanza.external_urls))]
        return [PolledReplica(state, self._changed, token) for state in states]

    def _processes(self, stanza: Stanza, places: Sequence[ProcessHost]) -> list[ServiceProcess]:
        spares: Spares = "nothing" if self._strict or stanza.kind != "gym_server" else "refusals"
        return [
            self._process(
                stanza, self._state(stanza, index, place.node), place, "failures" if stanza.optional else spares
            )
            for index, place in enumerate(places)
        ]

    def _process(
        self, stanza: Stanza, state: ReplicaState, place: ProcessHost, spares: Spares, *, at_new_address: bool = False
    ) -> ServiceProcess:
        assert self._head_file is not None
        settings = self.config.settings
        timeout = self._ready_timeout_s(stanza.kind)
        redact = Redactor([*secrets_of(self.config), self.admin_token, self.run_token or ""])
        tokens = (self.admin_token, self.run_token)
        spec = service_spec(self.config, stanza, self.urls, self.head_url, state.replica, *tokens)
        spec["at_new_address"] = at_new_address
        limits = RestartLimits(timeout, settings.max_restarts)
        log = self._head_file.logs / f"{state.label}.log"
        venv = venv_of(self.config, stanza)
        return ServiceProcess(
            state, self._changed, place, spec, log, limits, redact, venv, spares, self._report_lost_dependency
        )

    def _report_lost_dependency(self, lost: ReplicaState) -> None:
        """Report that the services whose options name this one are not ready, if none of its replicas is left."""
        if any(state.status != "failed" for state in self.states if state.name == lost.name):
            return
        for watched in self._watched:
            stanza = self.config.services[watched.state.name]
            if not stanza.external and lost.name in stanza.options.values():
                watched.block(given_up(lost.name, lost.detail))

    def _state(self, stanza: Stanza, index: int, node: str = "") -> ReplicaState:
        urls = self.urls[stanza.name]
        several = len(urls) > 1 or isinstance(stanza.replicas, ReplicaRange)
        label = f"{stanza.name}-{index}" if several else stanza.name
        return ReplicaState(stanza.name, stanza.kind, stanza.app, label, index, urls[index], stanza.external, node=node)

    async def _all_ready(self) -> None:
        """Wait until every service of ours was ready once, or given up. External ones are only displayed."""
        failure = asyncio.create_task(self.failure())
        try:
            for watched in self._watched:
                if isinstance(watched, ServiceProcess):
                    ready = asyncio.create_task(watched.ready.wait())
                    await asyncio.wait([ready, failure], return_when=asyncio.FIRST_COMPLETED)
                    ready.cancel()
                    if failure.done():
                        failure.result()
        finally:
            failure.cancel()
        self._check_gyms()

    def _check_gyms(self) -> None:
        """Raise the first refusal if no gym server is left."""
        refused = [
            each.given_up
            for each in self._watched
            if isinstance(each, ServiceProcess) and each.given_up and not self.config.services[each.state.name].optional
        ]
        if refused and not any(state.kind == "gym_server" and state.status != "failed" for state in self.states):
            raise refused[0]


def service_spec(
    config: Config,
    stanza: Stanza,
    urls: Mapping[str, list[str]],
    head_url: str | None = None,
    replica: int = 0,
    admin_token: str | None = None,
    run_token: str | None = None,
) -> dict[str, Any]:
    """The parameters of a service's process as JSON: the fields of `ngym.services.base.runner.ServiceSpec`."""
    if stanza.app is None:
        raise ConfigError(f"{stanza.where}: {stanza.name!r} has no app, only a url: it is an external service")
    return {
        "name": stanza.name,
        "kind": stanza.kind,
        "app_file": str(app_file(stanza.app, config.root, stanza.where)),
        "options": stanza.options,
        "where": stanza.where,
        "key_where": stanza.key_where,
        "urls": dict(urls),
        "kinds": config.left_out | {name: each.kind for name, each in config.services.items()},
        "head_url": head_url,
        "root": str(config.root),
        "replica": replica,
        "admin_token": admin_token if stanza.kind == "model" else None,  # authorizes only the weight push
        "run_token": run_token,
        "others": config.others,
        "tls": config.settings.tls.model_dump(mode="json") if config.settings.tls else None,
        "tracing": config.tracing,
        "logs": config.settings.logs,
    }


def run_token(config: Config) -> str | None:
    """The token that every caller of this run must send; None: no token. UsageError for an unusable NGYM_TOKEN.

    A run is locked if something listens where other machines can reach it, if its config says so, or if the environment
    has a token.
    """
    settings, token = config.settings, token_from(RUN_TOKEN)
    exposed = not all(map(is_loopback, (settings.host, settings.head.host)))
    return token or (new_token() if exposed or settings.require_token else None)
