"""Imports and warms one function, then forks a worker on request; a worker answers calls until it is killed.

A fresh interpreter runs this file by its path, so that nothing of the server (threads, locks, event loop) is forked and
nothing of it is imported. Control messages and calls are JSON lines; the server's side of both is `ngym.workers.pool`.

    control   spec -> {"ready": true} | {"error": text}
              {"fork": true} and a socket -> {"pid"};  {"bury": pid} -> {"status", "memory_bytes"}
    a worker  [deadline in CPU seconds, [arguments]] -> {"kind": "ok", "value"} | {"kind": "memory" | "crash", "detail"}
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import resource
import signal
import socket
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import orjson

PR_SET_PDEATHSIG = 1
MAX_DETAIL = 500

Function = Callable[..., Any]


class WorkerZygoteSpec(TypedDict):
    """The server's parameters. `sys_path` is the server's, `parent` its pid; `memory_bytes` is a worker's RLIMIT_AS."""

    file: str
    function: str
    warm: str | None
    memory_bytes: int
    sys_path: list[str]
    parent: int


def main() -> None:
    """Load, warm, then fork and bury on request until the server's end of the control socket closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for ignored in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # Ctrl-C reaches the whole group; the server ends us when it is done
        signal.signal(ignored, signal.SIG_IGN)
    with control.makefile("rb") as lines:
        spec: WorkerZygoteSpec = orjson.loads(lines.readline())
    _die_with(spec["parent"])
    try:
        function = _load_warm(spec)
    except BaseException as error:
        _send(control, {"error": _error_text(error)})
        raise
    gc.collect()
    gc.freeze()  # a collection in a worker would otherwise touch, and so copy, every page shared with us
    _send(control, {"ready": True})
    _serve_control(control, function, spec["memory_bytes"])


def _load_warm(spec: WorkerZygoteSpec) -> Function:
    sys.path[:] = spec["sys_path"]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # a fork copies one thread only: libraries must not have started others
    module = _load(Path(spec["file"]))
    if spec["warm"] is not None:
        getattr(module, spec["warm"])()
    function: Function = getattr(module, spec["function"])
    return function


def _load(file: Path) -> types.ModuleType:
    """The module at `file` under a private name, in a package of its folder, so that `from .sibling import x` works."""
    package = types.ModuleType("_ngym_worker")
    package.__path__ = [str(file.parent)]
    sys.modules[package.__name__] = package
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{file.stem}", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _serve_control(control: socket.socket, function: Function, memory_bytes: int) -> None:
    workers: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            break
        request = orjson.loads(message)
        if "fork" in request:
            pid = _fork(control, socket.socket(fileno=fds[0]), function, memory_bytes)
            workers.add(pid)
            _send(control, {"pid": pid})
        else:
            workers.discard(request["bury"])
            _send(control, _kill_and_reap(request["bury"]))
    for pid in workers:
        _kill_and_reap(pid)


def _fork(control: socket.socket, connection: socket.socket, function: Function, memory_bytes: int) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        _die_with(zygote)
        _work(connection, function, memory_bytes)
    connection.close()
    return pid


def _kill_and_reap(pid: int) -> dict[str, Any]:
    """End a worker and reap it: its exit code, or minus the signal that ended it (ours or an earlier one)."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), "memory_bytes": used.ru_maxrss * 1024}


def _work(connection: socket.socket, function: Function, memory_bytes: int) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        with connection.makefile("rb") as calls:
            for call in calls:
                deadline_s, arguments = orjson.loads(call)
                # The default action of SIGPROF ends the process from inside any C call, after so much CPU time:
                # a busy machine cannot turn a good answer into a timeout.
                signal.setitimer(signal.ITIMER_PROF, deadline_s)
                reply = _answer(function, arguments)
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.sendall(reply)
    finally:
        os._exit(0)


def _answer(function: Function, arguments: list[Any]) -> bytes:
    try:
        return orjson.dumps({"kind": "ok", "value": function(*arguments)}) + b"\n"
    except MemoryError:
        return orjson.dumps({"kind": "memory", "detail": "out of memory"}) + b"\n"
    except BaseException as error:  # noqa: BLE001  (SystemExit too: the caller gets an answer, whatever is raised)
        return orjson.dumps({"kind": "crash", "detail": _error_text(error)}) + b"\n"


def _error_text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:MAX_DETAIL]
    return text.encode("utf-8", "backslashreplace").decode()


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(orjson.dumps(message) + b"\n")


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however that dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()
