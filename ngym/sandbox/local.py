"""Runs programs on this machine, each in a forked and confined process, with the strongest tier that works.

    namespaces   no network, no other processes, a separate root, and what the next two do
    landlock     an allow-list of paths; possible in a default Docker container, with or without root
    seccomp      no file can be opened: only modules that were loaded before can be imported

All three filter system calls and limit CPU time, memory, output, threads and files. A tier is used only after a test
program has tried to escape from it. If no tier holds, nothing runs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from fcntl import fcntl
from pathlib import Path
from typing import Any, Literal

from ngym.errors import NotReady, ServiceError
from ngym.runtime.cpu_threads import usable_cores
from ngym.sandbox.base import Limits, Program, Result, Sandbox, Verdict, infra_error
from ngym.sandbox.local_guest import MEMORY_EXIT, STARVED_AFTER, GuestRequest
from ngym.sandbox.sandbox_zygote import End, SandboxZygoteSpec

START_TIMEOUT_S = 120.0
SPARE_S = 30.0  # seconds beyond the wall limit, after which a silent zygote counts as lost
END_TIMEOUT_S = 10.0
# The zygote must not import the server's half of this package, nor anything else on the server's path.
BOOT = (
    "import sys, types\n"
    "for name, path in (('ngym', sys.argv[2]), ('ngym.sandbox', sys.argv[2] + '/sandbox')):\n"
    "    sys.modules[name] = types.ModuleType(name)\n"
    "    sys.modules[name].__path__ = [path]\n"
    "from ngym.sandbox.sandbox_zygote import main\n"
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
Tier = Literal["namespaces", "landlock", "seccomp"]
TIERS: tuple[Tier, ...] = ("namespaces", "landlock", "seccomp")
RECYCLE_AFTER = 5_000
PRELOAD = ("numpy",)  # if installed
STDLIB = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "binascii", "bisect", "calendar", "cmath", "codecs",
    "collections", "concurrent.futures", "contextlib", "contextvars", "copy", "csv", "ctypes", "dataclasses",
    "datetime", "decimal", "difflib", "enum", "fnmatch", "fractions", "functools", "glob", "graphlib", "hashlib",
    "heapq", "hmac", "html", "inspect", "io", "ipaddress", "itertools", "json", "keyword", "locale", "logging",
    "math", "numbers", "operator", "pathlib", "pickle", "platform", "pprint", "queue", "random", "re", "secrets",
    "select", "selectors", "shlex", "shutil", "socket", "stat", "statistics", "string", "struct", "subprocess",
    "tempfile", "textwrap", "threading", "timeit", "traceback", "types", "typing", "unicodedata", "unittest",
    "urllib.parse", "uuid", "warnings", "weakref", "xml.etree.ElementTree", "zlib", "zoneinfo",
)  # fmt: skip
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "ensurepip", "idlelib", "__pycache__"})
SYSTEM = ("/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom", "/etc/localtime")
# A program's likely attempts to escape; prints those that worked.
ESCAPES = """
import ctypes, os, socket, sys
def connect(family, address):
    s = socket.socket(family); s.settimeout(1); s.connect(address)
libc = ctypes.CDLL(None, use_errno=True)
def libc_call(name, *args):
    if getattr(libc, name)(*args) < 0: raise OSError(name)
attempts = {
    "open /etc/passwd": lambda: open("/etc/passwd"),
    "list /": lambda: os.listdir("/proc"),
    "read another's environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "write /tmp": lambda: open("/tmp/ngym-escape", "w"),
    "write /dev/shm": lambda: open("/dev/shm/ngym-escape", "w"),
    "fork": lambda: os.fork() or os._exit(0),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "signal another": lambda: os.kill(os.getppid(), 0),
    "tgkill another": lambda: libc_call("tgkill", os.getppid(), os.getppid(), 0),
    "connect": lambda: connect(socket.AF_INET, ("127.0.0.1", 1)),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "ptrace": lambda: libc_call("ptrace", 16, os.getppid(), 0, 0),
    "memfd": lambda: os.memfd_create("x"),
    "unshare": lambda: libc_call("unshare", 0x10000000),
}
for name, attempt in attempts.items():
    try: attempt()
    except (OSError, ValueError, AttributeError): continue
    print(name)
