"""Which replica of a service is asked? One that is up, and for one conversation the same; no replica gets much more than the others.

What one process knows of the replicas that it calls: who failed of late, and how many of its own calls each has in flight.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REST_S = 1.0  # after a failure; twice as long after each further one
LONGEST_REST_S = 30.0
SLACK = 1.25  # times the average of calls in flight: what a replica may have before a new conversation goes elsewhere


@dataclass(slots=True)
class Sticky:
    """Where one conversation goes: to the replica that `key` leads to, and to no other unless that fails.

    key: the same for conversations that begin alike, so that a replica's prefix cache knows them.
    """

    key: str
    url: str | None = None


class Replicas:
    """Those of one service."""

    def __init__(self) -> None:
        self.in_flight: Counter[str] = Counter()
        self._rests_until: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    def any(self, urls: Sequence[str]) -> str:
        """One that is up, at random."""
        return random.choice(self._up(urls))

    def of(self, conversation: Sticky, urls: Sequence[str]) -> str:
        """The conversation's own; another, and from then on that one, where it is gone or failed of late."""
        up = self._up(urls)
        if conversation.url is not None and conversation.url in up:
            return conversation.url
        most = math.ceil(SLACK * (1 + sum(self.in_flight[url] for url in up)) / len(up))
        chosen = rendezvous(conversation.key, [url for url in up if self.in_flight[url] < most])
        conversation.url = chosen
        return chosen

    def failed(self, url: str) -> None:
        """It could not be reached, or said that it cannot serve: it is left alone for a while."""
        rest_s = min(LONGEST_REST_S, REST_S * 2 ** self._failures[url])
        self._failures[url] += 1
        self._rests_until[url] = time.monotonic() + rest_s

    def answered(self, url: str) -> None:
        self._failures.pop(url, None)
        self._rests_until.pop(url, None)

    def has_stand_in(self, url: str, urls: Sequence[str]) -> bool:
        """Whether this one failed of late and another did not."""
        now = time.monotonic()
        return self._rests(url, now) and not all(self._rests(other, now) for other in urls)

    def _up(self, urls: Sequence[str]) -> Sequence[str]:
        """Those that do not rest; where all do, the one that is over with it first: somebody has to be asked."""
        if not self._rests_until:
            return urls
        now = time.monotonic()
        return [url for url in urls if not self._rests(url, now)] or [min(urls, key=lambda url: self._rests_until[url])]

    def _rests(self, url: str, now: float) -> bool:
        return self._rests_until.get(url, now) > now


def rendezvous(key: str, urls: Sequence[str]) -> str:
    """The replica of a key: every client computes the same, and a lost replica moves only its own keys."""
    return max(urls, key=lambda url: hashlib.blake2b(f"{key}\0{url}".encode(), digest_size=8).digest())
