"""What is remembered of a usable rollout between the two readings of a file: where it stands, and what decides its choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """A line of an input: which file, and its bytes [start, end)."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A rollout that the format may use.

    task: the number of its group. exemplary: may be imitated (else it is only good as a bad example).
    words: fingerprint of what the policy said, over all turns. shape: the number of its columns' types (shapes.py).
    """

    place: Place
    task: int
    reward: float
    exemplary: bool
    words: bytes
    shape: int


class Single(NamedTuple):
    """One rollout as a row of the output. label: whether KTO calls it desirable."""

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
        """By how much the chosen one's reward is larger."""
        return round(self.chosen.reward - self.rejected.reward, 9)


Row = Single | Pair
