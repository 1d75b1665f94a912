"""Summary of scored rollouts: mean, best and majority of k, reward components, the unscored share; the difficulty of tasks."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import repeat
from math import comb
from statistics import StatisticsError, fmean
from statistics import correlation as pearson
from typing import Any, Literal, NamedTuple

import orjson

from ngym.schema import Json, value_of
from ngym.stats.pass_at_k import BestOfK, Rewards, bootstrap, spread_of_k

EXACT_ROLLOUTS = 16  # of a task; with more, only the vote of all rollouts is computed
ANSWER = "extracted_answer"  # the field with the answer that a verifier extracted; null: no answer
MOST_VALUES = 100  # of a field that defines subsets; further values are combined
OTHER = "(other)"


class Camp(NamedTuple):
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
        camps = sorted(Camp(count, total / count) for key, (count, total) in self.totals.items() if key is not None)
        count, total = self.totals.get(None, (0, 0.0))
        silent = Camp(count, total / count if count else 0.0)
        if k == n:
            most = max((camp.size for camp in camps), default=0)
            elected = [camp.mean for camp in camps if camp.size == most]
            return sum(elected) / len(elected) if elected else silent.mean
        return _expected(tuple(camps), silent, k)


def answer_key(answer: Any) -> int | None:
    """A 64-bit digest that equal answers share; None: no answer."""
    if answer is None:
        return None
    text = answer.strip().encode() if isinstance(answer, str) else orjson.dumps(answer, option=orjson.OPT_SORT_KEYS)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") if text else None


@lru_cache(maxsize=8192)  # tasks with few rollouts and 0/1 rewards often repeat
def _expected(camps: tuple[Camp, ...], silent: Camp, k: int) -> float:
    draws = comb(silent.size + sum(camp.size for camp in camps), k)
    largest = min(k, max((camp.size for camp in camps), default=0))
    won = sum(_won_with(most, camps, silent, k) for most in range(1, largest + 1))
    return (won + comb(silent.size, k) * silent.mean) / draws


def _won_with(most: int, camps: tuple[Camp, ...], silent: Camp, k: int) -> float:
    """The sum of the winners' mean rewards, over all draws of k whose winners have `most` votes each.

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


NO_ANSWER, NO_FIELD = 0, 1  # stand for an answer's key


@dataclass
class Scores:
    """Accumulates scored rollouts."""

    rewards: Rewards = field(default_factory=Rewards)
    rollouts: int = 0
    _answers: array[int] = field(default_factory=lambda: array("Q"))  # a key, NO_ANSWER or NO_FIELD for each reward
    unscored_of: Counter[int] = field(default_factory=Counter)  # for tasks that have any

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
        at_k = {k: array("d") for k in spread_of_k(most) if k > 1}
        for _, places in self.rewards.groups() if at_k else ():
            votes = self._votes(places)
            for k, values in at_k.items():
                if (value := votes.at_k(k)) is not None:
                    values.append(value)
        return [BestOfK(k, fmean(values), bootstrap(values), len(values)) for k, values in at_k.items() if values]

    def _voters(self, places: Sequence[int]) -> list[int]:
        return [place for place in places if place < len(self._answers) and self._answers[place] != NO_FIELD]

    def _votes(self, places: Sequence[int]) -> Votes:
        """The votes of one task. places: the indices of its rewards."""
        votes = Votes()
        for place in self._voters(places):
            key = self._answers[place]
            votes.add_key(None if key == NO_ANSWER else key, self.rewards.values[place])
        return votes

    def named(self) -> list[tuple[str, BestOfK]]:
        """`pass@k` or `best@k`, then `majority@k`."""
        best = [(self.best_name(item), item) for item in self.rewards.best_of()]
        return best + [(f"majority@{item.k}", item) for item in self.majority()]

    def metrics(self) -> dict[str, float]:
        """The metrics by name, such as `majority@8/reward`. `unscored/reward` is the unscored share."""
        mean = self.rewards.mean
        own = {} if mean is None else {"mean/reward": mean}
        own["unscored/reward"] = self.unscored_share
        return own | {f"{name}/reward": item.mean for name, item in self.named()}


