"""A pool of warm worker processes: calls are answered within their deadline, and workers that exceed it are killed.

    server ──calls, one at a time each──> worker, worker, ...     own CPU timer, own memory limit
       └──────────control──────────────> zygote                   imports and warms once, forks and buries workers

Threads cannot be stopped (one `9**9**9**9` holds the interpreter's lock for good) and a process per call pays for its
imports every time; a worker forked from a warm zygote starts in milliseconds and dies in one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from ngym.errors import NotReady, Overloaded, ServiceError
from ngym.runtime.cpu_threads import usable_cores

BUSY_SHARE = 0.25  # of its CPU seconds: a call that has used so much is computing, on a machine that is busy elsewhere
WALL_FACTOR = 8.0  # the deadline counts CPU time; so many times as much wall time is the backstop
MAX_REPLY_BYTES = 4 << 20
START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0  # it needs milliseconds, unless the machine is overloaded
STDERR = 2
# What a process does to itself by what it computes (a stack that is too deep, a library that aborts).
OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})

ZYGOTE_FILE = Path(__file__).with_name("worker_zygote.py")


@dataclass(frozen=True)
class WorkerOutcome:
    """The result of one call.

    kind: `ok` (value is what the function returned), `timeout` (the deadline), `memory` (the limit), or `crash` (it
        raised, or its process died); detail says more about the last three, in one line.
    infra: the machine or the pool failed, which says nothing about the arguments. Every other failure is their doing.
    """

    kind: Literal["ok", "timeout", "memory", "crash"]
    value: Any = None
    detail: str = ""
    infra: bool = False

    def failure(self) -> dict[str, Any]:
        """A verifier's answer for a call without a value: 0 for what the answer caused, null for the machine."""
        cause = "ungradable" if self.kind == "crash" else "too_heavy"
        return {
            "reward": None if self.infra else 0.0,
            "outcome": "infra_error" if self.infra else cause,
            "reason": f"{self.kind}: {self.detail}",
        }


class Death(NamedTuple):
    """The end of a worker. status: its exit code, or minus the signal. memory_bytes: the most that it held."""

    status: int
    memory_bytes: int


class ZygoteLost(Exception):
    """The zygote died, and its workers with it: start another."""


class Zygote:
    """A running zygote process. One request at a time goes over its control socket."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, memory_bytes: int) -> None:
        self._process = process
        self._control = control
        self.memory_bytes = memory_bytes
        self._turn = asyncio.Lock()
        self._lost = False

    @classmethod
    async def start(cls, file: Path, function: str, warm: str | None, memory_bytes: int) -> Zygote:
        """Exec a zygote and wait until it is warm.

        Raises:
            ServiceError: the function's file cannot be loaded or warmed; the error has its message.
            ZygoteLost: it died, or was not ready within START_TIMEOUT_S.
        """
        zygote = cls(*_exec_zygote(), memory_bytes)
        spec = {
            "file": str(file),
            "function": function,
            "warm": warm,
            "memory_bytes": memory_bytes,
            "sys_path": sys.path,
            "parent": os.getpid(),
        }
        try:
            answer = await zygote._ask(spec, timeout_s=START_TIMEOUT_S)
        except BaseException:
            await zygote.end()
            raise
        if "error" in answer:
            await zygote.end()
            raise ServiceError(
                f"{file}: its worker processes cannot load {function!r}: {answer['error']} "
                "(is the extra that this service needs installed?)",
                failure="config",
            )
        return zygote

    def alive(self) -> bool:
        return not self._lost and self._process.poll() is None

    async def fork(self) -> Worker:
        """A new worker. ZygoteLost."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            pid = (await self._ask({"fork": True}, fds=[child_end.fileno()]))["pid"]
        reader, writer = await asyncio.open_connection(sock=parent_end, limit=MAX_REPLY_BYTES)
        return Worker(self, pid, reader, writer)

    async def kill_and_reap(self, pid: int) -> Death:
        """Kill and reap a worker. ZygoteLost."""
        return Death(**await self._ask({"bury": pid}))

    async def end(self) -> None:
        """End the zygote and its workers."""
        self._lost = True
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _ask(
        self, request: dict[str, Any], *, fds: list[int] | None = None, timeout_s: float = REPLY_TIMEOUT_S
    ) -> dict[str, Any]:
        async with self._turn:
            if self._lost:
                raise ZygoteLost
            try:
                socket.send_fds(self._control, [orjson.dumps(request) + b"\n"], fds or [])
                async with asyncio.timeout(timeout_s):
                    reply = await asyncio.get_running_loop().sock_recv(self._control, 4096)
            except (OSError, TimeoutError):
                reply = b""
            if not reply:
                self._lost = True
                self._process.kill()
                raise ZygoteLost
        answer: dict[str, Any] = orjson.loads(reply)
        return answer


