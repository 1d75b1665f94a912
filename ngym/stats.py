"""Statistics of scored rollouts: means with confidence intervals, pass@k, majority votes, reward components, and the
difficulty of tasks.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from heapq import merge
from itertools import chain, repeat
from statistics import NormalDist, StatisticsError, fmean, stdev
from statistics import correlation as pearson
from typing import Any, Literal, NamedTuple

import orjson

from ngym.schema import Json, agent_name, trace_of, value_of

SLACK = 1024  # slots for missing keys, plus MISSING for each existing one
MISSING = 4
NONE = -1
ROUNDING = 1e-6  # relative to the largest reward; float32 rounds at 6e-8
LEVEL = 0.95
RESAMPLES = 1000
FEW_VALUES = 1024
MANY = 64  # rewards of a task, from which on it keeps their sum
EXACT_TASKS = 1000  # with more tasks the bootstrap interval equals the normal one, at a thousand times the cost
_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
EXACT_ROLLOUTS = 16  # of a task; with more, only the vote of all rollouts is computed
ANSWER = "extracted_answer"  # the field with the answer that a verifier extracted; null: no answer
MAX_VALUES = 100  # of a field that defines subsets; further values are combined
OTHER = "(other)"


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


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal up to rounding, so that their comparison has no learning signal."""
    return max(rewards) - min(rewards) <= ROUNDING * max(map(abs, rewards))


def reaches(reward: float, threshold: float) -> bool:
    """Whether a reward is at least the threshold, up to rounding: the sum of six sixths is below 1."""
    return reward >= threshold - ROUNDING * abs(threshold)


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
    return min(max(total, ranked[k - 1]), ranked[-1])  # within the possible values in spite of rounding


def bootstrap(values: Sequence[float], seed: int = 0, *, binary: bool = False) -> Interval | None:
    """95 % interval of the mean of these values (one per task), by resampling tasks; None for fewer than two.

    Percentile bootstrap (Efron 1979) with 1,000 resamples; above 1,000 values the normal interval, which it then
    equals. For equal values that are means of 0 and 1 (`binary`) `interval_of_equal`, for others None.
    """
    n = len(values)
    if n < 2:
        return None
    if min(values) == max(values):
        return interval_of_equal(values[0], n) if binary else None
    if n > EXACT_TASKS:
        mean, half = fmean(values), _Z * stdev(values) / math.sqrt(n)
        return Interval(mean - half, mean + half)
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(values, k=n)) / n for _ in range(RESAMPLES))
    tail = (1 - LEVEL) / 2
    return Interval(means[round(tail * (RESAMPLES - 1))], means[round((1 - tail) * (RESAMPLES - 1))])


