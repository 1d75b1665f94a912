"""The services for live rollouts: started here, or those of a running `ng_run`; used from a separate thread.

The trainer computes for seconds without a pause. The event loop that watches and restarts services runs in another
thread; `Services.call` runs a coroutine there and waits for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import orjson
import yaml

from ngym.client import CONNECT_TIMEOUT_S
from ngym.collect.collection_session import discover
from ngym.config.service_config import VLLM, Config, Stanza, load_config, tracing_of
from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError, UsageError
from ngym.net.auth import ADMIN_TOKEN, RUN_TOKEN, token_from
from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.runtime.event_loop import never_fails, run_unless_failed
from ngym.supervise.head_file import RunningHead, find_running
from ngym.supervise.placement import MEMORY_SHARE, LocalPlacer, Machine, gpu_slices, this_machine, with_own_gpus
from ngym.supervise.service import ReplicaState
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.zygote_client import ZygoteClient
from ngym.telemetry import tracing

from ..recipe.algorithms import PolicyGradientOptions
from ..recipe.recipe import Recipe

Result = TypeVar("Result")
NEW_POLICY_WITHIN_S = 600
RENEW_S = 1.0
OWNER = "ng_train"
TRANSFORMERS = "models/transformers"
SLEEP_MODE = "engine.enable_sleep_mode=true"
COLOCATED_SHARE = 0.4  # of a GPU's memory
TRANSFER = "engine.weight_transfer_config.backend="
VLLM_EXPERTS, TRANSFORMERS_EXPERTS = "engine.enable_return_routed_experts=true", "routed_experts=true"
HEAD = "NGYM_HEAD"  # the head of services that another process has started for this rank


@dataclass(frozen=True)
class ReadyServices:
    """Services that are ready.

    token: authorizes weight pushes to the model servers. failure: waits forever; raises when a service is given up.
    """

    peers: Peers
    token: str
    failure: Callable[[], Coroutine[Any, Any, None]]


class Services:
    """`with Services(connect) as services`: starts them in the background; `ready` waits until they are ready.

    Args:
        connect: an async context manager of the services: `started(...)` or `running(...)`.
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[ReadyServices]]) -> None:
        self._connect = connect
        self._thread = ThreadPoolExecutor(1, "services")
        self._running: Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._settled = threading.Event()
        self._ready: ReadyServices | None = None

    def __enter__(self) -> Self:
        try:
            self._running = self._thread.submit(lambda: event_loop.run(self._run_services()))
            self._running.add_done_callback(self._release_waiters)
        except BaseException:  # such as a signal
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the services, including those that are not ready yet."""
        self._started.wait()
        if self._task is not None and not self._task.done():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        self._thread.shutdown()

    def _release_waiters(self, _: object) -> None:
        """Let waiting threads continue, also if the event loop could not be created."""
        self._started.set()
        self._settled.set()

    @property
    def ready(self) -> ReadyServices:
        """Block until every service is ready. Raises NgymError: a service cannot be started or found."""
        self._settled.wait()
        assert self._running is not None
        if self._ready is None:
            self._running.result()
        assert self._ready is not None
        return self._ready

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the services' event loop and return its result.

        Raises:
            NgymError: a service was given up in the meantime.
        """
        ready = self.ready
        assert self._task is not None
        future = asyncio.run_coroutine_threadsafe(run_unless_failed(ready.failure(), work), self._task.get_loop())
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def addresses(self, name: str) -> list[str]:
        """The current addresses of a service's replicas, which the head knows."""
        self.call(self.ready.peers.follow_now())
        return self.ready.peers.urls[name]

    async def _run_services(self) -> None:
        self._task = asyncio.current_task()
        self._started.set()
        try:
            async with self._connect() as ready:
                self._ready = ready
                self._settled.set()
                await asyncio.Event().wait()  # until __exit__ cancels
        finally:
            self._settled.set()


