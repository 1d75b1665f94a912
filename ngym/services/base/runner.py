"""One service process: serves an application on bound sockets until it is stopped, and counts stalls of its event loop.

The event loop sets a mark every 50 ms; a watchdog thread checks the mark and records where the loop is if it is late.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Literal, NamedTuple, Self

from prometheus_client import CollectorRegistry, Counter

from ngym.errors import ConfigError, NgymError, UsageError
from ngym.extras import missing_extra
from ngym.net.auth import LocalOnlyMiddleware, OriginCheck, TokenAuth, TokenAuthMiddleware, hosts_of
from ngym.net.connection_limits import Server, server_config
from ngym.net.tls import trust_in_all_clients
from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.schema import Kind
from ngym.services.base.app import load
from ngym.services.base.joining import Joining, announced
from ngym.services.base.options import ServiceContext, ServiceOptions, parse_options
from ngym.telemetry import tracing
from ngym.telemetry.log_format import Form, Redactor, configure_logging, say, secrets_in

log = logging.getLogger("ngym.services")
SAMPLE_INTERVAL_S = 0.05
STALL_S = 0.1
MIN_CPU_SHARE = 0.1  # of a stall; a process that computed less was stopped by the machine, or waited in a blocking call
IDLE_FRAMES = (("runners.py", "run"), ("selectors.py", "select"))  # innermost frames of a loop that runs no callback
LOG_INTERVAL_S = 1.0  # seconds between log lines: an overloaded machine has many stalls; the rest are only counted
FRAMES = 12
EXIT_CONFIG = 78  # EX_CONFIG: the config or the file is wrong; restarting would not help
EXIT_REFUSED = 69  # EX_UNAVAILABLE: the options are right, but a package, server or data set that it needs is missing
BACKLOG = 4096
GRACE_S = 3.0
ACCEPTS_PER_TURN = 16  # new connections per turn of the loop: libuv accepts one per listening descriptor and turn


class Stall(NamedTuple):
    """A stall of the loop, and its place in the code ("" if it ended before that was read, or the loop was idle).

    Args:
        cpu_s: CPU seconds of the loop's thread.
        process_s: CPU seconds of the whole process: another thread may have held the interpreter.
        queued_s: seconds in which the thread could run and got no CPU.
    """

    seconds: float
    cpu_s: float
    where: str
    process_s: float = 0.0
    queued_s: float = 0.0

    @property
    def is_of_machine(self) -> bool:
        """Whether the machine was overloaded or suspended. Otherwise code computed, or called something that blocks."""
        if max(self.cpu_s, self.process_s) > MIN_CPU_SHARE * self.seconds:
            return False
        return not self.where or self.queued_s > self.seconds / 2


class _Clocks(NamedTuple):
    now: float
    cpu: float
    process: float
    queued: float


class Watchdog:
    """`with Watchdog(registry):` watches the running loop.

    A stall that the machine caused is counted; any other one is also logged, with the stack of the loop's thread.

    Attributes:
        longest: the stall with the most CPU time.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.longest = Stall(0.0, 0.0, "")
        self._count = Counter("ngym_loop_stalls", "Stalls of the event loop of 0.1 s or more", registry=registry)
        self._total = Counter("ngym_loop_stalled_seconds", "Seconds that the event loop was stalled", registry=registry)
        self._of_machine = Counter(
            "ngym_machine_stalls", "Those in which the process got no CPU: the machine is overloaded", registry=registry
        )
        self._over = threading.Event()
        self._where = ""
        self._logged_at = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._statistics = _open(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._mark = self._read()
        self._timer = self._loop.call_later(SAMPLE_INTERVAL_S, self._set_mark)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._over.set()
        self._thread.join()
        if self._statistics is not None:
            os.close(self._statistics)

    def _read(self) -> _Clocks:
        """The clocks of the loop's thread. queued: 0 where Linux keeps no such statistics."""
        queued_ns = 0 if self._statistics is None else int(os.pread(self._statistics, 100, 0).split()[1])
        return _Clocks(time.monotonic(), time.thread_time(), time.process_time(), queued_ns / 1e9)

    def _set_mark(self) -> None:
        clocks, mark = self._read(), self._mark
        late_s = clocks.now - mark.now - SAMPLE_INTERVAL_S
        if late_s > STALL_S:
            cpu_s, process_s, queued_s = (
                clocks.cpu - mark.cpu,
                clocks.process - mark.process,
                clocks.queued - mark.queued,
            )
            self._report(Stall(late_s, cpu_s, self._where, process_s, queued_s), clocks.now)
        self._where = ""
        self._mark = clocks
        self._timer = self._loop.call_later(SAMPLE_INTERVAL_S, self._set_mark)

    def _report(self, stall: Stall, now: float) -> None:
        self._count.inc()
        self._total.inc(stall.seconds)
        self.longest = max(self.longest, stall, key=lambda one: one.cpu_s)
        if stall.is_of_machine:
            self._of_machine.inc()
        elif now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            message = "the event loop was blocked for %.2f s (%.2f s of CPU time) in:\n%s"
            log.warning(
                message, stall.seconds, stall.cpu_s, stall.where or "unknown: it ended before it could be located"
            )

    def _watch(self) -> None:
        due_s = SAMPLE_INTERVAL_S
        while not self._over.wait(due_s):
            stalled_s = time.monotonic() - self._mark.now - SAMPLE_INTERVAL_S
            due_s = max(STALL_S - stalled_s, SAMPLE_INTERVAL_S)  # a stall is not yet one before
            if not self._where and stalled_s > STALL_S:
                frame = sys._current_frames().get(self._watched)
                if frame is not None and not self._is_idle(frame):
                    self._where = "".join(traceback.format_stack(frame, limit=None)[-FRAMES:]).rstrip()

    def _is_idle(self, frame: FrameType) -> bool:
        """Whether the loop, which is there, runs no callback, or that of this watchdog: the stall has just ended."""
        if (Path(frame.f_code.co_filename).name, frame.f_code.co_name) in IDLE_FRAMES:
            return True
        return any(outer.f_code is Watchdog._set_mark.__code__ for outer, _ in traceback.walk_stack(frame))


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


@dataclass(frozen=True)
class ServiceSpec:
    """All parameters of a service process. Plain data: it crosses a process boundary."""

    name: str
    kind: Kind
    app_file: str
    options: dict[str, Any]
    where: str
    key_where: dict[str, str]
    urls: dict[str, list[str]] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    head_url: str | None = None
    root: str = "."
    replica: int = 0
    admin_token: str | None = field(default=None, repr=False)
    run_token: str | None = field(default=None, repr=False)
    others: dict[str, str | None] = field(default_factory=dict, repr=False)
    joining: tuple[Any, ...] | None = field(default=None, repr=False)  # of ngym.services.base.joining.Joining
    tls: dict[str, str] | None = None
    tracing: tuple[str, float, bool] | None = None  # of ngym.telemetry.tracing.Destination
    logs: Form = "text"
    at_new_address: bool = False


def run(spec: ServiceSpec, sockets: Sequence[socket.socket]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0; or, after one line on stderr, EXIT_CONFIG, EXIT_REFUSED
    or 1.
    """
    configure_logging(spec.name, spec.logs)
    try:
        if spec.tls and spec.tls.get("ca"):
            trust_in_all_clients(Path(spec.tls["ca"]))  # before the service's file creates clients
        module = load(Path(spec.app_file))
        options = check(spec, module)
    except UsageError as error:
        say(str(error), spec.name, spec.logs)
        return EXIT_REFUSED if isinstance(error.__cause__, ModuleNotFoundError) else EXIT_CONFIG
    tracing.begin(tracing.Destination(*spec.tracing) if spec.tracing else None, spec.name, spec.replica)
    try:
        event_loop.run(_serve(spec, module, options, list(sockets)))
    except NgymError as error:
        say(str(error), spec.name, spec.logs)
        return EXIT_REFUSED if isinstance(error, UsageError) else 1
    except ModuleNotFoundError as error:
        message = missing_extra(error, f"service {spec.name!r}")
        if message is None:
            raise
        say(f"{spec.where}: {message}", spec.name, spec.logs)
        return EXIT_REFUSED
    finally:
        tracing.end()
    return 0


def check(spec: ServiceSpec, module: ModuleType) -> ServiceOptions:
    """The spec's options as the service's own record. Raises ConfigError with the line."""
    model = module.Options if hasattr(module, "serve") else module.app.state.options_model
    options: ServiceOptions = parse_options(
        model, spec.options, spec.key_where, spec.where, spec.urls, Path(spec.root), spec.kinds
    )
    kind = "model" if hasattr(module, "serve") else module.app.state.kind
    if kind != spec.kind:
        raise ConfigError(f"{spec.where}: service {spec.name!r} is of kind {spec.kind}, but its app is of kind {kind}")
    return options


async def _serve(spec: ServiceSpec, module: ModuleType, options: ServiceOptions, sockets: list[socket.socket]) -> None:
    peers = Peers(spec.urls, spec.head_url, spec.run_token, owner=spec.name, others=spec.others)
    tokens = (spec.admin_token, spec.run_token)
    known = (*secrets_in(spec.options), *(value or "" for value in (*tokens, *spec.others.values())))
    redact, root = Redactor(known), Path(spec.root)
    context = ServiceContext(
        spec.name, spec.kind, options, peers, sockets, root, *tokens, spec.tls, redact, spec.at_new_address
    )
    async with announced(Joining(*spec.joining) if spec.joining else None):
        if hasattr(module, "serve"):
            await module.serve(context)
            return
        app = module.app
        app.state.context = context
        # Started here, an application raises a ngym error; within uvicorn it would be a traceback.
        async with app.router.lifespan_context(app):
            await serve_app(app, context, lifespan="off")


class _Server(Server):
    def stop(self) -> None:
        self.should_exit = True


async def serve_app(
    app: Any, context: ServiceContext, lifespan: Literal["on", "off"] = "on", keys: Sequence[str] = ()
) -> None:
    """Serve an ASGI application on the context's sockets until SIGTERM or SIGINT; requests in flight are finished
    first.

    keys: further API keys that open it, if the run is locked.
    """
    sockets, title, registry = context.sockets, app.title, app.state.registry
    if context.run_token:
        app = TokenAuthMiddleware(
            app, TokenAuth([context.run_token, *filter(None, [context.admin_token]), *keys]), context.name
        )
    else:
        urls = chain([context.peers.head_url or ""], *context.peers.urls.values())
        app = LocalOnlyMiddleware(app, OriginCheck(hosts_of(urls)), context.name)
    config = server_config(
        app,
        lifespan=lifespan,
        log_config=None,
        timeout_graceful_shutdown=int(GRACE_S),
        backlog=BACKLOG,
        ssl_certfile=context.tls["certificate"] if context.tls else None,
        ssl_keyfile=context.tls["key"] if context.tls else None,
        proxy_headers=False,  # there is no proxy between our services
        date_header=False,
    )
    server = _Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    with Watchdog(registry):
        await server.serve(sockets=[*sockets, *(one.dup() for one in sockets for _ in range(ACCEPTS_PER_TURN - 1))])
    if not server.started:
        raise ConfigError(f"{title} could not start; its log says why")


def spec_from(mapping: Mapping[str, Any]) -> ServiceSpec:
    """A spec that crossed a process boundary as JSON."""
    return ServiceSpec(**mapping)