"""

F_ADD_SEALS, SEAL_ALL = 1033, 0x1 | 0x2 | 0x4 | 0x8
PACKAGE = Path(__file__).resolve().parent


class ZygoteLost(Exception):
    """The zygote died or does not answer; start another."""


class Slot:
    """A running zygote; one run at a time."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, tier: str) -> None:
        self._process = process
        self._control = control
        self.tier = tier
        self.runs = 0

    @classmethod
    async def start(cls, spec: SandboxZygoteSpec) -> Slot:
        """Exec a zygote and wait until it is ready.

        Raises:
            ServiceError: this tier is not available; with the zygote's own reason.
            ZygoteLost: it died, or was not ready within START_TIMEOUT_S.
        """
        process, control = _exec_zygote()
        slot = cls(process, control, spec["tier"])
        try:
            control.send(json.dumps(spec).encode())
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
            raise ServiceError(f"the sandbox's tier {spec['tier']!r} is not available here: {answer['error']}")
        return slot

    async def run(self, program: Program, limits: Limits) -> Result:
        """Run one program. ZygoteLost if its outcome is unknown."""
        self.runs += 1
        contents = [
            program.code.encode("utf-8", "surrogatepass"),
            *(text.encode("utf-8", "surrogatepass") for text in program.files.values()),
        ]
        request = GuestRequest(
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
        """End the current run; its result still arrives."""
        with suppress(OSError):
            self._control.send(b"cancel")

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the zygote and its program; call `end` afterwards."""
        self._process.kill()

    async def end(self) -> None:
        """End an idle zygote."""
        self._process.kill()
        self._control.close()
        await asyncio.to_thread(self._process.wait, END_TIMEOUT_S)

    def _submit(self, request: GuestRequest, contents: bytes, stdin: bytes, pipes: list[_Pipe]) -> None:
        inputs = []
        try:
            inputs = [_sealed_file(contents), _sealed_file(stdin)]
            fds = [*inputs, *(pipe.write_end for pipe in pipes)]
            socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        finally:
            for fd in inputs:
                os.close(fd)
            for pipe in pipes:
                pipe.close_write_end()

    async def _answer(self) -> Any:
        answer = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
        if not answer:
            raise ZygoteLost
        return json.loads(answer)


def _exec_zygote() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of its control socket. Not from a helper thread: with die_with_parent it ends with that
    thread.
    """
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(child_end.fileno()), str(PACKAGE.parent)],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
        )
    parent_end.setblocking(False)
    return process, parent_end


class _Pipe:
    """Reads what the program writes to one descriptor, up to a limit; beyond it, calls `overflow` once."""

    def __init__(self, limit: int, overflow: Callable[[], None]) -> None:
        self._limit, self._overflow = limit, overflow
        self._read_end, self.write_end = os.pipe()
        self._loop = asyncio.get_running_loop()
        self.data = bytearray()
        self.truncated = False
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    def close_write_end(self) -> None:
        """Close our copy of the end that was handed over."""
        os.close(self.write_end)

    def close(self) -> None:
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")

    def drain(self) -> None:
        """Read the rest of the pipe. The writer is dead: nothing more comes, even if its end is not closed yet."""
        with suppress(BlockingIOError):
            while self._take():
                pass

    def _read(self) -> None:
        with suppress(BlockingIOError):
            if not self._take():
                self._loop.remove_reader(self._read_end)

    def _take(self) -> bool:
        """Read a piece; False at the end."""
        chunk = os.read(self._read_end, 1 << 16)
        self.data += chunk[: self._limit - len(self.data)]
        if chunk and len(self.data) >= self._limit and not self.truncated:
            self.truncated = True
            self._overflow()
        return bool(chunk)


def _sealed_file(content: bytes) -> int:
    """A sealed in-memory file with this content, positioned at its beginning."""
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
    if status == -signal.SIGKILL:  # neither the zygote nor the program sent it, so the kernel did
        return _kill_verdict(end, limits)
    if status == 0:
        return "ok", ""
    return "runtime_error", f"exit code {status}" if status > 0 else signal.Signals(-status).name


def _kill_verdict(end: End, limits: Limits) -> tuple[Verdict, str]:
    """The verdict after a kill by the kernel: when the host runs out of memory, it kills the largest process."""
    if end["cpu_s"] >= limits.cpu_s:
        return "time_limit", "used its CPU time"
    if end["memory_bytes"] >= limits.memory_mib << 19:
        return "memory_limit", f"was killed when it held {end['memory_bytes'] >> 20} MiB"
    return "infra_error", "was killed"


# User ids of root's guests: one per slot, so that their threads can be counted.
FIRST_UID, UIDS = 61_184, 4_000


