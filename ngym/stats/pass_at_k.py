"""Mean rewards, pass@k and their confidence intervals, from rewards alone."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, repeat
from statistics import NormalDist, fmean, stdev

SLACK = 1024  # slots for missing keys, plus MISSING for each existing one
MISSING = 4
NONE = -1
LEVEL = 0.95
RESAMPLES = 1000
FEW_VALUES = 1024
MANY = 64  # rewards of a task, from which on it keeps their sum
EXACT_TASKS = 1000  # with more tasks the bootstrap interval equals the normal one, at a thousand times the cost
_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)


class DenseInts:
    """A compact dict of ints: values are at least 0 and below 2^31. A far-away key costs as much as in a dict."""

    def __init__(self) -> None:
        self._base: int | None = None
        self._values = array("i")  # of base, base + 1, ...
        self._others: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        place = key - (self._base or 0)
        if 0 <= place < len(self._values) and self._values[place] != NONE:
            return self._values[place]
        return self._others.get(key)

    def put(self, key: int, value: int) -> None:
        self._count += self.get(key) is None
        if self._base is None:
            self._base = max(0, key - SLACK)
        place = key - self._base
        if key in self._others or not 0 <= place < MISSING * self._count + 2 * SLACK:
            self._others[key] = value
            return
        if place >= len(self._values):
            self._values.extend([NONE] * (place + 1 - len(self._values)))
        self._values[place] = value

    def items(self) -> Iterator[tuple[int, int]]:
        """By key."""
        base = self._base or 0
        near = ((base + place, value) for place, value in enumerate(self._values) if value != NONE)
        return merge(near, sorted(self._others.items()))


@dataclass(frozen=True)
class Interval:
    """The bounds of a 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class BestOfK:
    """The mean over `tasks` of the expected best reward of k rollouts, with its bootstrap interval over tasks."""

    k: int
    mean: float
    interval: Interval | None
    tasks: int


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected best reward of k rollouts drawn without replacement from these n >= k of one task.

    sum over i of r_(i) * C(i-1, k-1) / C(n, k), r sorted upwards. For rewards of 0 and 1 this is the unbiased pass@k,
    1 - C(n-c, k) / C(n, k) with c successes (arXiv 2107.03374, eq. 1). Independent of the order of the rewards.
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of rollouts ({n}), not {k}")
    ranked = sorted(rewards)
    # weight of r_(n), then of the next lower: w_(i-1) = w_(i) * (i-k) / (i-1); no large binomials
    weight, total = k / n, 0.0
    for i in range(n, k - 1, -1):
        total += weight * ranked[i - 1]
        weight *= (i - k) / (i - 1) if i > 1 else 0.0
    return total


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval | None:
    """95 % interval of the mean of these values (one per task), by resampling tasks; None for fewer than two.

    Percentile bootstrap (Efron 1979) with 1,000 resamples; above 1,000 values the normal interval, which it then
    equals.
    """
    n = len(values)
    if n < 2:
        return None
    if n > EXACT_TASKS:
        mean, half = fmean(values), _Z * stdev(values) / math.sqrt(n)
        return Interval(mean - half, mean + half)
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(values, k=n)) / n for _ in range(RESAMPLES))
    tail = (1 - LEVEL) / 2
    return Interval(means[round(tail * (RESAMPLES - 1))], means[round((1 - tail) * (RESAMPLES - 1))])


class Values:
    """A multiset of numbers: each distinct one with its count while they are few, else 8 bytes per number. Unordered."""

    def __init__(self) -> None:
        self._counts: dict[float, int] | None = {}
        self._all = array("d")

    def __len__(self) -> int:
        return len(self._all) if self._counts is None else sum(self._counts.values())

    def __iter__(self) -> Iterator[float]:
        if self._counts is None:
            return iter(self._all)
        return chain.from_iterable(repeat(value, count) for value, count in self._counts.items())

    def add(self, value: float) -> None:
        if self._counts is None:
            self._all.append(value)
            return
        number = float(value)
        self._counts[number] = self._counts.get(number, 0) + 1
        if len(self._counts) > FEW_VALUES:
            self._all = array("d", iter(self))
            self._counts = None