def _exec_zygote() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of its control socket. Not from a helper thread: the kernel ends it with its thread."""
    parent_end, child_end = socket.socketpair()
    with child_end:
        # -P: the working directory's modules are not importable
        command = [sys.executable, "-P", str(ZYGOTE_FILE), str(child_end.fileno())]
        process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, stdout=STDERR)
    parent_end.setblocking(False)
    return process, parent_end


class Worker:
    """A forked worker. After any call that did not end by an answer, it is gone."""

    def __init__(self, zygote: Zygote, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._zygote = zygote
        self._pid = pid
        self._reader = reader
        self._writer = writer
        self.calls = 0
        self.gone = False

    def has_died(self) -> bool:
        """Whether it went away between two calls (the zygote died, or the system needed the memory)."""
        return self.gone or self._reader.at_eof()

    async def call(self, line: bytes, deadline_s: float) -> WorkerOutcome:
        """Send one call and wait for its outcome; ZygoteLost if the worker went down with its zygote."""
        self.calls += 1
        began_s = _cpu_s(self._pid)
        try:
            async with asyncio.timeout(WALL_FACTOR * deadline_s):
                self._writer.write(line)
                reply = await self._reader.readline()
        except TimeoutError:
            used_s = _cpu_s(self._pid) - began_s
            await self.kill_and_reap()
            detail = f"no answer within {WALL_FACTOR * deadline_s:g} s, of which it computed for {used_s:.2f} s"
            return WorkerOutcome("timeout", detail=detail, infra=used_s < BUSY_SHARE * deadline_s)
        except ValueError:
            await self.kill_and_reap()
            return WorkerOutcome("crash", detail=f"the answer is larger than {MAX_REPLY_BYTES >> 20} MiB")
        except ConnectionError:
            reply = b""
        if reply.endswith(b"\n"):
            return WorkerOutcome(**orjson.loads(reply))
        return _outcome_of_death(await self.kill_and_reap(), deadline_s, self._zygote.memory_bytes)

    def hang_up(self) -> None:
        """No caller waits for this call any more: end it as if the worker had died."""
        self._writer.transport.abort()

    async def kill_and_reap(self) -> Death:
        """End this worker and reap it. ZygoteLost."""
        self.gone = True
        try:
            return await self._zygote.kill_and_reap(self._pid)
        finally:
            self._writer.close()


def _cpu_s(pid: int) -> float:
    """The CPU seconds that a process has used, as Linux counts them; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _outcome_of_death(death: Death, deadline_s: float, memory_bytes: int) -> WorkerOutcome:
    status = death.status
    if status == -signal.SIGPROF:
        return WorkerOutcome("timeout", detail=f"used {deadline_s:g} s of CPU time")
    if status >= 0:
        return WorkerOutcome("crash", detail=f"the worker exited with code {status}", infra=True)
    if status == -signal.SIGKILL and death.memory_bytes >= memory_bytes // 2:  # the kernel takes the largest process
        return WorkerOutcome("memory", detail=f"was killed when it held {death.memory_bytes >> 20} MiB")
    name = str(status)
    with suppress(ValueError):
        name = signal.Signals(-status).name
    return WorkerOutcome("crash", detail=f"the worker was ended by {name}", infra=-status not in OWN_SIGNALS)


