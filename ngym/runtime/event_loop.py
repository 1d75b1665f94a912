"""How does a process of ours run and end? On uvloop, with rare garbage collections, and with none at its end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import uvloop

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` for a collector or a service.

    Thousands of rollouts in flight are many live objects and no cycles worth finding (a rollout leaves none): with
    Python's default thresholds a third of the CPU time at 4,096 in flight went into traversing them. They are also
    thousands of sockets.
    """
    raise_file_limit()
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
    try:
        return uvloop.run(main)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def raise_file_limit() -> None:
    """Let this process have as many files and sockets open as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave(code: int) -> NoReturn:
    """End this process now, after its exit handlers.

    Python would first take apart, object by object, what it has imported: with vLLM 3 CPU seconds, which on a busy
    machine are more than a supervisor waits.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
