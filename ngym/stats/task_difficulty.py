"""Per-task statistics of rollouts: how often a task was solved, and whether its rewards differ at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from ngym.schema import Json, value_of

Verdict = Literal["always", "never", "mixed", "unscored"]
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

    def verdict(self, solved_at: float) -> Verdict:
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
