"""Which rollouts wait for the others of their task? Those whose reward needs them; until the last of these is there."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngym.collect.plan import PlannedRollout
from ngym.collect.rollout_rows import Outcome, Rollout
from ngym.grading.group_rewards import is_pending
from ngym.schema import RolloutKey


@dataclass
class _Group:
    missing: int
    waiting: list[Rollout] = field(default_factory=list)


class Together:
    """The groups in flight; a group is forgotten when its last rollout is there, finished or given up."""

    def __init__(self) -> None:
        self._groups: dict[RolloutKey, _Group] = {}

    def keeps(self, planned: PlannedRollout, outcome: Outcome) -> bool:
        """Whether this outcome waits here."""
        waits = bool(planned.group) and isinstance(outcome, Rollout) and is_pending(outcome.row)
        if waits and isinstance(outcome, Rollout):
            self._of(planned).waiting.append(outcome)
        return waits

    def completed(self, planned: PlannedRollout) -> list[Rollout]:
        """To be asked once for each rollout that is settled: those that waited, if it was the last of its group."""
        if len(planned.group) < 2 and not self._groups:
            return []
        group = self._of(planned)
        group.missing -= 1
        if group.missing > 0:
            return []
        self._groups.pop(planned.first, None)
        return sorted(group.waiting, key=lambda rollout: rollout.key.rollout_index)

    def _of(self, planned: PlannedRollout) -> _Group:
        return self._groups.setdefault(planned.first, _Group(max(1, len(planned.group))))
