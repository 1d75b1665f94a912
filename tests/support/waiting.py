"""Waiting for conditions on slow, busy machines, and reserved ports."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

PATIENCE_S = 120.0  # what has not come by then does not come


def wait_until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Return when the condition holds; AssertionError when it never does."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {patience_s:.0f} s"
        time.sleep(0.02)


async def until(condition: Callable[[], object]) -> None:
    """`wait_until` for a test whose event loop has to continue."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not so within {PATIENCE_S:.0f} s"
        await asyncio.sleep(0.02)


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended. One that has ended stays a zombie until it is reaped, which orphans may never be."""
    return [process for process in processes if not _has_ended(process)]


def descendants(process: psutil.Process, such_that: Callable[[psutil.Process], object]) -> list[psutil.Process]:
    """Those of its descendants for which it holds. One that ends while it is looked at is not one of them."""
    found = []
    for each in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if such_that(each):
                found.append(each)
    return found


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 where no one listens. No program gets it by chance; one that asks for it by number may listen.

    That program has to set SO_REUSEADDR, as servers do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
