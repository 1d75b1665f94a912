"""A command of ngym in a process that is forked from one that has imported PyTorch, Transformers and DeepSpeed.

These imports are half of the CPU time of a short training run. The process is otherwise as new: its own working directory,
environment, output and exit code.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

PRELOADED = (
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage_1_and_2",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "ngym.cli.train",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


class Forked:
    """`python -m ngym WORDS`, with as much of subprocess.Popen as the tests use; stdout and stderr are one text."""

    def __init__(self, words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        readable, writable = os.pipe()
        self.stdout = os.fdopen(readable, encoding="utf-8")
        self._said = ""
        arguments = (list(map(str, words)), str(folder), dict(environment), DupFdAtStart(writable))
        self._process = _context.Process(target=_main, args=arguments)
        self._process.start()
        os.close(writable)

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
        assert self._process.exitcode is not None, f"{self.pid} still runs after {timeout} s"
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has said, once it has ended. timeout: seconds to wait for its end after its output has ended."""
        if not self.stdout.closed:
            self._said = self.stdout.read()
            self.stdout.close()
        self.wait(timeout)
        return self._said, None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class DupFdAtStart:
    """A file descriptor that the new process gets as one of its own."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self._fd),)


def _detached(shared: Any) -> int:
    return int(shared.detach())


def _main(words: list[str], folder: str, environment: dict[str, str], output: int) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.argv = ["ngym", *words]
    from ngym.cli.main import main

    main()


def server_pid() -> int | None:
    """The process that forks, if it runs."""
    from multiprocessing.forkserver import _forkserver

    return _forkserver._forkserver_pid  # type: ignore[attr-defined, no-any-return]