class HeadMembership:
    """The replicas of the policy that wait for weights, as the head knows them. While the trainer renews its claim, the
    head gives no calls to replicas that have not been proved.

    Args:
        policy: its service's name.
        say: for replicas that have joined, or cannot.
    """

    def __init__(self, services: Services, policy: str, say: Callable[[str], None]) -> None:
        self._services = services
        self._policy = policy
        self._path = f"/servers/{quote(policy, safe='')}/weights"
        self._say = say
        self._version: int | None = None
        self._waiting: list[str] = []
        self._failed_urls: set[str] = set()  # without success, for this version
        self._reported: set[str] = set()

    def waiting(self, has_trained: bool = False) -> list[str]:
        """The ready replicas that have not been tried with this version. has_trained: it is about to change."""
        return [url for url in self._waiting if has_trained or url not in self._failed_urls]

    def record_proof(
        self, version: int, urls: Sequence[str], joined: Sequence[str], problems: Mapping[str, str]
    ) -> None:
        """Tell the head that these replicas serve this version. joined: some of them are new. problems: the reasons of
        those that do not serve it; they wait for the next version.
        """
        if version != self._version:
            self._failed_urls.clear()
        self._version = version
        self._failed_urls |= set(problems)
        admitted_urls = [url for url in joined if url not in problems]
        self._services.call(self._renew([*urls, *admitted_urls]))
        lines = [f"{self._policy} {url} joined with version {version}" for url in admitted_urls]
        for line in (*lines, *(f"{self._policy} {url} gets no calls: {why}" for url, why in problems.items())):
            if line not in self._reported:
                self._reported.add(line)
                self._say(line)

    async def watch(self, notice: Callable[[], None]) -> None:
        """Renew the claim until cancelled; call `notice` while replicas wait."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self._version is not None:
                await self._renew([])
                if self.waiting():
                    notice()

    async def _renew(self, urls: Sequence[str]) -> None:
        """Renew the membership. If a head does not answer, the next renewal tries again."""
        ready = self._services.ready
        opener = {"authorization": f"Bearer {ready.token}"}
        body = orjson.dumps({"version": self._version, "urls": urls})
        with suppress(OSError, ValueError, KeyError):
            reply = await ready.peers.send(
                "PUT", f"{ready.peers.head_url}{self._path}", body, opener, CONNECT_TIMEOUT_S
            )
            self._waiting = orjson.loads(reply.body)["waiting"]


def serving_options(recipe: Recipe) -> list[str]:
    """The options of the policy's stanza that this run needs: the served model, and how it receives new weights.

    Raises:
        UsageError: the recipe has no policy.
    """
    if recipe.model.path is None:
        raise UsageError("live rollouts need an existing policy; set model.path")
    path, transport = recipe.served_base or Path(recipe.model.path), recipe.live.transport if recipe.live else "http"
    options = [f"model={recipe.served_base or recipe.model.path}"]
    if path.is_absolute() and not path.exists():  # a new policy or a dequantized one, written while its server starts
        options.append(f"model_within_s={NEW_POLICY_WITHIN_S}")
    if recipe.live is not None and recipe.live.colocated:
        options.append(SLEEP_MODE)
    if transport == "lora" and recipe.model.lora is not None:
        options.append(f"lora_rank={recipe.model.lora.rank}")
    if transport in ("nccl", "ipc"):
        options.append(f"{TRANSFER}{transport}")
    if isinstance(recipe.algorithm, PolicyGradientOptions) and recipe.algorithm.routing_replay:
        options += [VLLM_EXPERTS, TRANSFORMERS_EXPERTS]
    return options


def config_for(file: Path, policy: str, app: str | None, options: Sequence[str]) -> Config:
    """The config with these options of the policy. app: replaces the policy's stanza, whose own options are dropped.

    Raises:
        ConfigError: there is no such model.
    """
    named = load_config([file]).stanza(policy)
    if named.kind != "model":
        raise ConfigError(f"{named.where}: rollouts.policy names {policy!r}, which is a {named.kind}, not a model")
    served_by = app or named.app or ""
    if not served_by.endswith(VLLM):  # the others need no option to sleep or to receive
        of_vllm = (SLEEP_MODE, TRANSFER, VLLM_EXPERTS)
        options = [option for option in options if not option.startswith(of_vllm)]
    if not served_by.endswith(TRANSFORMERS):
        options = [option for option in options if option != TRANSFORMERS_EXPERTS]
    if app is None:
        return _enable_bundling(load_config([file], [f"{policy}.{option}" for option in options]), policy)
    config = load_config([file])
    settings: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        *parents, leaf = key.split(".")
        place = settings
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = yaml.safe_load(value)
    stanza = Stanza(name=policy, kind="model", app=app, options=settings, where="rollouts.policy_app")
    return _enable_bundling(config.model_copy(update={"services": {**config.services, policy: stanza}}), policy)


def _enable_bundling(config: Config, policy: str) -> Config:
    """The config with tokens in bundles where vLLM runs on a CPU, unless the stanza decides."""
    stanza = config.stanza(policy)
    if stanza.app != VLLM or "bundle_tokens" in stanza.options:
        return config
    return config.with_changes(policy, options={**stanza.options, "bundle_tokens": "auto"})


def place_beside_trainer(
    config: Config, policy: str, ranks: int, say: Callable[[str], None], machine: Machine | None = None
) -> Config:
    """The config for a trainer on this machine: each process of models/vllm gets GPUs that no rank uses, if there are
    enough. A policy that shares one with a rank gets a part of its memory, unless its stanza decides.

    Args:
        ranks: on this machine; they use its first GPUs.
        say: called with what was chosen.
    """
    if not any((stanza.app or "").endswith(VLLM) for stanza in config.services.values()):
        return config
    machine = machine or this_machine()
    trainer_gpus, stanza = machine.gpus[:ranks], config.stanza(policy)
    separate = with_own_gpus(config, ranks, machine)
    policy_gpus = _gpus_of(separate, policy, machine)
    if separate.stanza(policy) != stanza:
        names = ", ".join(gpu for gpu in machine.gpus if gpu in policy_gpus)
        say(f"{policy!r} gets GPU {names}, the trainer {', '.join(trainer_gpus)}")
        return separate
    engine = stanza.options.get("engine") or {}
    if not (stanza.app or "").endswith(VLLM) or not isinstance(engine, Mapping):
        return separate
    if engine.get("enable_sleep_mode") or MEMORY_SHARE in engine or not set(trainer_gpus) & policy_gpus:
        return separate
    # Replicas without GPUs of their own use the same ones.
    has_own = stanza.resources is not None and stanza.resources.gpus is not None
    share = COLOCATED_SHARE if has_own else round(COLOCATED_SHARE / stanza.first_replicas, 3)
    say(f"{policy!r} and the trainer share a GPU: vLLM takes {share} of its memory for each replica (docs/gpus.md)")
    shared = separate.with_changes(policy, options={**stanza.options, "engine": {**engine, MEMORY_SHARE: share}})
    return with_own_gpus(shared, ranks, machine)  # without the policy, the GPUs may suffice for the others


def _gpus_of(config: Config, service: str, machine: Machine) -> set[str]:
    """The GPUs that a service's processes see. Raises ConfigError: the machine has too few."""
    resources = config.stanza(service).resources
    if resources is None or resources.gpus is None:
        return set(machine.gpus)
    slices = gpu_slices(config, machine)
    return {gpu for (name, _), gpus in slices.items() if name == service for gpu in gpus}


