"""The records that the trainer steps on: a batch is lists of samples, and a sample is the segments that belong
together.

A demonstration is one sample, with one segment as long as each turn's prompt continues the turn before. The segments of
a sample always share a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Segment:
    """One unbroken context.

    token_ids: [T]. spans: [start, end) of the trained tokens; start >= 1, because the first token has no prediction.
    """

    token_ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def trained(self) -> int:
        """The number of trained tokens."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class Sample:
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens that the model computes."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest segment."""
        return max(len(segment.token_ids) for segment in self.segments)

    @property
    def trained(self) -> int:
        return sum(segment.trained for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples that are trained between two reports.

    updates: the samples of each optimizer step. values: metrics known beforehand, for the log.
    """

    updates: Sequence[Sequence[Sample]]
    values: dict[str, float] = field(default_factory=dict)
