"""The server's side of one zygote: a run goes there with its pipes, and comes back as a Result."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from fcntl import fcntl
from pathlib import Path
from typing import Any

from ngym.errors import ServiceError
from ngym.sandbox.guest import MEMORY_EXIT, STARVED_AFTER, Run
from ngym.sandbox.interface import Limits, Program, Result, Verdict
from ngym.sandbox.zygote import End, Spec

START_TIMEOUT_S = 120.0
SPARE_S = 30.0  # beyond the wall limit, until a zygote that says nothing counts as lost
END_TIMEOUT_S = 10.0
F_ADD_SEALS, SEAL_ALL = 1033, 0x1 | 0x2 | 0x4 | 0x8
PACKAGE = Path(__file__).resolve().parent
# The zygote must not import the server's half of this package, nor whatever stands beside it on the server's path.
BOOT = (
    "import sys, types\n"
    "for name, path in (('ngym', sys.argv[2]), ('ngym.sandbox', sys.argv[2] + '/sandbox')):\n"
    "    sys.modules[name] = types.ModuleType(name)\n"
    "    sys.modules[name].__path__ = [path]\n"
    "from ngym.sandbox.zygote import main\n"
    "main()\n"
)
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CAUSES: dict[str, tuple[Verdict, str]] = {
    "cpu": ("time_limit", "used its CPU time"),
    "asleep": ("time_limit", "slept until the wall-clock limit"),
    "starved": ("infra_error", "waited for a processor for several times its wall-clock limit"),
    "threads": ("memory_limit", "started too many threads"),
    "cancelled": ("infra_error", "was cancelled"),
}


class ZygoteLost(Exception):
    """The zygote died or does not answer: start another."""


class Slot:
    """A running zygote; one run at a time."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, tier: str) -> None:
        self._process = process
        self._control = control
        self.tier = tier
        self.runs = 0

    @classmethod
    async def start(cls, spec: Spec) -> Slot:
        """Exec a zygote and wait until it is ready.

        Raises:
            ServiceError: this tier cannot be had; with the zygote's own reason.
            ZygoteLost: it died, or was not ready within START_TIMEOUT_S.
        """
        process, ours = _exec_zygote()
        slot = cls(process, ours, spec["tier"])
        try:
            ours.send(json.dumps(spec).encode())
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await slot._answer()
        except (OSError, TimeoutError, ZygoteLost):
            await slot.end()
            raise ZygoteLost from None
        except BaseException:
            await slot.end()
            raise
        if "error" in answer:
            await slot.end()
            raise ServiceError(f"the sandbox's tier {spec['tier']!r} cannot be had here: {answer['error']}")
        return slot

    async def run(self, program: Program, limits: Limits) -> Result:
        """One run. ZygoteLost if it cannot be told what became of it."""
        self.runs += 1
        contents = [
            program.code.encode("utf-8", "surrogatepass"),
            *(text.encode("utf-8", "surrogatepass") for text in program.files.values()),
        ]
        request = Run(
            cpu_s=limits.cpu_s,
            wall_s=limits.wall,
            memory_bytes=limits.memory_mib << 20,
            threads=limits.threads,
            files=limits.files,
            disk_mib=limits.disk_mib,
            names=list(program.files),
            sizes=[len(content) for content in contents],
        )
        pipes = [_Pipe(limits.output_kib << 10, self.cancel) for _ in range(3)]
        try:
            self._submit(request, b"".join(contents), program.stdin.encode("utf-8", "surrogatepass"), pipes)
            async with asyncio.timeout(limits.wall * STARVED_AFTER + SPARE_S):
                end: End = await self._answer()
            for pipe in pipes:
                pipe.drain()
        except (OSError, TimeoutError) as error:
            raise ZygoteLost from error
        finally:
            for pipe in pipes:
                pipe.close()
        return _result(self.tier, end, limits, pipes)

    def cancel(self) -> None:
        """End the run that is under way; its result comes as ever."""
        with suppress(OSError):
            self._control.send(b"cancel")

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the zygote, and with it whatever runs; `end` has to follow."""
        self._process.kill()

    async def end(self) -> None:
        """End the zygote, which runs nothing any more."""
        self._process.kill()
        self._control.close()
        await asyncio.to_thread(self._process.wait, END_TIMEOUT_S)

    def _submit(self, request: Run, contents: bytes, stdin: bytes, pipes: list[_Pipe]) -> None:
        inputs = []
        try:
            inputs = [_sealed(contents), _sealed(stdin)]
            given = [*inputs, *(pipe.theirs for pipe in pipes)]
            socket.send_fds(self._control, [json.dumps(request).encode()], given)
        finally:
            for fd in inputs:
                os.close(fd)
            for pipe in pipes:
                pipe.given()

    async def _answer(self) -> Any:
        answer = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
        if not answer:
            raise ZygoteLost
        return json.loads(answer)


def _exec_zygote() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of its control socket. Not from a helper thread: the kernel ends it with its thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(theirs.fileno()), str(PACKAGE.parent)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
        )
    ours.setblocking(False)
    return process, ours


class _Pipe:
    """What the program writes to one descriptor, up to a number of bytes; beyond it, `overflow` is called once."""

    def __init__(self, limit: int, overflow: Callable[[], None]) -> None:
        self._limit, self._overflow = limit, overflow
        self._ours, self.theirs = os.pipe()
        self._loop = asyncio.get_running_loop()
        self.data = bytearray()
        self.truncated = False
        os.set_blocking(self._ours, False)
        self._loop.add_reader(self._ours, self._read)

    def given(self) -> None:
        """The other end has been handed over."""
        os.close(self.theirs)

    def close(self) -> None:
        self._loop.remove_reader(self._ours)
        os.close(self._ours)

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")

    def drain(self) -> None:
        """Read what stands in the pipe. The writer is dead: nothing more comes, even where its end is not closed yet."""
        with suppress(BlockingIOError):
            while self._take():
                pass

    def _read(self) -> None:
        with suppress(BlockingIOError):
            if not self._take():
                self._loop.remove_reader(self._ours)

    def _take(self) -> bool:
        """Read a piece; False at the end."""
        chunk = os.read(self._ours, 1 << 16)
        self.data += chunk[: self._limit - len(self.data)]
        if chunk and len(self.data) >= self._limit and not self.truncated:
            self.truncated = True
            self._overflow()
        return bool(chunk)


def _sealed(content: bytes) -> int:
    """A file in memory that holds this and cannot be changed, at its beginning."""
    fd = os.memfd_create("ngym", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl(fd, F_ADD_SEALS, SEAL_ALL)
    return fd


def _result(tier: str, end: End, limits: Limits, pipes: list[_Pipe]) -> Result:
    stdout, stderr, answer = pipes
    verdict, detail = _verdict(end, limits, any(pipe.truncated for pipe in pipes))
    status = end["status"]
    return Result(
        verdict=verdict,
        tier=tier,
        detail=detail,
        stdout=stdout.text,
        stderr=stderr.text,
        answer=answer.text,
        exit_code=status if status >= 0 else None,
        signal=signal.Signals(-status).name if status < 0 else None,
        cpu_s=end["cpu_s"],
        wall_s=end["wall_s"],
        memory_bytes=end["memory_bytes"],
    )


def _verdict(end: End, limits: Limits, truncated: bool) -> tuple[Verdict, str]:
    status = end["status"]
    if end["cause"] == "unconfined":
        return "infra_error", f"could not be confined: {end['detail']}"
    if truncated:
        return "output_limit", f"wrote more than {limits.output_kib} KiB"
    if end["cause"] in CAUSES:
        return CAUSES[end["cause"]]
    if status == MEMORY_EXIT:
        return "memory_limit", "ran out of memory"
    if status == -signal.SIGKILL:  # not by the zygote, and the program itself cannot: by the kernel
        return _killed(end, limits)
    if status == 0:
        return "ok", ""
    return "runtime_error", f"exit code {status}" if status > 0 else signal.Signals(-status).name


def _killed(end: End, limits: Limits) -> tuple[Verdict, str]:
    """Where the host runs out of memory, the kernel kills the process that holds most."""
    if end["cpu_s"] >= limits.cpu_s:
        return "time_limit", "used its CPU time"
    if end["memory_bytes"] >= limits.memory_mib << 19:
        return "memory_limit", f"was killed when it held {end['memory_bytes'] >> 20} MiB"
    return "infra_error", "was killed"
