"""When may a signal's handler run? Not between a process's start and the moment from which somebody would end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt in this block, as SIGINT does; those that are ignored stay so.

    An event loop's own handlers take their place while it runs. In a thread it does nothing.
    """

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [each for each in NUMBERS[1:] if is_main and signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def put_off() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP that come in this block are handled at its end; those that are ignored stay so.

    Blocked, as by a signal mask, they would be blocked in a process that is started here as well. In a thread, where
    Python runs no handlers, it does nothing.
    """
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

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
        for each in came:
            signal.raise_signal(each)
