"""One session of a collection: runs the rest of the plan with its services, and completes the files however it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
import yaml

from ngym.collect.aggregate import environment_metrics
from ngym.collect.collection_files import CollectionFiles
from ngym.collect.plan import PlannedRollout
from ngym.collect.progress_display import ProgressDisplay, ProgressMeter
from ngym.collect.rollout_rows import FailedAttempt
from ngym.collect.rollout_scheduler import CollectionLimits, Gate, RolloutScheduler
from ngym.errors import UsageError
from ngym.net.addresses import has_loopback, route_to
from ngym.net.auth import RUN_TOKEN
from ngym.net.tls import CA
from ngym.option_names import option
from ngym.peers import Peers, servers_in
from ngym.runtime.event_loop import log_error, never_fails, run_unless_failed
from ngym.schema import Json

TIMEOUT_S = 5.0
FLUSH_S = 4.0
NOT_READY_S = 2.0  # how often the head is asked which services are not ready


@dataclass(frozen=True)
class DiscoveredServices:
    """urls: service name -> its replicas. agents: names of the agents. stanzas: the config by service name, if known.

    head_url: the head to ask when a service moves. others: external services, and the bearer token of each, or None.
    lost: agents whose environment or model the run could not start, and why.
    """

    urls: dict[str, list[str]]
    agents: frozenset[str]
    stanzas: Json = field(default_factory=dict)
    head_url: str | None = None
    others: dict[str, str | None] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, stanzas: Json) -> DiscoveredServices:
        """From a config whose services are not started yet, as `redacted_config` returns it."""
        return cls({}, frozenset(name for name, stanza in stanzas.items() if stanza.get("kind") == "agent"), stanzas)


async def discover(head_url: str, token: str | None = None) -> DiscoveredServices:
    """Ask a head of ngym or NeMo Gym.

    Raises:
        UsageError: nothing answers there, the answer is not that of a head, or the token is wrong.
    """
    peers = Peers({}, head_url, token, owner="ng_collect_rollouts")
    try:
        servers = await _get(peers, head_url, "/servers", servers_in)
        if servers is not None:
            _check_addresses(head_url, servers)
            return _parse_config(head_url, servers, await _get(peers, head_url, "/config"))
        text = await _get(peers, head_url, "/global_config_dict_yaml")
    finally:
        await peers.close()
    if text is None:
        raise UsageError(
            f"{head_url} answers, but is not a head; use the URL that ng_run printed, or {option('config', 'FILE')}"
        )
    return _parse_nemo_config(yaml.safe_load(text))


async def _get(peers: Peers, head_url: str, path: str, read: Callable[[bytes], Any] = orjson.loads) -> Any:
    """The parsed JSON at this path, or None for a 404."""
    url = head_url.rstrip("/") + path
    try:
        reply = await peers.send("GET", url, None, peers.authorization(None), TIMEOUT_S)
        if reply.status == 401:
            raise UsageError(f"{head_url}: the run there is locked; set the variable {RUN_TOKEN} to its token")
        return None if reply.status == 404 else read(reply.body)
    except OSError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise UsageError(f"{head_url}: {error}; set {CA} to the file of the authority that signed it") from None
        raise UsageError(
            f"nothing answers at {head_url}: start the services with ng_run in another terminal (then run this in the "
            f"same folder, or add {option('head', 'URL')}), or add {option('config', 'FILE')} to start and stop them here "
            f"({error})"
        ) from None
    except ValueError as error:
        raise UsageError(f"the answer of {url} is not that of a head ({error}); check the URL") from None


def _check_addresses(head_url: str, servers: list[Json]) -> None:
    """Refuse a run on another machine whose agents have addresses that only that machine can call."""
    for server in servers:
        url = next(filter(has_loopback, server.get("urls") or [server["url"]]), None)
        if server["kind"] == "agent" and url is not None and not route_to(head_url).is_local:
            raise UsageError(
                f"{head_url}: agent {server['name']!r} listens at {url} of that machine, which only that machine can "
                "call: set ngym.host there"
            )


def _parse_config(head_url: str, servers: list[Json], config: Json | None) -> DiscoveredServices:
    urls = {server["name"]: server.get("urls") or [server["url"]] for server in servers}
    agents = frozenset(server["name"] for server in servers if server["kind"] == "agent")
    stanzas = config or {}
    external = [server["name"] for server in servers if server.get("external") and not server.get("app")]
    others = {name: os.environ.get(stanzas.get(name, {}).get("token_env") or "") for name in external}
    failed = {server["name"] for server in servers if server.get("status") == "failed"}
    lost = {
        server["name"]: server.get("detail") or "it cannot be started"
        for server in servers
        if server["kind"] == "agent" and any(name in failed for name in _services_of(server["name"], stanzas))
    }
    return DiscoveredServices(urls, agents, stanzas, head_url.rstrip("/"), others, lost)


def _services_of(agent: str, stanzas: Json) -> list[str]:
    """The agent, and the services that its options name."""
    return [agent, *(value for value in stanzas.get(agent, {}).values() if isinstance(value, str))]


def _parse_nemo_config(config: Mapping[str, Any]) -> DiscoveredServices:
    """`instance: {type: {implementation: {host, port, ...}}}`; other keys are ignored."""
    urls: dict[str, list[str]] = {}
    agents: set[str] = set()
    for name, instance in config.items():
        for kind, implementations in instance.items() if isinstance(instance, dict) else ():
            for server in implementations.values() if isinstance(implementations, dict) else ():
                if isinstance(server, dict) and "host" in server and "port" in server:
                    urls[name] = [f"http://{server['host']}:{server['port']}"]
                    if kind == "responses_api_agents":
                        agents.add(name)
    return DiscoveredServices(urls, frozenset(agents))


@dataclass(frozen=True)
class ConnectedServices:
    """Available services. failure: waits forever; raises when a service is given up."""

    peers: Peers
    failure: Callable[[], Awaitable[None]] = never_fails


@dataclass
class CollectionSession:
    """Collects into prepared files. status: how it ended. outcomes: finished and failed attempts. seconds: of the run.

    Args:
        display: the display while rollouts run.
        say: prints a line after the display has ended.
    """

    store: CollectionFiles
    limits: CollectionLimits
    gate: Gate
    display: Callable[[ProgressMeter], AbstractAsyncContextManager[ProgressDisplay]]
    say: Callable[[str], None]
    status: str = "failed"
    outcomes: int = 0
    seconds: float = 0.0

    async def collect(self, services: AbstractAsyncContextManager[ConnectedServices]) -> None:
        """Collect what is left; raises what ended it early. A cancelled session can be resumed."""
        store = self.store
        try:
            async with services as reached:
                try:
                    await self._run(reached)
                finally:
                    await self._flush()
                for name, tally in store.aggregates.by_agent.items():
                    tally.own = await environment_metrics(store.paths.output, reached.peers[name])
            self.status = "done"
        except asyncio.CancelledError:
            self.status = "interrupted"
            raise
        finally:
            if not self.gate.reasons.get("disk"):
                store.finish(self.status)

    async def _run(self, reached: ConnectedServices) -> None:
        store = self.store
        run = store.run(reached.peers, self.limits, self.gate)
        meter = ProgressMeter(store.aggregates, store.progress, lambda: run.in_flight, self.gate.reasons)
        async with self.display(meter) as show:
            watch = asyncio.create_task(_report_not_ready(store, reached.peers, show), name="the watch of services")
            watch.add_done_callback(log_error)
            began = time.monotonic()
            try:
                plan = store.todo(self.limits.max_attempts)
                await run_unless_failed(reached.failure(), self._consume(run, plan, show))
            finally:
                self.seconds = time.monotonic() - began
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _consume(self, run: RolloutScheduler, plan: AsyncIterator[PlannedRollout], show: ProgressDisplay) -> None:
        """Consume all outcomes; shows the first failure of each class at once."""
        reported: set[str] = set()
        async with aclosing(run.outcomes(plan)) as outcomes:
            async for outcome in outcomes:
                self.outcomes += 1
                if isinstance(outcome, FailedAttempt) and outcome.failure["class"] not in reported:
                    failure = outcome.failure
                    reported.add(failure["class"])
                    message = " ".join(failure["message"].split())
                    show.say(
                        f"first {failure['class']} (task {outcome.key.task_index}, {failure['service']}): {message}"
                    )

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.store.flush()
        except TimeoutError:
            lost = "a resumed run repeats the rollouts that are not on the disk"
            self.say(f"no row was written for {FLUSH_S:.0f} s; {lost}")


async def _report_not_ready(store: CollectionFiles, peers: Peers, show: ProgressDisplay) -> None:
    """Show the services that are not ready until the first rollout ends: a model may load for minutes."""
    reported = ""
    while not (store.aggregates.done or store.aggregates.given_up):
        waiting = [server for server in await peers.servers() if server.get("status", "ready") != "ready"]
        names = ", ".join(f"{server['name']} ({server.get('detail') or server['status']})" for server in waiting)
        if names and names != reported:
            show.say(f"not ready yet: {names}")
        reported = names
        await asyncio.sleep(NOT_READY_S)
