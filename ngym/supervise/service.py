"""One service process: started on bound sockets, watched, restarted when it exits."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from ngym.errors import ConfigError, NgymError, UsageError
from ngym.net.keepalive import enable_keepalive
from ngym.runtime.live_region import sanitize
from ngym.schema import Kind
from ngym.supervise.head_file import health
from ngym.supervise.service_log import KEPT_LINES, SHOWN_LINES, ServiceLog
from ngym.supervise.venvs import Venv, find_uv, make
from ngym.telemetry.log_format import Redactor

logger = logging.getLogger("ngym.supervise")

BACKLOG = 4096
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
Status = Literal["starting", "ready", "not ready", "restarting", "failed", "stopped"]
EXIT_CONFIG = 78  # a service's exit code (sysexits' EX_CONFIG) for wrong options, after it printed the reason
EXIT_REFUSED = 69  # EX_UNAVAILABLE: what it needs is missing, such as a package; after it printed the reason
EXIT_LOST = 256  # no exit code: the process is gone with its node
STABLE_S = 30.0  # a process that is ready for this many seconds resets the count of deaths
MAX_DEATHS_A_MINUTE = 15  # of a service that becomes ready and dies again each time
PROBE_TIMEOUT_S = 5.0
LATE_PROBES = 3  # in a row without an answer in time, until a service that was ready is not: an engine may be busy
STARTING_GRACE_S = 0.5
KILL_S = 1.0  # until a killed process has ended


def listen(host: str, port: int, who: str, remedy: str) -> socket.socket:
    """A socket that listens on host:port (port 0: any free one). UsageError names the service and a remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY where it sees TCP
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        enable_keepalive(sock)  # a caller whose machine has gone silent is noticed, and its work ends
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise UsageError(
                f"{who}: {host} is no address of this machine ({error.strerror}): name one of its own (ngym.host, "
                "ngym.head.host, --host)"
            ) from None
        in_use = error.errno == errno.EADDRINUSE
        reason = "is in use by another program" if in_use else f"cannot be used: {error.strerror or error}"
        raise UsageError(f"{who}: port {port} on {host} {reason}; {remedy}") from None
    return sock


