"""The event loop of a process: uvloop with rare garbage collections, racing tasks, and an exit without tear-down."""

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
    """Run the work until it is done or `failure` raises; returns the result of the work and cancels the other task.

    Args:
        failure: raises when the work can no longer succeed, and waits until then.
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
    """A failure that never happens."""
    await asyncio.Event().wait()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` for a collector or a service.

    Thousands of rollouts in flight are many live objects without cycles: with Python's default thresholds, a third of
    the CPU time at 4,096 in flight went into traversing them. They also need thousands of sockets.
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
    """Raise the soft limit of open files and sockets to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave(code: int) -> NoReturn:
    """End this process now, after its exit handlers.

    Python would first destroy everything that it has imported, object by object: 3 CPU seconds with vLLM, which on a
    busy machine is longer than a supervisor waits.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
