"""The event loop, signals and exit of a process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

import uvloop

log = logging.getLogger("ngym.runtime")
PAUSE_S = 5.0  # of an endless task, after an unexpected error
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT has ended
Result = TypeVar("Result")


@contextmanager
def signals_as_keyboard_interrupt() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt in this block, once; ignored signals stay ignored.

    After that the process is about to end (`end_after_signal`). An event loop's own handlers replace these while it runs.
    In a thread it does nothing.
    """
    received = False

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        nonlocal received
        received = True
        end_after_signal()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.getsignal(each) for each in NUMBERS if is_main}
    before = {each: handler for each, handler in before.items() if handler in _DEFAULT}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        if not received:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def calls_on_interrupt(callback: Callable[[], object]) -> Iterator[None]:
    """The running event loop calls back for each SIGINT, SIGTERM and SIGHUP in this block; ignored ones stay ignored.

    After a signal the process is about to end (`end_after_signal`); otherwise the previous handlers are restored. Those of
    `loop.add_signal_handler` would be gone after the loop closes, and the signals would kill the process.
    """
    loop = asyncio.get_running_loop()
    before = {
        number: handler for number in NUMBERS if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    received = False

    def note(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = True
        loop.call_soon_threadsafe(callback)

    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        if received:
            end_after_signal()
        else:
            for number, handler in before.items():
                signal.signal(number, handler)


def end_after_signal() -> None:
    """For a process that a signal has interrupted and that is about to end with exit code 130.

    The next SIGINT, SIGTERM or SIGHUP has no effect, and one after that ends it at once: an exception that a handler
    raises between any two lines could be reported as an error, or be lost in a finalizer. Ignored signals stay ignored.
    """
    received = 0

    def end(number: int, _: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(EXIT_INTERRUPTED)

    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def ignore_interrupts() -> None:
    """SIGINT, SIGTERM and SIGHUP have no effect from now on."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP that come in this block are handled at its end; ignored signals stay ignored.

    A signal mask would also block them in child processes that start here. In a thread, where Python runs no handlers,
    it does nothing.
    """
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: handler for number in NUMBERS if (handler := signal.getsignal(number)) is not None}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


def await_exit(process: subprocess.Popen[bytes], timeout_s: float | None = None) -> int:
    """Wait for a process and return its exit code. A signal handler that raises can interrupt it at any time.

    This avoids Popen.wait(): an exception of a handler inside it can leave its lock held, and the next wait() hangs.

    Raises:
        subprocess.TimeoutExpired: the process still runs after timeout_s seconds.
    """
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    while process.returncode is None:
        flags = os.WEXITED | os.WNOWAIT | (0 if ends is None else os.WNOHANG)
        try:
            ended = os.waitid(os.P_PID, process.pid, flags) is not None
        except ChildProcessError:  # reaped elsewhere
            ended = True
        if ended:
            with deferred_signals():
                return process.wait()
        if ends is not None and time.monotonic() > ends:
            raise subprocess.TimeoutExpired(process.args, timeout_s or 0.0)
        time.sleep(0.02)
    return process.returncode


async def run_unless_failed(failure: Awaitable[None], work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work until it is done or `failure` raises; returns the result of the work and cancels the other task.

    Args:
        failure: raises when the work can no longer succeed, and waits until then.
    """
    failing, working = asyncio.ensure_future(failure), asyncio.create_task(work)
    try:
        await asyncio.sleep(0)  # both have begun: a failure that is older than the work is known now
        if not failing.done():
            await asyncio.wait([working, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done() and not working.done():
            failing.result()
        return await working
    finally:
        for task in (working, failing):
            task.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)


async def run_endlessly(work: Callable[[], Awaitable[None]], what: str, pause_s: float = PAUSE_S) -> None:
    """Run an endless task in the background, and again after an unexpected error, which is logged with its traceback.

    An error equal to the last one is not logged again.

    Args:
        what: the task, for the log.
    """
    logged = ""
    while True:
        try:
            return await work()
        except Exception as error:  # no caller awaits the task
            if repr(error) != logged:
                log.exception("%s: an unexpected error, after which it goes on", what)
            logged = repr(error)
        await asyncio.sleep(pause_s)


def log_error(task: asyncio.Task[Any]) -> None:
    """A done-callback of a task that no caller awaits: logs its error with the traceback."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended by an unexpected error", task.get_name(), exc_info=error)


async def never_fails() -> None:
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


def exit_process(code: int) -> NoReturn:
    """End this process now, after its exit handlers.

    Python would first destroy everything that it has imported, object by object: 1.4 CPU seconds with DeepSpeed, 3 with
    vLLM. On a busy machine that is longer than a supervisor waits.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
