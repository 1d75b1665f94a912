"""The attempts at one task on their way to a batch, and what a step takes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ngym.schema import Json

from .task_sampler import Task


@dataclass
class Group:
    """The attempts at one task. step: batches that were trained when it was admitted. asked: the next attempt's index."""

    task: Task
    step: int
    asked: int = 0
    running: int = 0
    stale: int = 0
    rows: list[Json] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.running == 0

    @property
    def rewards(self) -> list[float]:
        """Those that there are."""
        return [row["reward"] for row in self._scored]

    @property
    def components(self) -> list[dict[str, float]]:
        """Of each of the rewards."""
        return [row["ng"].get("reward_components") or {} for row in self._scored]

    @property
    def _scored(self) -> list[Json]:
        return [row for row in self.rows if row.get("reward") is not None]


@dataclass(frozen=True)
class Taken:
    """What a step trains on. rows: of all attempts, those that were given up too, in the order of the tasks.

    lags: of each row, the batches that the trainer is ahead of the oldest weights in it. stale: rollouts that had to be
    collected again. equal: groups that were left out, because they teach nothing. metrics: of the tasks.
    """

    rows: list[Json]
    lags: list[int]
    stale: int
    equal: int
    metrics: dict[str, float]


def next_batch(groups: Iterable[Group], size: int, step: int, max_lag: int) -> list[Group]:
    """The complete groups that came first, `size` of them; none yet if what stays behind could not all be trained in time.

    A group may be trained after group.step + max_lag batches at the latest. Those that stay are trained in their order, `size`
    a batch: so it is not enough to look at those for which this batch is the last one.

    Args:
        groups: all that wait for a batch, complete or not.
        step: batches that were trained.
    """
    waiting = sorted(groups, key=lambda group: group.task.number)
    chosen = [group for group in waiting if group.complete][:size]
    numbers = {group.task.number for group in chosen}
    staying = [group for group in waiting if group.task.number not in numbers]
    in_time = all(step + 1 + place // size <= group.step + max_lag for place, group in enumerate(staying))
    return chosen if len(chosen) == size and in_time else []
