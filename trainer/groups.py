"""The attempts at one task on their way to a batch, and what a step takes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngym.schema import Json

from .tasks import Task


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
