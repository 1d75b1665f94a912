"""May this be tried again? Retries are a share of what was asked of late: a service in trouble is not asked many times as often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0
SLICES = 12
FREE_RETRIES = 10  # in each window: with few requests a share says nothing


@dataclass
class _Slice:
    began: float
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Retries are at most `ratio` of the requests of the last minute, and ten: a server that is down is not asked five times as often."""

    def __init__(self, ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ratio = ratio
        self._clock = clock
        self._slices: deque[_Slice] = deque()
        self.spent = 0
        self.refused = 0

    def request(self) -> None:
        self._now().requests += 1

    def retry(self) -> bool:
        """Whether one more retry is within the budget; if so it is counted."""
        now = self._now()
        retries = sum(one.retries for one in self._slices)
        if retries >= FREE_RETRIES + self._ratio * sum(one.requests for one in self._slices):
            self.refused += 1
            return False
        now.retries += 1
        self.spent += 1
        return True

    def _now(self) -> _Slice:
        now = self._clock()
        while self._slices and now - self._slices[0].began > WINDOW_S:
            self._slices.popleft()
        if not self._slices or now - self._slices[-1].began > WINDOW_S / SLICES:
            self._slices.append(_Slice(now))
        return self._slices[-1]