class WorkerPool:
    """Runs one function in worker processes. The function is found by file and name and takes and returns plain JSON.

    Workers limit time and memory. They are not a sandbox: files and network are open to what runs in them.

    Args:
        file: the module that has the function; relative imports of its siblings work.
        function: the function's name there.
        warm: a function there that is called once before any worker is forked (fill caches, build tables).
        workers: how many calls run at once; the usable cores by default. Each is forked when first needed.
        deadline_s: CPU seconds that a call may use, unless `run` says otherwise; WALL_FACTOR times as much wall time
            is the backstop.
        memory_mib: address space of a worker.
        recycle_after: a worker is replaced after so many calls, so that what the function leaks is given back.
        backlog: calls that may wait for a worker; one more is refused.
    """

    def __init__(
        self,
        file: str | Path,
        function: str,
        *,
        warm: str | None = None,
        workers: int | None = None,
        deadline_s: float = 5.0,
        memory_mib: int = 2048,
        recycle_after: int = 1000,
        backlog: int = 16384,
    ) -> None:
        self.file = Path(file).resolve()
        self.function = function
        self.warm = warm
        self.workers = workers or usable_cores()
        self.deadline_s = deadline_s
        self.memory_mib = memory_mib
        self.recycle_after = recycle_after
        self.backlog = backlog
        self._slots: _Slots | None = None

    async def run(self, *args: Any, deadline_s: float | None = None) -> WorkerOutcome:
        """Call the function with JSON values; its outcome comes within the deadline. Cancelling ends the call.

        Raises:
            Overloaded: `backlog` calls are waiting already.
            ServiceError: the function's file cannot be loaded.
        """
        deadline_s = deadline_s or self.deadline_s
        line = orjson.dumps([deadline_s, args]) + b"\n"
        slots = self._slots = self._slots or _Slots(self)
        slot = await slots.take()
        slot.has_caller = True
        # A separate task: a caller that is cancelled must not leave a half-made worker or a half-read reply behind.
        task = asyncio.create_task(slots.run(slot, line, deadline_s))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():  # else the slot already serves another call
                slot.hang_up()
            raise

    async def start(self) -> None:
        """Load and warm now; without this, the first call does. ServiceError says why it cannot."""
        slots = self._slots = self._slots or _Slots(self)
        await slots.zygote()

    async def aclose(self) -> None:
        """End every process of the pool; calls under way end with NotReady."""
        slots, self._slots = self._slots, None
        if slots is not None:
            await slots.close()

    @asynccontextmanager
    async def lifespan(self, context: object = None) -> AsyncIterator[None]:
        """The pool as a service's `lifespan=`: warm before the service is ready, ended with it."""
        try:
            await self.start()
            yield
        finally:
            await self.aclose()


class _Slot:
    """A place for one worker, forked when first needed."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.has_caller = False  # a caller waits for the running call

    def hang_up(self) -> None:
        self.has_caller = False
        if self.worker is not None:
            self.worker.hang_up()


class _Slots:
    """A started pool: its zygote, its slots, the calls under way. Belongs to one event loop."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._waiting = 0
        # Last in, first out: a light load keeps to few workers, and the others are never forked.
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for _ in range(pool.workers):
            self._free.put_nowait(_Slot())

    async def take(self) -> _Slot:
        """A free slot; `run` gives it back."""
        if self._waiting >= self._pool.backlog:
            raise Overloaded(f"{self._waiting} calls of {self._pool.function!r} are waiting for a worker already")
        self._waiting += 1
        try:
            return await self._free.get()
        finally:
            self._waiting -= 1

    async def run(self, slot: _Slot, line: bytes, deadline_s: float) -> WorkerOutcome:
        try:
            for _ in range(2):  # a worker that goes down with its zygote is not this call's doing: once more
                with suppress(ZygoteLost):
                    return await self._attempt(slot, line, deadline_s)
            detail = "the processes of the worker pool died twice during this call"
            return WorkerOutcome("crash", detail=detail, infra=True)
        finally:
            self._free.put_nowait(slot)

    async def _attempt(self, slot: _Slot, line: bytes, deadline_s: float) -> WorkerOutcome:
        if slot.worker is not None and slot.worker.has_died():
            await self._drop(slot)
        if slot.worker is None:
            slot.worker = await (await self.zygote()).fork()
        if not slot.has_caller:
            return WorkerOutcome("crash", detail="no caller waits for this call any more", infra=True)
        outcome = await slot.worker.call(line, deadline_s)
        is_worn = slot.worker.calls >= self._pool.recycle_after or outcome.kind == "memory"
        if is_worn or slot.worker.gone:
            await self._drop(slot)
        return outcome

    async def _drop(self, slot: _Slot) -> None:
        worker, slot.worker = slot.worker, None
        if worker is not None and not worker.gone:
            with suppress(ZygoteLost):
                await worker.kill_and_reap()

    async def zygote(self) -> Zygote:
        """The zygote; a new one where there was none or it died."""
        async with self._starting:
            if self._closed:
                raise NotReady(f"the worker pool of {self._pool.function!r} is closing")
            if self._zygote is None or not self._zygote.alive():
                await self._end_zygote()
                pool = self._pool
                self._zygote = await Zygote.start(pool.file, pool.function, pool.warm, pool.memory_mib << 20)
            return self._zygote

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            await self._end_zygote()

    async def _end_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.end()
