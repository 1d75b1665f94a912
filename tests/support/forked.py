"""Processes forked from a process that has already imported the libraries they need.

The imports of PyTorch, Transformers and DeepSpeed are half of the CPU time of a short training run, and those of vLLM
are most of the time until a model server is ready. A forked process is otherwise as new: its own working directory,
environment, output and exit code.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkProcess, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock

from paths import SUPPORT

from ngym.supervise import service_zygote
from ngym.supervise.zygote_client import ZygoteClient

TRAINER = forkserver.ForkServer()
TRAINER.set_forkserver_preload(["trainer_imported"])
MODEL_SERVER = forkserver.ForkServer()
MODEL_SERVER.set_forkserver_preload(["vllm_imported"])
_starting = Lock()


class Forked:
    """A function in a forked process, with as much of subprocess.Popen as the tests use.

    output: the file descriptor of its stdout and stderr. Arguments: plain data, and FdAtStart.
    """

    def __init__(
        self,
        server: forkserver.ForkServer,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        folder: Path,
        environment: Mapping[str, str],
        output: int,
    ) -> None:
        call = (function, arguments, str(folder), dict(environment), FdAtStart(output))
        self._process = ForkServerProcess(target=_as_new, args=call)
        # multiprocessing has one such server for all its processes; here are two, with other imports.
        with (
            _starting,
            # For the server; the process gets its environment later.
            mock.patch.dict(os.environ, PYTHONPATH=str(SUPPORT)),
            mock.patch.object(popen_forkserver.forkserver, "connect_to_new_process", server.connect_to_new_process),
        ):
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class ForkedCommand(Forked):
    """`python -m ngym WORDS`, or `python WORDS` where the first is a file; stdout and stderr are one text.

    vllm: it has imported vLLM, and so have the model servers that it starts; PyTorch too, but not DeepSpeed.
    """

    def __init__(self, words: list[str], folder: Path, environment: Mapping[str, str], *, vllm: bool = False) -> None:
        readable, writable = os.pipe()
        self.stdout = os.fdopen(readable, encoding="utf-8")
        self._output = ""
        server = MODEL_SERVER if vllm else TRAINER
        super().__init__(server, _command, (list(map(str, words)), vllm), folder, environment, writable)
        os.close(writable)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """The output, after its end. timeout: seconds to wait for its end after its output has ended."""
        if not self.stdout.closed:
            self._output = self.stdout.read()
            self.stdout.close()
        self.wait(timeout)
        return self._output, None


class FdAtStart:
    """A file descriptor that the new process gets as one of its own."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (DupFd(self._fd),)


def _detach(shared: Any) -> int:
    return int(shared.detach())


def _as_new(
    function: Callable[..., None], arguments: tuple[Any, ...], folder: str, environment: dict[str, str], output: int
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _as_at_start()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    function(*arguments)


def _as_at_start() -> None:
    """Signals and exit handlers as in a new Python."""
    if sys.version_info >= (3, 13):  # multiprocessing clears the exit handlers, and weakref would not add its own again
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class _ForkedZygote(Forked):
    """The process from which a command forks its services (ngym.supervise.service_zygote), forked from the command."""

    def __init__(self, control: socket.socket) -> None:
        self._process = ForkProcess(target=_zygote, args=(control.fileno(),))  # type: ignore[assignment]
        self._process.start()

    @classmethod
    def launcher(cls) -> ZygoteClient:
        """ZygoteClient.start, without a new Python."""
        ours, child_socket = socket.socketpair()
        with child_socket:
            return ZygoteClient(cls(child_socket), ours)  # type: ignore[arg-type]


def _zygote(control: int) -> None:
    os.setsid()
    os.dup2(control, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _as_at_start()
    sys.argv = ["zygote", "3"]
    service_zygote.main()


def _command(words: list[str], forks_zygote: bool) -> None:
    if forks_zygote:
        ZygoteClient.start = _ForkedZygote.launcher  # type: ignore[method-assign]
    if words[0].endswith(".py"):
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = ["ngym", *words]
    from ngym.cli.shell.main import main

    main()


def server_pids() -> set[int | None]:
    """The processes that fork, of those that run."""
    return {server._forkserver_pid for server in (TRAINER, MODEL_SERVER)}  # type: ignore[attr-defined]