class Rewards:
    """Rewards by task; the running mean and its interval cost O(1) per update, a reward 16 bytes."""

    def __init__(self) -> None:
        self.values = array("d")  # in order of arrival
        self._before = array("i")  # for each: the index of the previous one of the same task
        self._last = DenseInts()  # for each task: the index of its last one
        self._long: dict[
            int, tuple[int, float]
        ] = {}  # for tasks with MANY: their number of rewards, and the sum minus the origin
        self.count = 0
        self.binary = True  # every reward is 0 or 1; the best of k is then pass@k
        self._total = 0.0
        self._origin = 0.0  # the first reward; subtracted, so that squares of values far from 0 do not lose precision
        self._sum_ss = 0.0  # over tasks: (sum of rewards)^2, (sum of rewards) * n, n^2; rewards minus the origin
        self._sum_sn = 0.0
        self._sum_nn = 0

    def add(self, task: int, reward: float) -> None:
        if not self.count:
            self._origin = reward
        last = self._last.get(task)
        n, total = self._long.get(task) or self._summed(last)
        over = reward - self._origin
        if n + 1 >= MANY:
            self._long[task] = (n + 1, total + over)
        self._last.put(task, self.count)
        self._before.append(NONE if last is None else last)
        self.values.append(reward)
        self.binary = self.binary and reward in (0.0, 1.0)
        self._sum_ss += over * (2 * total + over)
        self._sum_sn += total + over * (n + 1)
        self._sum_nn += 2 * n + 1
        self.count += 1
        self._total += reward

    @property
    def tasks(self) -> int:
        """The number of tasks that have a reward."""
        return len(self._last)

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """Each task's number, and the indices of its rewards in `values`, in order of arrival."""
        for task, last in self._last.items():
            yield task, self._places(last)

    def by_task(self) -> Iterator[tuple[int, list[float]]]:
        """Each task's number, and its rewards."""
        return ((task, [self.values[place] for place in places]) for task, places in self.groups())

    def _summed(self, last: int | None) -> tuple[int, float]:
        """The number of a task's rewards, and their sum minus the origin."""
        places = self._places(last)
        return len(places), sum(self.values[place] - self._origin for place in places)

    def _places(self, last: int | None) -> list[int]:
        places: list[int] = []
        while last is not None and last != NONE:
            places.append(last)
            last = self._before[last]
        return places[::-1]

    @property
    def mean(self) -> float | None:
        """The mean over rollouts."""
        return self._total / self.count if self.count else None

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean, with rollouts clustered by task. None for fewer than two tasks.

        Clustered standard error (arXiv 2411.00640): sqrt(m/(m-1) * sum over tasks of (sum of the task's deviations)^2)
        / N for m tasks and N rollouts, with Student's t of m - 1 degrees of freedom.
        """
        tasks = self.tasks
        if tasks < 2:
            return None
        mean = self._total / self.count
        over = mean - self._origin
        spread = max(0.0, self._sum_ss - 2 * over * self._sum_sn + over * over * self._sum_nn)
        half = student_t(tasks - 1) * math.sqrt(tasks / (tasks - 1) * spread) / self.count
        low, high = mean - half, mean + half
        return Interval(max(0.0, low), min(1.0, high)) if self.binary else Interval(low, high)

    def best_of(self) -> list[BestOfK]:
        """The expected best of k for each displayed k, over the tasks that have k scored rollouts."""
        most = max((len(places) for _, places in self.groups()), default=0)
        found = []
        for k in spread_of_k(most):
            values = array("d", (best_at_k(rewards, k) for _, rewards in self.by_task() if len(rewards) >= k))
            found.append(BestOfK(k, fmean(values), bootstrap(values), len(values)))
        return found


def student_t(freedom: int) -> float:
    """The 97.5 % point of Student's t; within 0.2 % from 3 degrees of freedom on (Cornish-Fisher), exact for 1 and 2."""
    if freedom == 1:
        return math.tan(math.pi * LEVEL / 2)
    if freedom == 2:
        return LEVEL * math.sqrt(2 / (1 - LEVEL**2))
    z, z2 = _Z, _Z * _Z
    terms = (
        (z2 + 1) / 4,
        ((5 * z2 + 16) * z2 + 3) / 96,
        (((3 * z2 + 19) * z2 + 17) * z2 - 15) / 384,
        ((((79 * z2 + 776) * z2 + 1482) * z2 - 1920) * z2 - 945) / 92160,
    )
    return z * (1 + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1)))


def spread_of_k(rollouts: int) -> list[int]:
    """The displayed k for this many rollouts per task: powers of two, and the number itself."""
    if rollouts < 1:
        return []
    return sorted({1 << i for i in range(rollouts.bit_length())} | {rollouts})
