"""The zygote of a local sandbox: imports once, confines itself, then forks a guest for each run and watches its clocks.

A fresh interpreter runs this; nothing of the server is forked. Control messages are JSON, one reply for each request:

    spec (see SandboxZygoteSpec)                 -> {"ready": true} | {"error": text}
    run (GuestRequest) with five descriptors     -> End
    cancel, while a guest runs                   -> the guest is ended; its reply arrives as usual

A program's input and output never pass through here: the next guest is a copy of this process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, TypedDict

from ngym.sandbox import local_guest
from ngym.sandbox.confinement import die_with_parent, enter, landlock_abi, landlock_ruleset, seccomp_supported, shut

TICK_S = 0.05
CPU_CLOCK_OF = 2  # CPUCLOCK_SCHED: the clock of all threads of a process
MAX_MESSAGE = 1 << 16


class SandboxZygoteSpec(TypedDict):
    """tier: `namespaces`, `landlock` or `seccomp`. preload: modules. sys_path: their path. shown: readable paths.
    uid: the guests' user, for root. parent: the server's pid."""

    tier: str
    preload: list[str]
    sys_path: list[str]
    shown: list[str]
    uid: int
    parent: int


class End(TypedDict):
    """The end of a guest. cause: `exit` by itself; else why it was killed: `cpu`, `asleep`, `starved` (it waited for a
    processor most of the time), `threads`, `cancelled`; or `unconfined` if it never ran. status: exit code or minus
    the signal.
    """

    cause: str
    detail: str
    status: int
    cpu_s: float
    wall_s: float
    memory_bytes: int


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for ignored in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole group; the server ends us
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()
    spec: SandboxZygoteSpec = json.loads(control.recv(MAX_MESSAGE))
    if os.getppid() != spec["parent"]:
        os._exit(0)
    try:
        how, proc = _prepare(spec)
    except Exception as error:  # noqa: BLE001  (the server reports it)
        _send(control, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    _send(control, {"ready": True})
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 8)
        if not message:
            break
        if fds:  # a cancellation may arrive just after the guest has ended
            _send(control, dict(_run(json.loads(message), how, fds, control, proc)))


def _prepare(spec: SandboxZygoteSpec) -> tuple[local_guest.Confinement, int]:
    """The guests' confinement, and a descriptor of the /proc that shows this process."""
    sys.path[:] = spec["sys_path"]
    for name in spec["preload"]:
        importlib.import_module(name)
    if not seccomp_supported():
        raise OSError(f"there is no system call filter for {os.uname().machine}")
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with open("/proc/self/statm") as statm:
        base_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    tier, ruleset = spec["tier"], None
    uid = spec["uid"] if os.geteuid() == 0 and _is_there(spec["uid"]) else None
    if tier == "namespaces":
        enter(spec["shown"])
    if tier == "landlock" and not landlock_abi():
        raise OSError("this kernel has no Landlock")
    if tier != "seccomp" and landlock_abi():
        # In a separate root there is nothing to hide, and only the box is writable.
        ruleset = landlock_ruleset(spec["shown"], ["/"] if tier == "namespaces" else ["/dev/null"])
    shut()
    gc.collect()
    gc.freeze()  # a collection in a guest would touch, and so copy, every shared page
    gc.disable()
    return local_guest.Confinement(
        tier=tier,
        ruleset=ruleset,
        uid=uid,
        base_bytes=base_bytes,
        own_user=uid is not None or (tier == "namespaces" and os.geteuid() != 0),
    ), proc


def _is_there(uid: int) -> bool:
    """Whether this user namespace has this user; some containers have only root."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)


def _run(
    request: local_guest.GuestRequest, how: local_guest.Confinement, fds: list[int], control: socket.socket, proc: int
) -> End:
    began = time.monotonic()
    reader, status = os.pipe()
    pid = os.fork()
    if pid == 0:
        local_guest.run(request, how, fds, status)
    for fd in (*fds, status):
        os.close(fd)
    cause = _watch(pid, request, control, proc, began)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, ended, used = os.wait4(pid, 0)
    detail = os.read(reader, 1000)
    os.close(reader)
    if detail != b"ok" and cause == "exit":
        cause = "unconfined"
    return End(
        cause=cause,
        detail=detail.decode(errors="replace"),
        status=os.waitstatus_to_exitcode(ended),
        cpu_s=used.ru_utime + used.ru_stime,
        wall_s=time.monotonic() - began,
        memory_bytes=used.ru_maxrss * 1024,
    )


def _watch(pid: int, request: local_guest.GuestRequest, control: socket.socket, proc: int, began: float) -> str:
    """Wait until the guest ends or must be ended; returns the cause."""
    ended = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    waiting.register(control, select.POLLIN)
    try:
        wait_s = min(TICK_S, request["cpu_s"])
        while True:
            events = dict(waiting.poll(wait_s * 1000))
            if ended in events:
                return "exit"
            if control.fileno() in events:
                return "cancelled"
            used, wall = _cpu_s(pid), time.monotonic() - began
            if used >= request["cpu_s"]:
                return "cpu"
            if wall >= request["wall_s"] * local_guest.STARVED_AFTER:
                return "starved"
            if wall >= request["wall_s"] and wall - _delayed_s(proc, ended) >= request["wall_s"]:
                return "asleep"  # waiting for a processor is not the program's fault
            if _stat(proc, ended, "status", "Threads:") > request["threads"] + 1:
                return "threads"
            wait_s = max(0.001, min(TICK_S, request["cpu_s"] - used))
    finally:
        os.close(ended)


def _cpu_s(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | CPU_CLOCK_OF)
    except OSError:  # it has just ended
        return 0.0


def _delayed_s(proc: int, pidfd: int) -> float:
    """The seconds for which the guest's first thread was ready to run and had no processor."""
    fields = _read(proc, f"{_stat(proc, None, f'self/fdinfo/{pidfd}', 'Pid:')}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0


def _stat(proc: int, pidfd: int | None, file: str, field: str) -> int:
    """A number from a /proc file. /proc is the outer one, where the guest has another pid; pidfd gives it."""
    if pidfd is not None:
        file = f"{_stat(proc, None, f'self/fdinfo/{pidfd}', 'Pid:')}/{file}"
    for line in _read(proc, file).splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def _read(proc: int, file: str) -> str:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:  # it has just ended, or /proc hides it
        return ""
    try:
        return os.read(fd, 8192).decode()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode())
