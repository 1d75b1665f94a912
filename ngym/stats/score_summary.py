"""How well did these rollouts do: their mean, the best and the vote of k, the parts of their rewards; what is null is counted."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from statistics import fmean

from ngym.schema import Json, value_of
from ngym.stats.majority_vote import Votes, answer_key
from ngym.stats.pass_at_k import BestOfK, Rewards, bootstrap, spread_of_k

ANSWER = "extracted_answer"  # where a verifier says which answer it found; null: none
NO_ANSWER, NO_FIELD = 0, 1  # in the place of an answer's key
MOST_VALUES = 100  # of a field by which rollouts are told apart; the rest are one
OTHER = "(other)"


@dataclass
class Scores:
    """Rollouts as they come."""

    rewards: Rewards = field(default_factory=Rewards)
    rollouts: int = 0
    _answers: array[int] = field(default_factory=lambda: array("Q"))  # a key, NO_ANSWER or NO_FIELD for each reward
    unscored_of: Counter[int] = field(default_factory=Counter)  # of the tasks that have any

    @property
    def unscored(self) -> int:
        """Rewards that are null; no mean has them."""
        return self.rollouts - self.rewards.count

    @property
    def unscored_share(self) -> float:
        """Of all rollouts, 0 to 1. A mean is of the rest only, so each is shown with it."""
        return self.unscored / self.rollouts if self.rollouts else 0.0

    def add(self, task: int, row: Json) -> None:
        """row: what a verifier answered."""
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
        """`pass@k` where rewards are 0 and 1, else `best@k`: the same formula."""
        return f"{'pass' if self.rewards.binary else 'best'}@{item.k}"

    def majority(self) -> list[BestOfK]:
        """The mean over tasks of the expected reward of the answer that most of k rollouts give. Empty without answers."""
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
        """Of one task. places: of its rewards."""
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
        """By name; `majority@8/reward`. `unscored/reward` is the share of rollouts that no mean has."""
        mean = self.rewards.mean
        own = {} if mean is None else {"mean/reward": mean}
        own["unscored/reward"] = self.unscored_share
        return own | {f"{name}/reward": item.mean for name, item in self.named()}


class Subsets:
    """Rollouts told apart by what a field of their rows says. name: of the field, such as `level`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scores: dict[str, Scores] = {}

    def add(self, task: int, row: Json) -> None:
        value = value_of(row, self.name)
        if value not in self.scores and len(self.scores) >= MOST_VALUES:
            value = OTHER
        self.scores.setdefault(value, Scores()).add(task, row)

    def metrics(self) -> dict[str, float]:
        """`easy/pass@4/reward`, as NeMo Gym writes it."""
        told = ((value, scores.metrics()) for value, scores in sorted(self.scores.items()))
        return {f"{value}/{name}": number for value, metrics in told for name, number in metrics.items()}


def parts_of(row: Json) -> Iterator[tuple[str, float]]:
    """The parts of a row's reward that are known: ("reward_components/format", 0.2)."""
    parts = row.get("reward_components") or (row.get("ng") or {}).get("reward_components") or {}
    return ((f"reward_components/{name}", value) for name, value in parts.items() if value is not None)


def means_by(rows: Iterable[Json], name: str, value: str = "reward") -> dict[str, float]:
    """For `compute_metrics`: the mean of a number for each value of a field, as `{"long/mean/reward": 0.5, ...}`."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if isinstance(row.get(value), int | float):
            found[value_of(row, name)].append(row[value])
    return {f"{key}/mean/{value}": fmean(values) for key, values in sorted(found.items())}
