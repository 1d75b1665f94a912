"""`ngym.run`: starts the services of a config; and the choice of services for other calls."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import uvloop

from ngym.collect.collection_session import ConnectedServices, DiscoveredServices, discover
from ngym.config.service_config import Config, load_config, redacted_config
from ngym.errors import NgymError, UsageError
from ngym.net.auth import wrong_url
from ngym.notebook.arguments import as_arguments
from ngym.notebook.frames import table
from ngym.notebook.progress import CallDisplay
from ngym.peers import Peers
from ngym.supervise.head_file import head_of, token_of
from ngym.supervise.service import ReplicaState
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.zygote_client import ZygoteClient

Result = TypeVar("Result")
Files = str | Path | Sequence[str | Path]
DEFAULT_CONFIG = "global_config.yaml"
OWNER = "ngym"
COLUMNS = ("name", "kind", "status", "url", "restarts")


class RunningServices:
    """The result of `ngym.run`. Services stop at the end of a `with` block, by `stop`, and with the last reference."""

    def __init__(self, life: _ServicesLifetime) -> None:
        self._life = life
        self._finalizer = weakref.finalize(self, life.background.end)

    @property
    def head_url(self) -> str:
        """The URL of the head: `/servers`, `/config`, and a status page for a browser."""
        return self._life.supervisor.head_url

    @property
    def urls(self) -> dict[str, list[str]]:
        """Service name -> the URLs of its replicas."""
        return dict(self._life.supervisor.urls)

    @property
    def states(self) -> list[ReplicaState]:
        """The state of every process of every service."""
        return list(self._life.supervisor.states)

    def stop(self) -> None:
        """Stop every service; returns when all have ended, in less than 5 s."""
        self._life.background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def __repr__(self) -> str:
        ready = sum(state.status == "ready" for state in self.states)
        return f"<{ready} of {len(self.states)} services ready; {self.head_url}>"

    def _repr_html_(self) -> str:
        rows = [[state.label, state.kind, state.status, state.url, state.restarts] for state in self.states]
        return table(COLUMNS, rows, repr(self)[1:-1])


class _ServicesLifetime:
    """The lifetime of services on a background loop."""

    def __init__(self, config: Config, launcher: ZygoteClient, display: CallDisplay) -> None:
        self.config = config
        self.background = Background("ngym services")
        self.supervisor = Supervisor(config, display.on_state, launcher)
        self._started = asyncio.Event()

    async def ready(self) -> None:
        """Start the services; they stop when the loop ends."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `failure` raises it
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait([self._task, started], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        finally:
            started.cancel()
        if self._task.done():
            self._task.result()

    async def failure(self) -> None:
        """Wait forever; raises the error that ends the services."""
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        async with self.supervisor:
            self._started.set()
            await self.supervisor.failure()


class ServiceTarget:
    """The services of a call: those of `ngym.run`, those of a head, or those of a config, started for the call."""

    def __init__(self, config: Files | None, overrides: Sequence[str], head: str | RunningServices | None) -> None:
        if config is not None and head is not None:
            raise UsageError("config starts services for this call and head uses running ones; give one of the two")
        if overrides and config is None:
            raise UsageError(f"{overrides[0]!r}: overrides need a config; name it with config=")
        self._life = head._life if isinstance(head, RunningServices) else None
        self._url = head.rstrip("/") if isinstance(head, str) else None
        if self._url is not None and (problem := wrong_url(self._url)):
            raise UsageError(f"head: {problem}")
        # Early, because its imports take longer than the checks below.
        self._launcher = ZygoteClient.start() if config is not None else None
        try:
            files = [config] if isinstance(config, str | Path) else config
            self.config = load_config([Path(file) for file in files], overrides) if files is not None else None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()

    def run(self, work: Coroutine[Any, Any, Result], display: CallDisplay, progress: bool) -> Result:
        """Run a coroutine on the loop of the services, and show its progress meanwhile.

        Raises:
            UsageError: the services were stopped.
        """
        task, end = self._begin(work)
        try:
            with display.open(progress) as tick:
                return task.result(tick, lambda: display.hurry())
        finally:
            end()

    async def run_async(self, work: Coroutine[Any, Any, Result], display: CallDisplay, progress: bool) -> Result:
        """As `run`, without blocking the caller's loop."""
        task, end = self._begin(work)
        try:
            with display.open(progress) as tick:
                return await task.result_async(tick, lambda: display.hurry())
        finally:
            await asyncio.to_thread(end)

    def _begin(self, work: Coroutine[Any, Any, Result]) -> tuple[BackgroundTask[Result], Callable[[], None]]:
        """The coroutine on the loop of the services, and a function to call at the end."""
        if self._life is not None:
            if not self._life.background.is_alive:
                work.close()
                raise UsageError("these services are stopped; start them again with ngym.run")
            return self._life.background.begin(work), self.close
        background = Background("ngym")

        def end() -> None:
            background.close()
            self.close()

        return background.begin(work), end

    async def discover(self) -> DiscoveredServices:
        """The services that exist or will be started."""
        config = self._life.config if self._life else self.config
        if config is not None:
            return DiscoveredServices.of(redacted_config(config))
        url = head_of(Path.cwd(), self._url, "or name a run with head=, or a config with config=")
        return await discover(url, token_of(url, Path.cwd()))

    @asynccontextmanager
    async def connect(
        self, known: DiscoveredServices, needed: Config | None, display: CallDisplay
    ) -> AsyncIterator[ConnectedServices]:
        """The services during the block. needed: the part of the config to start."""
        if self._life is not None:
            async with self._life.supervisor.peers(OWNER) as peers:
                yield ConnectedServices(peers, self._life.failure)
        elif needed is None:
            token = token_of(known.head_url, Path.cwd()) if known.head_url else None
            async with Peers(known.urls, known.head_url, token, owner=OWNER, others=known.others) as peers:
                yield ConnectedServices(peers)
        else:
            supervisor = Supervisor(needed, display.on_state, self._launcher)
            display.hurry = supervisor.hurry
            async with supervisor, supervisor.peers(OWNER) as peers:
                yield ConnectedServices(peers, supervisor.failure)


def run(*config: str | Path, only: str | Sequence[str] = (), progress: bool = True) -> RunningServices:
    """Start the services of a config (default: global_config.yaml); returns when all are ready.

        with ngym.run("global_config.yaml", "policy.replicas=2") as services:
            rollouts = ngym.collect_rollouts(head=services, agent="math_agent", input="data/math/validation.jsonl")

    Without `with`, they run across several cells, until `services.stop()`.

    Args:
        config: files, and `key=value` overrides; later ones win.
        only: start only this service, or these, and those that they need.

    Raises:
        ConfigError: the config is wrong. ServiceFailed: a service does not start; the message has the last lines of its
        log.
    """
    life, display = _prepare_services(config, only)
    try:
        with display.open(progress) as tick:
            life.background.begin(life.ready()).result(tick, life.supervisor.hurry)
    except BaseException:
        life.background.close()
        raise
    return RunningServices(life)


async def run_async(*config: str | Path, only: str | Sequence[str] = (), progress: bool = True) -> RunningServices:
    """`run` for a coroutine: `services = await ngym.run_async(...)`, or `async with await ngym.run_async(...) as services`."""
    life, display = _prepare_services(config, only)
    try:
        with display.open(progress) as tick:
            await life.background.begin(life.ready()).result_async(tick, life.supervisor.hurry)
    except BaseException:
        await asyncio.to_thread(life.background.close)
        raise
    return RunningServices(life)


def _prepare_services(words: Sequence[str | Path], only: str | Sequence[str]) -> tuple[_ServicesLifetime, CallDisplay]:
    for word in words:
        if not isinstance(word, str | Path):
            raise UsageError(f"run takes config files and key=value overrides, not {word!r:.60}")
    launcher = ZygoteClient.start()
    try:
        files = [Path(word) for word in words if isinstance(word, Path) or "=" not in word]
        overrides = [word for word in words if isinstance(word, str) and "=" in word]
        with as_arguments():
            config = load_config(files or [Path(DEFAULT_CONFIG)], overrides)
        display = CallDisplay()
        names = [only] if isinstance(only, str) else only
        return _ServicesLifetime(config.only(names) if names else config, launcher, display), display
    except BaseException:
        launcher.close()
        raise


TICK_S = 0.25
_RUNNING: set[asyncio.Task[Any]] = set()


def _do_nothing() -> None:
    return None


class Background:
    """An event loop in its own daemon thread, until `close`. It handles no signals."""

    def __init__(self, name: str) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def begin(self, work: Coroutine[Any, Any, Result]) -> BackgroundTask[Result]:
        """Start a coroutine on the loop."""
        return BackgroundTask(self._loop, work)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive() and not self._end.is_set()

    def end(self) -> None:
        """Stop the loop and cancel what still runs on it; returns at once."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end.set)

    def close(self) -> None:
        """End the loop, and wait until everything on it has ended."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._started.set()
        await self._end.wait()


class BackgroundTask(Generic[Result]):
    """A coroutine on a background loop, and two ways to wait for it: blocking, and awaited on another loop.

    While waiting, they call `tick` a few times a second, in the waiting thread. If the wait is interrupted (Ctrl-C, a
    kernel's interrupt, a cancelled task), the coroutine is cancelled, and the wait continues until it has ended;
    another interrupt calls `hurry`, on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> None:
        self._loop = loop
        # Held until the end. A plain lock: an interrupt at any moment can leave the locks inside Event and Future held.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._ended = False
        self._awaiting: list[Callable[[], object]] = []
        loop.call_soon_threadsafe(self._start, work)

    def result(self, tick: Callable[[], None] = _do_nothing, hurry: Callable[[], None] = _do_nothing) -> Result:
        """Block until the coroutine has ended, and return its result."""
        try:
            while not self._ended:
                self._under_way.acquire(timeout=TICK_S)
                tick()
        except BaseException:
            self._cancel()
            while not self._ended:
                try:
                    self._under_way.acquire(timeout=TICK_S)
                except KeyboardInterrupt:
                    self._loop.call_soon_threadsafe(hurry)
            raise
        return self._outcome()

    async def result_async(
        self, tick: Callable[[], None] = _do_nothing, hurry: Callable[[], None] = _do_nothing
    ) -> Result:
        """As `result`, for a coroutine: its own loop continues to run."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        self._loop.call_soon_threadsafe(self._notify, lambda: loop.call_soon_threadsafe(ended.set))
        waiting = asyncio.create_task(ended.wait())
        try:
            while not ended.is_set():
                await asyncio.wait([waiting], timeout=TICK_S)
                tick()
        except BaseException:
            self._cancel()
            while not ended.is_set():
                try:
                    await asyncio.wait([waiting])
                except asyncio.CancelledError:
                    self._loop.call_soon_threadsafe(hurry)
            raise
        return self._outcome()

    def _outcome(self) -> Result:
        if self._task.cancelled():
            raise NgymError("the call was stopped before its end, and so were the services that it used")
        return self._task.result()

    def _start(self, work: Coroutine[Any, Any, Result]) -> None:
        self._task = self._loop.create_task(work)
        _RUNNING.add(self._task)  # an event loop only has weak references to its tasks
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    def _notify(self, ended: Callable[[], object]) -> None:
        if self._ended:
            ended()
        else:
            self._awaiting.append(ended)

    def _end(self, task: asyncio.Task[Result]) -> None:
        _RUNNING.discard(task)
        self._ended = True
        self._under_way.release()
        for tell in self._awaiting:
            tell()
        if not task.cancelled():
            task.exception()  # marks the error as retrieved: there may be no waiter
