"""Load balancing between replicas, and a budget for retries.

Each process uses its own view of the replicas: recent failures, and the number of its own calls in flight.
"""

from __future__ import annotations

import hashlib
import math
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOW_S = 60.0
SLICES = 12
FREE_RETRIES = 10  # per window: with few requests a share is not meaningful
REST_S = 1.0  # pause of a replica after a failure; doubled with each further one
MAX_REST_S = 30.0
TRIAL_S = 6.0  # after its pause, a replica gets one call in this time, until it has answered one
SLACK = 1.25  # a replica with more than this times the average of calls in flight gets no new conversation


@dataclass(slots=True)
class _Slice:
    started_at: float
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Bounds retries to `ratio` of the requests of the last minute, plus ten, so that they do not multiply the load."""

    def __init__(self, ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ratio = ratio
        self._clock = clock
        self._slices: deque[_Slice] = deque()
        self._ends = -math.inf  # of the last slice
        self.spent = 0
        self.refused = 0

    def record_request(self) -> None:
        self._current_slice().requests += 1

    def allow_retry(self) -> bool:
        """Whether one more retry is within the budget; if so, it is counted."""
        now = self._current_slice()
        retries = sum(one.retries for one in self._slices)
        if retries >= FREE_RETRIES + self._ratio * sum(one.requests for one in self._slices):
            self.refused += 1
            return False
        now.retries += 1
        self.spent += 1
        return True

    def _current_slice(self) -> _Slice:
        now = self._clock()
        if now > self._ends:
            self._slices.append(_Slice(now))
            self._ends = now + WINDOW_S / SLICES
        while now - self._slices[0].started_at > WINDOW_S:
            self._slices.popleft()
        return self._slices[-1]


@dataclass(slots=True)
class StickyReplica:
    """Affinity of one conversation to the replica of `key`, until that fails.

    key: equal for conversations with the same beginning, so that they hit the prefix cache of a replica.
    """

    key: str
    url: str | None = None


@dataclass(slots=True)
class SessionReplica:
    """Affinity of one session to the replica that has its state, chosen by `key`; others that join change nothing."""

    key: str
    url: str | None = None

    def replica(self, urls: Sequence[str]) -> str:
        """The session's replica; a new one if that has left."""
        if self.url is None or self.url not in urls:
            self.url = urls[0] if len(urls) == 1 else rendezvous(self.key, urls)
        return self.url


class Replicas:
    """The replicas of one service."""

    def __init__(self) -> None:
        self.in_flight: Counter[str] = Counter()
        self._paused_until: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    def random_replica(self, urls: Sequence[str]) -> str:
        """A random replica that is up."""
        return self._tried(random.choice(self._available(urls)))

    def session_id(self, urls: Sequence[str]) -> str:
        """128 random bits, drawn until their replica is one that is up: `rendezvous` is the same for every client."""
        up = self._available(urls)
        while True:
            drawn = secrets.token_hex(16)
            if (home := rendezvous(drawn, urls)) in up:
                self._tried(home)
                return drawn

    def replica_of(self, conversation: StickyReplica, urls: Sequence[str]) -> str:
        """The replica of the conversation; a new one, which it then keeps, if that is gone or failed recently."""
        up = self._available(urls)
        if conversation.url is not None and conversation.url in up:
            return self._tried(conversation.url)
        most = math.ceil(SLACK * (1 + sum(self.in_flight[url] for url in up)) / len(up))
        chosen = rendezvous(conversation.key, [url for url in up if self.in_flight[url] < most])
        conversation.url = chosen
        return self._tried(chosen)

    def record_failure(self, url: str) -> None:
        """Record that a replica could not be reached or cannot serve: it is paused for a while."""
        rest_s = min(MAX_REST_S, REST_S * 2 ** self._failures[url])
        self._failures[url] += 1
        self._paused_until[url] = time.monotonic() + rest_s

    def record_answer(self, url: str) -> None:
        self._failures.pop(url, None)
        self._paused_until.pop(url, None)

    def has_alternative(self, url: str, urls: Sequence[str]) -> bool:
        """Whether this replica failed recently and another did not."""
        now = time.monotonic()
        return self._is_paused(url, now) and not all(self._is_paused(other, now) for other in urls)

    def _available(self, urls: Sequence[str]) -> Sequence[str]:
        """The replicas that are not paused; if all are, the one whose pause ends first."""
        if not self._paused_until:
            return urls
        now = time.monotonic()
        return [url for url in urls if not self._is_paused(url, now)] or [
            min(urls, key=lambda url: self._paused_until[url])
        ]

    def _tried(self, url: str) -> str:
        """The replica of a call. After a failure, and until it has answered, the next callers take another for a while."""
        if url in self._failures:
            self._paused_until[url] = max(self._paused_until[url], time.monotonic() + TRIAL_S)
        return url

    def _is_paused(self, url: str, now: float) -> bool:
        return self._paused_until.get(url, now) > now


def rendezvous(key: str, urls: Sequence[str]) -> str:
    """The replica of a key by rendezvous hashing: the same for every client; a lost replica moves only its own keys."""
    return max(urls, key=lambda url: hashlib.blake2b(f"{key}\0{url}".encode(), digest_size=8).digest())