def free_port(address: str) -> int:
    """A port of this machine that is free now."""
    with listen(address, 0, "a free port", "choose another address") as sock:
        return int(sock.getsockname()[1])


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """The URL at which this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    host = LOOPBACK_OF.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
STARTING_POLL_S, READY_POLL_S = 0.1, 2.0


class ServiceFailed(NgymError):
    """A service was given up; with its name, the reason, and the last lines of its log."""


class ServiceRefused(ConfigError):
    """A service whose options are right cannot start: something that it needs is missing."""


@dataclass(frozen=True)
class ReplicaState:
    """The state of one process of a service, or of one URL of an external one. Also the event of its change.

    label: the name, with the replica's number when there are several. replica: 0 .. replicas - 1.
    detail: one line, such as why it is not ready. restarts: number of restarts. node: its machine, on a cluster.
    listed: whether it can be called. version: the policy version that a trainer has proved there. held: a trainer has not
    given it the current weights yet.
    """

    name: str
    kind: Kind
    app: str | None
    label: str
    replica: int
    url: str
    external: bool = False
    status: Status = "starting"
    detail: str = ""
    pid: int | None = None
    started_at: datetime | None = None
    restarts: int = 0
    node: str = ""
    listed: bool = True
    version: int | None = None
    held: bool = False


def called_urls(replicas: Sequence[ReplicaState]) -> list[str]:
    """The addresses that callers get. Without a replica that can be called, these are all: a restart may be short."""
    listed = [state for state in replicas if state.listed] or replicas
    return [state.url for state in listed if not state.held] or [state.url for state in listed]


@dataclass(frozen=True)
class RestartLimits:
    """The limits after which a service is given up: seconds until it is ready, and consecutive deaths before it was
    ever ready.
    """

    ready_timeout_s: float
    max_deaths: int


class PolledReplica:
    """A URL whose readiness is polled: `state` is current, `tell` receives each change, `ready` is set once it was
    ready.

    token: authorizes the requests. is_guest: it joined a run that started without it, and is listed while it is ready.
    """

    restarts_unseen = True  # a URL that does not answer may be that of a process that starts again

    def __init__(
        self,
        state: ReplicaState,
        tell: Callable[[ReplicaState], None],
        token: str | None = None,
        is_guest: bool = False,
    ) -> None:
        self.state = state
        self.is_guest = is_guest
        self.is_leaving = False
        self._blocked = ""
        self._token = token
        self.ready = asyncio.Event()
        self.ready_at: float | None = None
        self._notify = tell

    def change(self, **changes: Any) -> None:
        """Update the state; listeners are called if something has changed. The detail is sanitized, since services
        write it.
        """
        if "detail" in changes:
            changes["detail"] = sanitize(changes["detail"])
        state = replace(self.state, **changes)
        if state != self.state:
            self.state = state
            self._notify(state)

    async def watch(self, timeout_s: float = float("inf")) -> None:
        """Poll /ready forever.

        Raises:
            TimeoutError: it is not ready for the first time within timeout_s.
            ConfigError: a process of this run has the wrong certificate.
        """
        deadline = time.monotonic() + timeout_s
        been_ready, late = False, 0
        while True:
            # A listening socket queues the first probe until the service accepts it, so polling loses no time.
            remaining_s = PROBE_TIMEOUT_S if been_ready else max(deadline - time.monotonic(), 0.1)
            answer = await health(self.state.url, min(PROBE_TIMEOUT_S, remaining_s), self._token)
            late = late + 1 if answer.is_late else 0
            if been_ready and 0 < late < LATE_PROBES:
                pass  # it keeps its state
            elif answer.ready or (self._blocked and answer.reason == self._blocked):
                if not been_ready:
                    self.ready_at = time.monotonic()
                been_ready = True
                if self._blocked:
                    self.change(status="not ready", detail=self._blocked)
                else:
                    self.change(status="ready", **({} if self.is_leaving else {"detail": "", "listed": True}))
                self.ready.set()
            elif been_ready:
                lost = self.unpushed_state() if self.restarts_unseen else {}
                listed = self.state.listed and not self.is_guest
                self.change(status="not ready", detail=answer.reason, listed=listed, **lost)
            else:
                self.describe(answer.reason)
                if answer.is_distrusted and not self.state.external:
                    reason = f"{answer.reason.rstrip('.')}; it must be valid for each address at which services listen"
                    self.change(status="failed", detail=reason)
                    raise ConfigError(f"ngym.tls.certificate: service {self.state.label!r}: {reason}")
                if time.monotonic() > deadline:
                    raise TimeoutError(answer.reason)
            await asyncio.sleep(READY_POLL_S if been_ready or self.state.external else STARTING_POLL_S)

    def unpushed_state(self) -> dict[str, Any]:
        """The change of a replica that has lost the weights that a trainer gave it, if one did."""
        return {"version": None, "held": self.state.held or self.state.version is not None}

    def leave(self) -> None:
        """Take its address from the callers."""
        self.is_leaving = True
        self.change(detail="ends its calls, and stops", listed=False)

    def block(self, reason: str) -> None:
        """It is not ready any more, for a reason that its own /ready does not know."""
        self._blocked = reason
        if self.state.status in ("ready", "not ready"):
            self.change(status="not ready", detail=reason)

    def describe(self, reason: str) -> None:
        """The reason why it is not ready yet."""
        self.change(detail=reason)


@dataclass
class CrashCounter:
    """Counts deaths for the decision to give up."""

    in_a_row: int = 0  # consecutive processes that were never ready
    short: int = 0  # consecutive processes that were ready for less than STABLE_S
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DEATHS_A_MINUTE))

    def count(self, ready_s: float | None) -> None:
        """Count a death. ready_s: how long the service was ready; None: never."""
        self.in_a_row = self.in_a_row + 1 if ready_s is None else 0
        self.short = 1 if ready_s is not None and ready_s >= STABLE_S else self.short + 1
        self.recent.append(time.monotonic())

    def give_up_reason(self, limit: int) -> str | None:
        """The reason why the service should be given up, or None."""
        if limit == 0:
            return "died, and ngym.max_restarts is 0"
        if self.in_a_row >= limit:
            return f"died {self.in_a_row} times in a row without having been ready"
        if len(self.recent) == MAX_DEATHS_A_MINUTE and self.recent[-1] - self.recent[0] < 60:
            return f"died {MAX_DEATHS_A_MINUTE} times within a minute"
        return None

    @property
    def backoff_s(self) -> float:
        return min(BACKOFF_S * 2.0 ** max(0, self.short - 1), MAX_BACKOFF_S)


class StartedProcess(Protocol):
    """A started process: its pid on its machine, and its exit code once it has ended (negative: a signal's number)."""

    pid: asyncio.Future[int]
    exit_code: asyncio.Future[int]

    def signal(self, number: signal.Signals) -> None: ...


class ProcessHost(Protocol):
    """The place of one process of a service. url: where it listens; it changes if the process moves to another node.

    node: the machine's name in the cluster; "": this machine.
    """

    @property
    def url(self) -> str: ...

    @property
    def node(self) -> str: ...

    async def start(self, title: str, spec: dict[str, Any], log: int, python: Path | None) -> StartedProcess:
        """Start the process. log: the descriptor for its output, closed here."""
        ...

    async def rendezvous(self) -> tuple[str, int]:
        """The machine's address and a free port there, at which processes of other machines find a process here."""
        ...

    async def stop_listening(self) -> None:
        """Let go of the listening socket: once the process stops listening, connections are refused."""
        ...


Spares = Literal["nothing", "refusals", "failures"]


class ServiceProcess(PolledReplica):
    """A service process that we run: `run` restarts it until it is cancelled or the service is given up.

    spares: the errors that end only this process and not the run: a missing environment, or any failure. on_given_up:
    called after such an error, which is `given_up` from then on.
    """

    restarts_unseen = False

    def __init__(
        self,
        state: ReplicaState,
        tell: Callable[[ReplicaState], None],
        place: ProcessHost,
        spec: dict[str, Any],
        log: Path,
        limits: RestartLimits,
        redact: Redactor,
        venv: Venv | None = None,
        spares: Spares = "nothing",
        on_given_up: Callable[[ReplicaState], None] = lambda state: None,
    ) -> None:
        super().__init__(state, tell, spec["run_token"])
        self.given_up: NgymError | None = None
        self._spares = spares
        self._on_given_up = on_given_up
        self._place = place
        self._spec = spec
        wrap = state.label if spec["logs"] == "json" else None
        self._log = ServiceLog(log, on_status=self._on_status, redact=redact, wrap_as=wrap)
        self._limits = limits
        self._venv = venv
        self._has_reported = False
        self._child: StartedProcess | None = None
        self._deaths = CrashCounter()

    def log_tail(self) -> tuple[Path, list[str]]:
        """The path of its log, and the last lines of the current process."""
        return self._log.path, self._log.tail(KEPT_LINES)

    async def run(self) -> None:
        """Restart the process whenever it ends. ServiceFailed or ConfigError when restarting is pointless, unless the
        run continues without this service.
        """
        try:
            await self._run_with_restarts()
        except Exception as error:
            is_spared = self._spares == "failures" or (self._spares == "refusals" and isinstance(error, ServiceRefused))
            if not is_spared:
                raise
            if not isinstance(error, NgymError):
                logger.exception("service %r: an unexpected error", self.state.label)
                error = ServiceFailed(f"{type(error).__name__}: {error}")
            await self._give_up(error)
            await asyncio.Event().wait()

    async def _give_up(self, error: NgymError) -> None:
        self.given_up = error
        reason = str(error).rpartition("\n")[2] if isinstance(error, ServiceRefused) else str(error).partition("\n")[0]
        if self._child is not None:  # one that was not ready in time would keep its memory, and take calls
            await _kill(self._child)
        self.change(status="failed", detail=reason, pid=None)
        await self._place.stop_listening()  # callers are refused at once
        self._on_given_up(self.state)
        self.ready.set()  # the start of the run does not wait for it

    async def _run_with_restarts(self) -> None:
        python = await self._own_python()
        for restarts in itertools.count():
            code, ready_s = await self._run_once(restarts, python)
            await self._log.drain()
            if code in (EXIT_CONFIG, EXIT_REFUSED):
                self.change(status="failed", detail="cannot be started as it is", pid=None)
                refusal = ServiceRefused if code == EXIT_REFUSED else ConfigError
                raise refusal(
                    "\n".join(self._log.tail(SHOWN_LINES)) or f"{self.state.label}: cannot be started as it is"
                )
            self._deaths.count(ready_s)
            how = ": ".join(filter(None, (describe_exit(code, self.state.node), self._log.reason)))
            if why := self._deaths.give_up_reason(self._limits.max_deaths):
                self.change(status="failed", detail=how, pid=None)
                if self._log.reason:
                    raise ServiceFailed(f"service {self.state.label!r} {why} ({how}); its log is {self._log.path}")
                raise ServiceFailed(self._report(f"{why} ({how})"))
            pause = self._deaths.backoff_s
            changes = {"listed": code != EXIT_LOST and not self.is_leaving, **self.unpushed_state()}
            when = "on a node that has room" if code == EXIT_LOST else f"in {pause:.1f} s"
            self.change(status="restarting", detail=f"{how}; again {when}", pid=None, **changes)
            await asyncio.sleep(pause)

    async def _own_python(self) -> Path | None:
        """The Python of its own environment, created if needed; this time does not count as start-up time."""
        if self._venv is None:
            return None
        try:
            return await make(self._venv, self.describe, find_uv())
        except UsageError as error:
            self.change(status="failed", detail="its packages cannot be installed")
            raise ServiceRefused(str(error)) from error

    async def _run_once(self, restarts: int, python: Path | None) -> tuple[int, float | None]:
        """Run the process once: returns its exit code, and the seconds since it was first ready; None: never ready."""
        self.ready.clear()
        self.ready_at = None
        self._has_reported = False
        output = self._log.open()
        child = self._child = await self._place.start(self.state.label, self._spec, output, python)
        self._spec = self._spec | {"at_new_address": False}  # of its next process
        now = datetime.now(UTC)
        here = {"url": self._place.url, "node": self._place.node}
        self.change(status="starting", detail="", pid=child.pid.result(), started_at=now, restarts=restarts, **here)
        watch = asyncio.create_task(self.watch(self._limits.ready_timeout_s))
        try:
            either: list[asyncio.Future[Any]] = [child.exit_code, watch]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not child.exit_code.done():
                watch.result()
        except TimeoutError as error:
            self.change(status="failed", detail="not ready in time")
            what = f"was not ready within {self._limits.ready_timeout_s:g} s ({error})"
            raise ServiceFailed(self._report(what)) from None
        finally:
            watch.cancel()
        ready_s = None if self.ready_at is None else time.monotonic() - self.ready_at
        return child.exit_code.result(), ready_s

    def describe(self, reason: str) -> None:
        """Prefers the service's status lines to the reason from its /ready."""
        if not self._has_reported:
            super().describe(reason)

    def _on_status(self, status: str) -> None:
        self._has_reported = True
        self.change(detail=status)

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """SIGTERM, then SIGKILL to the whole group after grace_s or when `hurry` is set."""
        if not self.ready.is_set():  # still starting: it has no requests in flight, and may not handle signals yet
            grace_s = min(grace_s, STARTING_GRACE_S)
        child = self._child
        if child is not None and not child.exit_code.done():
            child.signal(signal.SIGTERM)
            hurried = asyncio.create_task(hurry.wait())
            either: list[asyncio.Future[Any]] = [child.exit_code, hurried]
            await asyncio.wait(either, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            await _kill(child)
        if self.state.status != "failed":
            self.change(status="stopped", detail="", pid=None)
        await self._log.close()

    def _report(self, what: str) -> str:
        lines = self._log.tail(SHOWN_LINES)
        log = f"the last {len(lines)} lines of {self._log.path}:" if lines else f"it printed nothing ({self._log.path})"
        return "\n".join([f"service {self.state.label!r} {what}; {log}", *(f"  | {line}" for line in lines)])


async def _kill(child: StartedProcess) -> None:
    """SIGKILL to the process and its group."""
    child.signal(signal.SIGKILL)
    await asyncio.wait({child.exit_code}, timeout=KILL_S)


def describe_exit(code: int, node: str = "") -> str:
    """An exit code in words. node: where the process ran."""
    if code == EXIT_LOST:
        return f"its node was lost: {node}" if node else "its node was lost"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
