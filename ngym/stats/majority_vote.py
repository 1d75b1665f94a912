"""What would a vote among k rollouts of a task have earned? The most frequent answer's reward; rewards alone elect nobody."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import comb
from typing import Any, NamedTuple

import orjson

EXACT_ROLLOUTS = 16  # of a task; with more of them only the vote of all is counted


class Camp(NamedTuple):
    """The rollouts of one task that gave one answer. mean: of their rewards."""

    size: int
    mean: float


@dataclass
class Votes:
    """The scored rollouts of one task, by their answer. A rollout without an answer does not vote."""

    totals: dict[int | None, tuple[int, float]] = field(default_factory=lambda: defaultdict(lambda: (0, 0.0)))

    def add(self, answer: Any, reward: float) -> None:
        """answer: any JSON; None, or blank, is none."""
        self.add_key(answer_key(answer), reward)

    def add_key(self, key: int | None, reward: float) -> None:
        """key: of the answer, see `answer_key`."""
        count, total = self.totals[key]
        self.totals[key] = (count + 1, total + reward)

    @property
    def rollouts(self) -> int:
        return sum(count for count, _ in self.totals.values())

    def at_k(self, k: int) -> float | None:
        """The expected reward of the answer that most of k rollouts give, drawn without replacement from these.

        A tie is decided by lot, and where none of the k has an answer their mean reward counts. Exact over all draws. None:
        there are fewer than k, or so many that only the vote of all is counted.
        """
        n = self.rollouts
        if not 1 <= k <= n or (n > EXACT_ROLLOUTS and k < n):
            return None
        camps = sorted(Camp(count, total / count) for key, (count, total) in self.totals.items() if key is not None)
        count, total = self.totals.get(None, (0, 0.0))
        silent = Camp(count, total / count if count else 0.0)
        if k == n:
            return _vote_of_all(camps, silent)
        return _expected(tuple(camps), silent, k)


def answer_key(answer: Any) -> int | None:
    """What two rollouts of a task have in common that gave the same answer: 64 bits; None: no answer."""
    if answer is None:
        return None
    text = answer.strip().encode() if isinstance(answer, str) else orjson.dumps(answer, option=orjson.OPT_SORT_KEYS)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") if text else None


def _vote_of_all(camps: list[Camp], silent: Camp) -> float:
    most = max((camp.size for camp in camps), default=0)
    elected = [camp.mean for camp in camps if camp.size == most]
    return sum(elected) / len(elected) if elected else silent.mean


@lru_cache(maxsize=8192)  # tasks with few rollouts and rewards of 0 and 1 are much alike
def _expected(camps: tuple[Camp, ...], silent: Camp, k: int) -> float:
    draws = comb(silent.size + sum(camp.size for camp in camps), k)
    largest = min(k, max((camp.size for camp in camps), default=0))
    won = sum(_won_with(most, camps, silent, k) for most in range(1, largest + 1))
    return (won + comb(silent.size, k) * silent.mean) / draws


def _won_with(most: int, camps: tuple[Camp, ...], silent: Camp, k: int) -> float:
    """Over all draws of k whose winners have `most` votes each: the sum of the winners' mean rewards.

    ways[drawn, winners] = (number of draws, sum over them of the winners' rewards), camp after camp.
    """
    ways = {(drawn, 0): (comb(silent.size, drawn), 0.0) for drawn in range(min(k, silent.size) + 1)}
    for camp in camps:
        after: dict[tuple[int, int], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for (drawn, winners), (number, total) in ways.items():
            for votes in range(min(camp.size, most, k - drawn) + 1):
                wins = votes == most
                place, choices = (drawn + votes, winners + wins), comb(camp.size, votes)
                earlier_number, earlier_total = after[place]
                gained = total + number * camp.mean if wins else total
                after[place] = (earlier_number + choices * number, earlier_total + choices * gained)
        ways = after
    return sum(total / winners for (drawn, winners), (_, total) in ways.items() if drawn == k and winners)
