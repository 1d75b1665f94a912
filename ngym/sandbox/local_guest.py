"""The process of one program: receives its files and limits, permanently drops all other rights, and runs the source.

The program can read this process's memory, so secrets must never be sent here.
"""

from __future__ import annotations

import gc
import linecache
import os
import resource
import sys
import traceback
import types
from fcntl import F_DUPFD, fcntl
from typing import NoReturn, TypedDict

from ngym.sandbox.confinement import (
    BOX,
    become,
    die_with_parent,
    enforce_landlock,
    enforce_seccomp,
    own_box,
    seccomp_program,
)

MEMORY_EXIT = 86  # the interpreter ran out of memory
STACK_BYTES = 64 << 20
STARVED_AFTER = 5  # times the wall-clock limit, after which a run without processor time is ended
STATUS_FD, RULES_FD = 4, 5  # after 0, 1, 2 and, for the answer, 3; both are closed before the program begins


class GuestRequest(TypedDict):
    """The server's request. sizes: of the source and then of each file, in the first descriptor's order."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    threads: int
    files: int
    disk_mib: int
    names: list[str]
    sizes: list[int]


class Confinement(TypedDict):
    """The confinement of this zygote. ruleset: of Landlock, or None; uid: the guest's user; base_bytes: what the zygote
    maps.
    """

    tier: str
    ruleset: int | None
    uid: int | None
    base_bytes: int
    own_user: bool


def run(request: GuestRequest, how: Confinement, fds: list[int], status: int) -> NoReturn:
    """Run a program; never returns.

    Args:
        fds: source and files, stdin, stdout, stderr, answer.
        status: receives `ok` when the program is about to begin, else the reason why it cannot.
    """
    rules = status if how["ruleset"] is None else how["ruleset"]
    _move_descriptors([*fds[1:], status, rules, fds[0]])
    try:
        source = _confine(request, how, RULES_FD + 1)
    except BaseException as error:  # noqa: BLE001  (any error is reported to the server)
        os.write(STATUS_FD, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(STATUS_FD, b"ok")
    os.closerange(STATUS_FD, RULES_FD + 2)
    _run(source)


def _move_descriptors(fds: list[int]) -> None:
    """Make these the descriptors 0, 1, 2, ..., and close all others."""
    # First move them out of the way: one may have the target number of another.
    away = [fcntl(fd, F_DUPFD, len(fds)) for fd in fds]
    for number, fd in enumerate(away):
        os.dup2(fd, number)
    os.closerange(len(fds), os.sysconf("SC_OPEN_MAX"))


def _confine(request: GuestRequest, how: Confinement, program: int) -> bytes:
    """Drop all rights; returns the source."""
    os.setsid()
    die_with_parent()
    source, *contents = _parts(program, request["sizes"])
    if request["disk_mib"] or request["names"]:
        if how["tier"] != "namespaces":
            raise RuntimeError(f"files need the tier 'namespaces', and this one is {how['tier']!r}")
        own_box(request["disk_mib"] + (sum(request["sizes"]) >> 20) + 1)
        _write(request["names"], contents)
    _limit(request, how)
    become(how["uid"])
    if how["ruleset"] is not None:
        enforce_landlock(RULES_FD)
    enforce_seccomp(seccomp_program(os.getpid(), paths=how["tier"] != "seccomp"))
    return source


def _parts(fd: int, sizes: list[int]) -> list[bytes]:
    parts, at = [], 0
    for size in sizes:
        parts.append(os.pread(fd, size, at))
        at += size
    return parts


def _write(names: list[str], contents: list[bytes]) -> None:
    for name, content in zip(names, contents, strict=True):
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "xb") as file:
            file.write(content)
    sys.path.insert(0, BOX)


def _limit(request: GuestRequest, how: Confinement) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(request["cpu_s"]) + 2,  # a backstop: the zygote checks the CPU clock
        resource.RLIMIT_FSIZE: request["disk_mib"] << 20,
        resource.RLIMIT_NOFILE: request["files"],
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_AS: how["base_bytes"] + request["memory_bytes"],
    }
    if how["own_user"]:  # else the limit would count other processes of the user; the zygote counts the threads
        limits[resource.RLIMIT_NPROC] = request["threads"] + 4
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _run(source: bytes) -> NoReturn:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (they live as long as the process)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv = ["main.py"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = 0
    gc.enable()
    try:
        exec(compile(source, "main.py", "exec"), main.__dict__)  # noqa: S102  (what this process is for)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except MemoryError:
        code = MEMORY_EXIT
    except BaseException as error:  # noqa: BLE001  (shown to the caller, as an interpreter would)
        code = 1
        _show(error, source)
    try:
        sys.stdout.flush()
    finally:
        os._exit(code & 255)


def _show(error: BaseException, source: bytes) -> None:
    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache["main.py"] = (len(source), None, lines, "main.py")
    try:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # noqa: BLE001  (an exception of the program's own making may not let itself be shown)
        os.write(2, type(error).__name__.encode(errors="replace") + b"\n")
