"""Candidates for export, and the counts of kept and dropped rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import NamedTuple

from ngym.schema import Json

SHOWN_UNSAYABLE = 5


class Place(NamedTuple):
    """A line of an input: the index of the file, and its bytes [start, end)."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A rollout that the format may use.

    task: the number of its group. exemplary: may be imitated (else it can only be a bad example).
    words: fingerprint of the policy's text, over all turns. shape: the number of its columns' types (formats.Shapes).
    """

    place: Place
    task: int
    reward: float
    exemplary: bool
    words: bytes
    shape: int


class Single(NamedTuple):
    """One rollout as a row of the output. label: whether it is desirable for KTO."""

    candidate: Candidate
    label: bool

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (self.candidate,)


class Pair(NamedTuple):
    """Two rollouts of one group as a row of the output."""

    chosen: Candidate
    rejected: Candidate

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self

    @property
    def margin(self) -> float:
        """The difference of the rewards."""
        return round(self.chosen.reward - self.rejected.reward, 9)


Row = Single | Pair


class Reason(Enum):
    """Why a rollout is left out. The value is its name in --json."""

    FAILED = "failed"
    UNSCORED = "unscored"
    TORN = "torn"
    CUT = "cut"
    TRUNCATED = "truncated"
    LOW = "low"
    UNSAYABLE = "unsayable"
    DUPLICATE = "duplicate"
    NOT_BEST = "not_best"
    ALONE = "alone"
    NO_PARTNER = "no_partner"
    SPARE = "spare"
    LIMIT = "limit"

    @property
    def told(self) -> str:
        return _TOLD[self]


_TOLD = {
    Reason.FAILED: "failed attempts",
    Reason.UNSCORED: "not scored (reward null)",
    Reason.TORN: "a torn last line: the writer of the file was stopped",
    Reason.CUT: "cut off in mid-turn (token limit or context)",
    Reason.TRUNCATED: "stopped by the step limit (--keep-truncated keeps them)",
    Reason.LOW: "reward under --min-reward",
    Reason.UNSAYABLE: "the format cannot represent it",
    Reason.DUPLICATE: "the same conversation again (--dedupe)",
    Reason.NOT_BEST: "worse than others of the same task (--best)",
    Reason.ALONE: "the only one of its task",
    Reason.NO_PARTNER: "no partner in its task: reward too close, or the same text",
    Reason.SPARE: "not needed for the pairs of its task (--pairs, --max-pairs)",
    Reason.LIMIT: "more than --limit",
}


@dataclass
class Tally:
    """The numbers of one export.

    read: rollouts in the input. kept: those in the output. tasks: tasks with usable rollouts.
    unsayable: place and reason of the first few. labels, margins: of the written rows, if the format has them.
    """

    read: int = 0
    kept: int = 0
    rows: int = 0
    tasks: int = 0
    dropped: Counter[Reason] = field(default_factory=Counter)
    unsayable: list[str] = field(default_factory=list)
    labels: Counter[bool] = field(default_factory=Counter)
    margins: list[float] = field(default_factory=list)

    def drop(self, reason: Reason, count: int = 1) -> None:
        self.dropped[reason] += count

    def cannot_say(self, where: str) -> None:
        self.drop(Reason.UNSAYABLE)
        if len(self.unsayable) < SHOWN_UNSAYABLE:
            self.unsayable.append(where)

    def count(self, rows: Sequence[Row]) -> None:
        """Count the rows to write."""
        self.rows = len(rows)
        self.kept = len(used(rows))
        self.labels = Counter(row.label for row in rows if isinstance(row, Single))
        self.margins = [row.margin for row in rows if isinstance(row, Pair)]

    def as_json(self) -> Json:
        summary: Json = {
            "rows": self.rows,
            "read": self.read,
            "kept": self.kept,
            "tasks": self.tasks,
            "dropped": {reason.value: self.dropped[reason] for reason in Reason if self.dropped[reason]},
            "unsayable": self.unsayable,
        }
        if self.labels:
            summary["labels"] = {"true": self.labels[True], "false": self.labels[False]}
        if self.margins:
            summary["margin"] = {"mean": fmean(self.margins), "min": min(self.margins), "max": max(self.margins)}
        return summary


def used(rows: Iterable[Row]) -> set[Candidate]:
    """The rollouts in these rows."""
    return {candidate for row in rows for candidate in row.candidates}