class Subsets:
    """Scores by the value of a field of the rows. name: of the field, such as `level`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scores: dict[str, Scores] = {}

    def add(self, task: int, row: Json) -> None:
        value = value_of(row, self.name)
        if value not in self.scores and len(self.scores) >= MOST_VALUES:
            value = OTHER
        self.scores.setdefault(value, Scores()).add(task, row)

    def metrics(self) -> dict[str, float]:
        """Metrics named `easy/pass@4/reward`, as in NeMo Gym."""
        told = ((value, scores.metrics()) for value, scores in sorted(self.scores.items()))
        return {f"{value}/{name}": number for value, metrics in told for name, number in metrics.items()}


def parts_of(row: Json) -> Iterator[tuple[str, float]]:
    """The known components of a row's reward: ("reward_components/format", 0.2)."""
    parts = row.get("reward_components") or (row.get("ng") or {}).get("reward_components") or {}
    return ((f"reward_components/{name}", value) for name, value in parts.items() if value is not None)


def means_by(rows: Iterable[Json], name: str, value: str = "reward") -> dict[str, float]:
    """For `compute_metrics`: the mean of a number for each value of a field, as `{"long/mean/reward": 0.5, ...}`."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if isinstance(row.get(value), int | float):
            found[value_of(row, name)].append(row[value])
    return {f"{key}/mean/{value}": fmean(values) for key, values in sorted(found.items())}


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
    truths, said = Counter(truth for truth, _ in pairs), Counter(answer for _, answer in pairs)
    hits = Counter(truth for truth, answer in pairs if truth == answer)
    scores: dict[str, float] = {}
    for label, count in sorted(truths.items()):
        scores[f"precision/{label}"] = hits[label] / max(1, said[label])
        scores[f"recall/{label}"] = hits[label] / count
        scores[f"f1/{label}"] = 2 * hits[label] / (count + said[label])
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
    def teaches(self) -> bool:
        """Whether a group of these has a learning signal: two rewards that differ."""
        return len(set(self.rewards)) > 1

    def verdict(self, solved_at: float) -> TaskOutcome:
        if not self.rewards:
            return "unscored"
        solved = sum(reward >= solved_at for reward in self.rewards)
        return "always" if solved == len(self.rewards) else "mixed" if solved else "never"

    def as_json(self, solved_at: float) -> Json:
        rewards = self.rewards
        return {
            "agent": self.agent,
            "task_id": self.task_id,
            "_ng_task_index": self.index,
            "rollouts": len(rewards) + self.unscored,
            "unscored": self.unscored,
            "pass_rate": sum(reward >= solved_at for reward in rewards) / len(rewards) if rewards else None,
            "mean_reward": fmean(rewards) if rewards else None,
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
            "verdict": self.verdict(solved_at),
            "teaches": self.teaches,
            **({} if self.subset is None else {"subset": self.subset}),
        }


def profile(rows: Iterable[Json], by: str | None = None) -> list[Task]:
    """The tasks of these rollouts, in order of first appearance.

    A task is identified by agent and task id, even if a training run drew it several times; rows without an id are
    identified by their task index. by: the field with a task's subset.
    """
    tasks: dict[tuple[str, str | int], Task] = {}
    for row in rows:
        agent, task_id, index = row["agent_ref"]["name"], (row.get("ng") or {}).get("task_id"), row["_ng_task_index"]
        key = (agent, index if task_id is None else str(task_id))
        if key not in tasks:
            tasks[key] = Task(agent, str(task_id or ""), index, None if by is None else value_of(row, by))
        task = tasks[key]
        if row["reward"] is None:
            task.unscored += 1
        else:
            task.rewards.append(row["reward"])
    return list(tasks.values())