class LocalSandbox(Sandbox):
    """Zygotes on this machine, one for each concurrent program.

    Args:
        tier: `auto` for the strongest that works; any other name requires that tier, or raises ServiceError.
        slots: concurrent programs; default: the usable cores. Each zygote starts when first needed.
        preload: modules to import before programs are forked, in addition to much of the standard library.
    """

    def __init__(
        self, tier: Tier | Literal["auto"] = "auto", *, slots: int | None = None, preload: tuple[str, ...] = PRELOAD
    ) -> None:
        self.tier: Tier | None = None
        self.slots = slots or usable_cores()
        self._tiers = TIERS if tier == "auto" else (tier,)
        self._preload = [name for name in preload if importlib.util.find_spec(name)]
        self._starting = asyncio.Lock()
        self._free: asyncio.LifoQueue[_ZygoteSlot] = asyncio.LifoQueue()
        self._places = [_ZygoteSlot(number) for number in range(self.slots)]
        self._closed = False
        for place in reversed(self._places):
            self._free.put_nowait(place)

    async def start(self) -> None:
        async with self._starting:
            if self.tier is not None:
                return
            reasons = []
            for tier in self._tiers:
                try:
                    self._places[0].slot = await self._probe(tier)
                except ServiceError as error:
                    reasons.append(error.detail)
                    continue
                self.tier = tier
                return
            raise ServiceError("; ".join(reasons), failure="config")

    async def execute(self, program: Program, limits: Limits) -> Result:
        try:
            await self.start()
        except ServiceError as error:
            return infra_error("none", error.detail)
        place = await self._free.get()
        place.cancelled = False
        # A separate task: a cancelled caller must not leave a half-read reply behind.
        task = asyncio.create_task(self._run(place, program, limits))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():  # else another run has the slot by now
                place.cancelled = True
                if place.slot is not None:
                    place.slot.cancel()
            raise

    async def aclose(self) -> None:
        """End every process; current runs end as `infra_error`."""
        self._closed = True
        for place in self._places:
            if place.slot is not None:
                place.slot.kill()
        ended = [await self._free.get() for _ in self._places]
        for place in ended:
            await place.drop()
            self._free.put_nowait(place)

    async def _run(self, place: _ZygoteSlot, program: Program, limits: Limits) -> Result:
        assert self.tier is not None
        try:
            for _ in range(2):  # a lost zygote is not this program's fault: retry once
                if self._closed:
                    raise NotReady("the sandbox is closing")
                with suppress(ZygoteLost):
                    if place.slot is None:
                        place.slot = await Slot.start(self._spec(self.tier, place.number))
                    if place.cancelled or self._closed:
                        return infra_error(self.tier, "was cancelled")
                    result = await place.slot.run(program, limits)
                    if place.slot.runs >= RECYCLE_AFTER:
                        await place.drop()
                    return result
                await place.drop()
            return infra_error(self.tier, "its zygote was lost twice")
        except ServiceError as error:
            return infra_error(self.tier, error.detail)
        finally:
            self._free.put_nowait(place)

    async def _probe(self, tier: Tier) -> Slot:
        """A slot of this tier from which ESCAPES found no way out. Raises ServiceError."""
        slot = None
        try:
            slot = await Slot.start(self._spec(tier, 0))
            result = await slot.run(Program(code=ESCAPES), Limits(cpu_s=10))
            problem = "" if result.verdict == "ok" else f"{result.verdict}: {result.detail} {result.stderr[-300:]}"
            problem += ", ".join(result.stdout.splitlines())
        except ZygoteLost:
            problem = "its process was lost"
        if slot is None or problem:
            if slot is not None:
                await slot.end()
            raise ServiceError(f"the sandbox's tier {tier!r} does not hold here: {problem}")
        return slot

    def _spec(self, tier: Tier, number: int) -> SandboxZygoteSpec:
        packages = _packages(self._preload)
        return SandboxZygoteSpec(
            tier=tier,
            preload=[*STDLIB, *self._preload],
            sys_path=[*_stdlib_path(), *dict.fromkeys(str(path.parent) for path in packages)],
            shown=[*_stdlib_files(), *map(str, packages), *_libraries()],
            uid=FIRST_UID + (os.getpid() * self.slots + number) % UIDS,
            parent=os.getpid(),
        )


class _ZygoteSlot:
    """A slot for a zygote, which starts when first needed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.slot: Slot | None = None
        self.cancelled = False

    async def drop(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            await slot.end()


def _stdlib_path() -> list[str]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    return [str(stdlib), str(stdlib / "lib-dynload")]


def _stdlib_files() -> list[str]:
    """The standard library's entries, one by one, without installed packages (which may hold data and answers)."""
    return [str(entry) for entry in Path(sysconfig.get_path("stdlib")).iterdir() if entry.name not in LEFT_OUT]


def _packages(names: list[str]) -> list[Path]:
    """The folders of the preloaded packages and of the libraries in their wheels."""
    paths = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            home = Path(spec.origin)
            folder = home.parent if spec.submodule_search_locations else home
            paths += [folder, *folder.parent.glob(f"{name}.libs")]
    return paths


def _libraries() -> list[str]:
    """Shared libraries that extension modules load on import."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"
    own = [str(path) for path in (Path(sys.base_prefix) / "lib").glob("*.so*")]
    return [f"/lib/{multiarch}", f"/usr/lib/{multiarch}", *SYSTEM, *own]