def interval_of_equal(value: float, tasks: int) -> Interval | None:
    """95 % interval of a success rate that is the same for all tasks: they show no variance to estimate it from.

    Clopper-Pearson for all tasks solved (value 1), or none (0): (alpha / 2)^(1 / tasks) from there. None in between.
    """
    width = 1 - ((1 - LEVEL) / 2) ** (1 / tasks)
    return Interval(0.0, width) if value == 0 else Interval(1 - width, 1.0) if value == 1 else None


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
        counts, number = self._counts, float(value)
        counts[number] = counts.get(number, 0) + 1
        if len(counts) > FEW_VALUES:
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
        n, total = self._long.get(task) or self._sum_and_count(last)
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

    def has(self, task: int) -> bool:
        """Whether this task has a reward."""
        return self._last.get(task) is not None

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """Each task's number, and the indices of its rewards in `values`, in order of arrival."""
        for task, last in self._last.items():
            yield task, self._places(last)

    def by_task(self) -> Iterator[tuple[int, list[float]]]:
        """Each task's number, and its rewards."""
        return ((task, [self.values[place] for place in places]) for task, places in self.groups())

    def _sum_and_count(self, last: int | None) -> tuple[int, float]:
        """The number of a task's rewards, and their sum minus the origin."""
        if last is None:
            return 0, 0.0
        places, values, origin = self._places(last), self.values, self._origin
        return len(places), sum([values[place] - origin for place in places])

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
        / N for m tasks and N rollouts, with Student's t of m - 1 degrees of freedom. If the tasks do not differ,
        `interval_of_equal` for rewards of 0 and 1, else None.
        """
        tasks = self.tasks
        if tasks < 2:
            return None
        mean = self._total / self.count
        over = mean - self._origin
        spread = max(0.0, self._sum_ss - 2 * over * self._sum_sn + over * over * self._sum_nn)
        if spread == 0:
            return interval_of_equal(mean, tasks) if self.binary else None
        half = student_t(tasks - 1) * math.sqrt(tasks / (tasks - 1) * spread) / self.count
        low, high = mean - half, mean + half
        return Interval(max(0.0, low), min(1.0, high)) if self.binary else Interval(low, high)

    def best_of(self) -> list[BestOfK]:
        """The expected best of k for each displayed k, over the tasks that have k scored rollouts."""
        most = max((len(places) for _, places in self.groups()), default=0)
        results = []
        for k in displayed_ks(most):
            values = array("d", (best_at_k(rewards, k) for _, rewards in self.by_task() if len(rewards) >= k))
            results.append(BestOfK(k, fmean(values), bootstrap(values, binary=self.binary), len(values)))
        return results


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


def displayed_ks(rollouts: int) -> list[int]:
    """The displayed k for this many rollouts per task: powers of two, and the number itself."""
    if rollouts < 1:
        return []
    return sorted({1 << i for i in range(rollouts.bit_length())} | {rollouts})


class AnswerGroup(NamedTuple):
    """The rollouts of one task with the same answer. mean: of their rewards."""

    size: int
    mean: float


@dataclass
class Votes:
    """The scored rollouts of one task, by answer. Rollouts without an answer do not vote."""

    totals: dict[int | None, tuple[int, float]] = field(default_factory=lambda: defaultdict(lambda: (0, 0.0)))

    def add(self, answer: Any, reward: float) -> None:
        """answer: any JSON; None or blank text is not an answer."""
        self.add_key(answer_key(answer), reward)

    def add_key(self, key: int | None, reward: float) -> None:
        """key: the answer's `answer_key`."""
        count, total = self.totals[key]
        self.totals[key] = (count + 1, total + reward)

    @property
    def rollouts(self) -> int:
        return sum(count for count, _ in self.totals.values())

    def at_k(self, k: int) -> float | None:
        """The expected reward of the majority answer of k rollouts, drawn without replacement from these.

        Ties are broken at random. If none of the k has an answer, their mean reward counts. Exact over all draws. None
        if there are fewer than k, or so many that only the vote of all is computed.
        """
        n = self.rollouts
        if not 1 <= k <= n or (n > EXACT_ROLLOUTS and k < n):
            return None
        camps = sorted(
            AnswerGroup(count, total / count) for key, (count, total) in self.totals.items() if key is not None
        )
        count, total = self.totals.get(None, (0, 0.0))
        silent = AnswerGroup(count, total / count if count else 0.0)
        if k == n:
            most = max((camp.size for camp in camps), default=0)
            elected = [camp.mean for camp in camps if camp.size == most]
            return sum(elected) / len(elected) if elected else silent.mean
        return _expected_reward(tuple(camps), silent, k)


def answer_key(answer: Any) -> int | None:
    """A 64-bit digest that equal answers share; None: no answer."""
    if answer is None:
        return None
    text = answer.strip().encode() if isinstance(answer, str) else orjson.dumps(answer, option=orjson.OPT_SORT_KEYS)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") if text else None


@lru_cache(maxsize=8192)  # tasks with few rollouts and 0/1 rewards often repeat
def _expected_reward(camps: tuple[AnswerGroup, ...], silent: AnswerGroup, k: int) -> float:
    draws = math.comb(silent.size + sum(camp.size for camp in camps), k)
    largest = min(k, max((camp.size for camp in camps), default=0))
    rewards = sum(_winner_rewards(most, camps, silent, k) for most in range(1, largest + 1))
    return (rewards + math.comb(silent.size, k) * silent.mean) / draws


