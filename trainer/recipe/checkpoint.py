"""Options of checkpoints: how often they are saved, and which are kept."""

from __future__ import annotations

from pydantic import Field

from .base import Positive, Record


class CheckpointOptions(Record):
    """every: steps from one to the next; there is always one of the last step. keep: the newest so many.

    best: a metric; the checkpoint of the step where it was best is kept, too. mode: which values of it are better.
    """

    every: Positive = 50
    keep: Positive = 2
    best: str | None = None
    mode: str = Field(default="max", pattern="^(max|min)$")