@asynccontextmanager
async def start_services(
    file: Path,
    agents: Sequence[str],
    policy: str,
    options: Sequence[str],
    say: Callable[[str], None],
    app: str | None = None,
    ranks: int = 1,
) -> AsyncIterator[ReadyServices]:
    """The services of a config that these agents need, started here; `app` and `options` are the policy's. They stop
    with the block. ranks: of the trainer on this machine.
    """
    launcher = ZygoteClient.start()
    try:
        config = config_for_agents(config_for(file, policy, app, options), agents, policy)
        tracing.begin(config.tracing, OWNER)
        config = place_beside_trainer(config, policy, ranks, say)
        say(f"starting {', '.join(config.services)}")
        async with Supervisor(config, _failures(say), engine=LocalPlacer(launcher, ranks=ranks)) as stack:
            say(f"services ready after {stack.ready_after_s:.0f} s")
            peers = Peers(stack.urls, stack.head_url, stack.run_token, owner=OWNER, others=config.others)
            try:
                yield ReadyServices(peers, stack.admin_token, stack.failure)
            finally:
                await peers.close()
    finally:
        launcher.close()


@asynccontextmanager
async def running(folder: Path, agents: Sequence[str], policy: str) -> AsyncIterator[ReadyServices]:
    """The services of the `ng_run` that runs in this folder, or of the head that the environment names."""
    run = of_environment() or find_running(folder)
    if run is None:
        raise UsageError(
            f"no services run in {folder}: start them with ng_run in another terminal, or let this command start them "
            "with rollouts.services=global_config.yaml"
        )
    discovered = await discover(run.url, run.run_token)
    for name, names in (*((agent, discovered.agents) for agent in agents), (policy, discovered.urls)):
        if name not in names:
            raise UsageError(f"{run.url} knows no {name!r}{did_you_mean(name, names)}")
    tracing.begin(tracing_of(discovered.stanzas), OWNER)
    peers = Peers(discovered.urls, discovered.head_url, run.run_token, owner=OWNER, others=discovered.others)
    try:
        yield ReadyServices(peers, run.admin_token, never_fails)
    finally:
        await peers.close()


def of_environment() -> RunningHead | None:
    """The run of NGYM_HEAD, with the tokens of the environment."""
    if HEAD not in os.environ:
        return None
    return RunningHead(os.environ[HEAD], os.getpid(), token_from(ADMIN_TOKEN) or "", token_from(RUN_TOKEN))


def config_for_agents(config: Config, agents: Sequence[str], policy: str) -> Config:
    """The config with only the services that these agents need, directly or through other services."""
    for agent in agents:
        stanza = config.stanza(agent)
        if stanza.kind != "agent":
            raise ConfigError(f"{stanza.where}: {agent!r} is a {stanza.kind}, not an agent")
        if policy not in config.only([agent]).services:
            raise ConfigError(
                f"{stanza.where}: {agent!r} does not lead to the model {policy!r}; set rollouts.policy to the one "
                "that it uses"
            )
    return config.only(agents)


def _failures(say: Callable[[str], None]) -> Callable[[ReplicaState], None]:
    """Report only services that died."""

    def on_event(state: ReplicaState) -> None:
        if state.status in ("restarting", "failed"):
            say(f"{state.label}: {state.status} {state.detail}".rstrip())

    return on_event