def _winner_rewards(most: int, camps: tuple[AnswerGroup, ...], silent: AnswerGroup, k: int) -> float:
    """The sum of the winners' mean rewards, over all draws of k whose winners have `most` votes each.

    ways[drawn, winners] = (number of draws, sum over them of the winners' rewards), camp after camp.
    """
    ways = {(sampled, 0): (math.comb(silent.size, sampled), 0.0) for sampled in range(min(k, silent.size) + 1)}
    for camp in camps:
        after: dict[tuple[int, int], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for (sampled, winners), (number, total) in ways.items():
            for votes in range(min(camp.size, most, k - sampled) + 1):
                wins = votes == most
                place, choices = (sampled + votes, winners + wins), math.comb(camp.size, votes)
                earlier_number, earlier_total = after[place]
                gained = total + number * camp.mean if wins else total
                after[place] = (earlier_number + choices * number, earlier_total + choices * gained)
        ways = after
    return sum(total / winners for (sampled, winners), (_, total) in ways.items() if sampled == k and winners)


NO_ANSWER, NO_FIELD = 0, 1  # stand for an answer's key


@dataclass
class Scores:
    """Accumulates scored rollouts."""

    rewards: Rewards = field(default_factory=Rewards)
    rollouts: int = 0
    _answers: array[int] = field(default_factory=lambda: array("Q"))  # a key, NO_ANSWER or NO_FIELD for each reward
    unscored_of: Counter[int] = field(default_factory=Counter)  # for tasks that have any

    @property
    def tasks(self) -> int:
        """The number of tasks, also of those without a reward."""
        return self.rewards.tasks + sum(not self.rewards.has(task) for task in self.unscored_of)

    @property
    def unscored(self) -> int:
        """The number of null rewards, which are in no mean."""
        return self.rollouts - self.rewards.count

    @property
    def unscored_share(self) -> float:
        """The unscored share of all rollouts, 0 to 1; shown with each mean, which excludes them."""
        return self.unscored / self.rollouts if self.rollouts else 0.0

    def add(self, task: int, row: Json) -> None:
        """row: a verifier's answer."""
        self.rollouts += 1
        reward = row.get("reward")
        if reward is None:
            self.unscored_of[task] += 1
            return
        self.rewards.add(task, reward)
        if ANSWER in row:
            key = answer_key(row[ANSWER])
            self._answers.extend(repeat(NO_FIELD, self.rewards.count - 1 - len(self._answers)))
            self._answers.append(NO_ANSWER if key is None else max(key, NO_FIELD + 1))

    def best_name(self, item: BestOfK) -> str:
        """`pass@k` if rewards are 0 and 1, else `best@k`: the same formula."""
        return f"{'pass' if self.rewards.binary else 'best'}@{item.k}"

    def majority(self) -> list[BestOfK]:
        """The mean over tasks of the expected reward of the majority answer of k rollouts. Empty without answers."""
        most = max((len(self._voters(places)) for _, places in self.rewards.groups()), default=0)
        at_k = {k: array("d") for k in displayed_ks(most) if k > 1}
        for _, places in self.rewards.groups() if at_k else ():
            votes = self._votes(places)
            for k, values in at_k.items():
                if (value := votes.at_k(k)) is not None:
                    values.append(value)
        binary = self.rewards.binary
        return [
            BestOfK(k, fmean(values), bootstrap(values, binary=binary), len(values))
            for k, values in at_k.items()
            if values
        ]

    def _voters(self, places: Sequence[int]) -> list[int]:
        return [place for place in places if place < len(self._answers) and self._answers[place] != NO_FIELD]

    def _votes(self, places: Sequence[int]) -> Votes:
        """The votes of one task. places: the indices of its rewards."""
        votes = Votes()
        for place in self._voters(places):
            key = self._answers[place]
            votes.add_key(None if key == NO_ANSWER else key, self.rewards.values[place])
        return votes

    def named_scores(self) -> list[tuple[str, BestOfK]]:
        """`pass@k` or `best@k`, then `majority@k`."""
        best = [(self.best_name(item), item) for item in self.rewards.best_of()]
        return best + [(f"majority@{item.k}", item) for item in self.majority()]

    def metrics(self) -> dict[str, float]:
        """The metrics by name, such as `majority@8/reward`. `unscored/reward` is the unscored share."""
        mean = self.rewards.mean
        own = {} if mean is None else {"mean/reward": mean}
        own["unscored/reward"] = self.unscored_share
        return own | {f"{name}/reward": item.mean for name, item in self.named_scores()}


class Subsets:
    """Scores by the value of a field of the rows. name: of the field, such as `level`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scores: dict[str, Scores] = {}

    def add(self, task: int, row: Json) -> None:
        value = value_of(row, self.name)
        if value not in self.scores and len(self.scores) >= MAX_VALUES:
            value = OTHER
        self.scores.setdefault(value, Scores()).add(task, row)

    def metrics(self) -> dict[str, float]:
        """Metrics named `easy/pass@4/reward`, as in NeMo Gym."""
        by_value = ((value, scores.metrics()) for value, scores in sorted(self.scores.items()))
        return {f"{value}/{name}": number for value, metrics in by_value for name, number in metrics.items()}


def parts_of(row: Json) -> Iterator[tuple[str, float]]:
    """The known components of a row's reward: ("reward_components/format", 0.2)."""
    parts = row.get("reward_components") or trace_of(row).get("reward_components")
    if not parts:
        return iter(())
    return ((f"reward_components/{name}", value) for name, value in parts.items() if value is not None)


def means_by(rows: Iterable[Json], name: str, value: str = "reward") -> dict[str, float]:
    """For `compute_metrics`: the mean of a number for each value of a field, as `{"long/mean/reward": 0.5, ...}`."""
    rewards_by_key: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if isinstance(row.get(value), int | float):
            rewards_by_key[value_of(row, name)].append(row[value])
    return {f"{key}/mean/{value}": fmean(values) for key, values in sorted(rewards_by_key.items())}


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's correlation; None if one of the two does not vary."""
    try:
        return pearson(xs, ys)
    except StatisticsError:
        return None


def label_scores(
    rows: Iterable[Json], expected: str = "expected_answer", predicted: str = "extracted_answer"
) -> dict[str, float]:
    """For `compute_metrics` of a classification: precision, recall and F1 of each expected label and their means.

    A rollout without an answer counts as a missed one. A label that was never predicted has the precision 0.

    Returns:
        `{"recall/yes": 0.5, ..., "macro/precision": ..., "macro/recall": ..., "macro/f1": ...}`.
    """
    pairs = [(value_of(row, expected), value_of(row, predicted)) for row in rows]
    truths, predictions = Counter(truth for truth, _ in pairs), Counter(answer for _, answer in pairs)
    hits = Counter(truth for truth, answer in pairs if truth == answer)
    scores: dict[str, float] = {}
    for label, count in sorted(truths.items()):
        scores[f"precision/{label}"] = hits[label] / max(1, predictions[label])
        scores[f"recall/{label}"] = hits[label] / count
        scores[f"f1/{label}"] = 2 * hits[label] / (count + predictions[label])
    for name in ("precision", "recall", "f1") if pairs else ():
        scores[f"macro/{name}"] = fmean(value for key, value in scores.items() if key.startswith(f"{name}/"))
    return scores


TaskOutcome = Literal["always", "never", "mixed", "unscored"]
"""always, never: all rewards reach the solved threshold, or none does; a group may still have different rewards."""


@dataclass
class Task:
    """The rollouts of one task of one agent. rewards: of the scored ones. subset: the value of the requested field."""

    agent: str
    task_id: str
    index: int
    subset: str | None = None
    rewards: list[float] = field(default_factory=list)
    unscored: int = 0

    @property
    def has_learning_signal(self) -> bool:
        """Whether a group of these has a learning signal: two rewards that differ."""
        return len(self.rewards) > 1 and not all_equal(self.rewards)

    def verdict(self, solved_at: float) -> TaskOutcome:
        if not self.rewards:
            return "unscored"
        solved = sum(reaches(reward, solved_at) for reward in self.rewards)
        return "always" if solved == len(self.rewards) else "mixed" if solved else "never"

    def as_json(self, solved_at: float) -> Json:
        rewards = self.rewards
        return {
            "agent": self.agent,
            "task_id": self.task_id,
            "_ng_task_index": self.index,
            "rollouts": len(rewards) + self.unscored,
            "unscored": self.unscored,
            "pass_rate": sum(reaches(reward, solved_at) for reward in rewards) / len(rewards) if rewards else None,
            "mean_reward": fmean(rewards) if rewards else None,
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
            "verdict": self.verdict(solved_at),
            "has_learning_signal": self.has_learning_signal,
            **({} if self.subset is None else {"subset": self.subset}),
        }


def profile(rows: Iterable[Json], by: str | None = None) -> list[Task]:
    """The tasks of these rollouts, in order of first appearance.

    A task is identified by agent and task id, even if a training run drew it several times; rows without an id are
    identified by their task index. by: the field with a task's subset.
    """
    tasks: dict[tuple[str, str | int], Task] = {}
    for row in rows:
        agent, task_id, index = str(agent_name(row)), trace_of(row).get("task_id"), row["_ng_task_index"]
        key = (agent, index if task_id is None else str(task_id))
        if key not in tasks:
            tasks[key] = Task(agent, str(task_id or ""), index, None if by is None else value_of(row, by))
        task = tasks[key]
        if row["reward"] is None:
            task.unscored += 1
        else:
            task.rewards.append(row["reward"])
    return list(tasks.values())
