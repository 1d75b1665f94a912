"""The event loop of a process: uvloop, rare garbage collections, racing tasks, and an exit without tear-down."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Awaitable, Coroutine
from typing import Any, NoReturn, TypeVar

import uvloop

Result = TypeVar("Result")


async def unless(failure: Awaitable[None], work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns; both are over then.

    Args:
        failure: raises when the work has become hopeless; as long as that is not known, it waits.
    """
    working, failing = asyncio.create_task(work), asyncio.ensure_future(failure)
    try:
        await asyncio.wait([working, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done() and not working.done():
            failing.result()
        return await working
    finally:
        for task in (working, failing):
            task.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)


async def never() -> None:
    """A failure that does not come."""
    await asyncio.Event().wait()


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
