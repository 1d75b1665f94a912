"""Programs on this machine, each in a forked process that gave everything up; the strongest tier that works is taken.

    namespaces   no network, no other processes, a root of its own, and what the next two do
    landlock     files by an allow-list of paths; what a default Docker container allows, with or without root
    seccomp      no file can be opened at all: only modules that were loaded before can be imported

All three filter system calls, and limit CPU time, memory, output, threads and files. A tier is taken only after a
program of ours, run in it, has tried to get out. Where none holds nothing is run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ngym.errors import NotReady, ServiceError
from ngym.sandbox.interface import Limits, Program, Result, Sandbox, infra_error
from ngym.sandbox.slot import Slot, ZygoteLost
from ngym.sandbox.zygote import Spec
from ngym.workers.pool import usable_cores

Tier = Literal["namespaces", "landlock", "seccomp"]
TIERS: tuple[Tier, ...] = ("namespaces", "landlock", "seccomp")
# Of root's guests: one for each slot, so that their threads can be counted. Nobody is called these for long.
FIRST_UID, UIDS = 61_184, 4_000
RECYCLE_AFTER = 5_000
PRELOAD = ("numpy",)  # where it is installed
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

# What a program could try first; it says what worked.
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


class LocalSandbox(Sandbox):
    """Zygotes on this machine, as many as programs may run at once.

    Args:
        tier: `auto` is the strongest that works; any other name is that tier or a ServiceError.
        slots: programs at once; the usable cores by default. Each zygote is started when first needed.
        preload: modules, beside much of the standard library, that are imported before programs are forked.
    """

    def __init__(
        self,
        tier: Tier | Literal["auto"] = "auto",
        *,
        slots: int | None = None,
        preload: tuple[str, ...] = PRELOAD,
    ) -> None:
        self.tier: Tier | None = None
        self.slots = slots or usable_cores()
        self._wanted = TIERS if tier == "auto" else (tier,)
        self._preload = [name for name in preload if importlib.util.find_spec(name)]
        self._starting = asyncio.Lock()
        self._free: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        self._places = [_Place(number) for number in range(self.slots)]
        self._closed = False
        for place in reversed(self._places):
            self._free.put_nowait(place)

    async def start(self) -> None:
        async with self._starting:
            if self.tier is not None:
                return
            reasons = []
            for tier in self._wanted:
                try:
                    self._places[0].slot = await self._probed(tier)
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
        # A task of its own: a caller that is cancelled must not leave a half-read reply behind.
        task = asyncio.create_task(self._run(place, program, limits))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():  # else the place is somebody else's by now
                place.cancelled = True
                if place.slot is not None:
                    place.slot.cancel()
            raise

    async def aclose(self) -> None:
        """End every process; runs under way end as `infra_error`."""
        self._closed = True
        for place in self._places:
            if place.slot is not None:
                place.slot.kill()
        ended = [await self._free.get() for _ in self._places]
        for place in ended:
            await place.drop()
            self._free.put_nowait(place)

    async def _run(self, place: _Place, program: Program, limits: Limits) -> Result:
        assert self.tier is not None
        try:
            for _ in range(2):  # a zygote that was lost is not this program's doing: once more
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

    async def _probed(self, tier: Tier) -> Slot:
        """A slot of this tier that ESCAPES could not get out of. ServiceError."""
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

    def _spec(self, tier: Tier, number: int) -> Spec:
        packages = _packages(self._preload)
        return Spec(
            tier=tier,
            preload=[*STDLIB, *self._preload],
            sys_path=[*_stdlib_path(), *dict.fromkeys(str(path.parent) for path in packages)],
            shown=[*_stdlib_files(), *map(str, packages), *_libraries()],
            uid=FIRST_UID + (os.getpid() * self.slots + number) % UIDS,
            parent=os.getpid(),
        )


class _Place:
    """Where a zygote stands, once it was needed."""

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
    """The standard library's entries, one by one: what is installed beside it, data and answers too, is not shown."""
    return [str(entry) for entry in Path(sysconfig.get_path("stdlib")).iterdir() if entry.name not in LEFT_OUT]


def _packages(names: list[str]) -> list[Path]:
    """The folders of the preloaded packages and of the libraries that their wheels bring."""
    found = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            home = Path(spec.origin)
            folder = home.parent if spec.submodule_search_locations else home
            found += [folder, *folder.parent.glob(f"{name}.libs")]
    return found


def _libraries() -> list[str]:
    """Shared libraries that extension modules load when they are imported."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"
    own = [str(path) for path in (Path(sys.base_prefix) / "lib").glob("*.so*")]
    return [f"/lib/{multiarch}", f"/usr/lib/{multiarch}", *SYSTEM, *own]
