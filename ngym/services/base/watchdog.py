"""Does something block the event loop? Each stall over 0.1 s is counted, and logged with what was running.

The loop sets a mark every 50 ms; a thread looks whether it does, and where it stands if not.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NamedTuple, Self

from prometheus_client import CollectorRegistry, Counter

log = logging.getLogger("ngym.services")

MARKS_S = 0.05
STALL_S = 0.1
SAYS_EVERY_S = 1.0  # on a machine that is overloaded there are many: the rest are only counted
FRAMES = 12


class Stall(NamedTuple):
    """How long the loop stood still, what it computed meanwhile, and where it was seen: "" if it was over before that.

    A stall in which next to nothing was computed is a call that waits, or a machine that has too much to do.
    """

    seconds: float
    cpu_s: float
    where: str


class Watchdog:
    """`with Watchdog(registry):` watches the running loop.

    Attributes:
        longest: the stall in which most was computed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.longest = Stall(0.0, 0.0, "")
        self._count = Counter("ngym_loop_stalls", "Times that the event loop stood still for 0.1 s", registry=registry)
        self._total = Counter("ngym_loop_stalled_seconds", "Time that it stood still so", registry=registry)
        self._over = threading.Event()
        self._where = ""
        self._said = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._mark, self._cpu = time.monotonic(), time.thread_time()
        self._timer = self._loop.call_later(MARKS_S, self._set_mark)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._over.set()
        self._thread.join()

    def _set_mark(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        late_s = now - self._mark - MARKS_S
        if late_s > STALL_S:
            self._tell(Stall(late_s, cpu - self._cpu, self._where), now)
        self._where = ""
        self._mark, self._cpu = now, cpu
        self._timer = self._loop.call_later(MARKS_S, self._set_mark)

    def _tell(self, stall: Stall, now: float) -> None:
        self._count.inc()
        self._total.inc(stall.seconds)
        self.longest = max(self.longest, stall, key=lambda one: one.cpu_s)
        if now - self._said >= SAYS_EVERY_S:
            self._said = now
            told = "the event loop stood still for %.2f s, of which it computed %.2f s, in:\n%s"
            log.warning(told, stall.seconds, stall.cpu_s, stall.where or "it was over before one could look")

    def _watch(self) -> None:
        while not self._over.wait(MARKS_S):
            if not self._where and time.monotonic() - self._mark > MARKS_S + STALL_S:
                frame = sys._current_frames().get(self._watched)
                self._where = "".join(traceback.format_stack(frame, limit=None)[-FRAMES:]).rstrip()
