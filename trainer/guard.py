"""Numbers that are no numbers: the step is skipped on every rank, its batch is kept for inspection, and a few in a row end the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from ngym.errors import NgymError
from ngym.jsonl import write_whole

from .samples import Sample


class NotFinite(NgymError):
    """The loss or the gradient is no number."""


class Guard:
    """Counts the optimiser steps that were skipped.

    Args:
        folder: where the batches of skipped steps go, one file each; None on all ranks but one.
        limit: so many skipped steps in a row end the run.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self.skipped = 0
        self._in_a_row = 0
        self._folder = folder
        self._limit = limit

    def passes(self, step: int, samples: Sequence[Sample], loss: float, grad_norm: float) -> bool:
        """Whether the optimiser step was one. The engine has skipped it where the gradient was no number.

        Raises:
            NotFinite: too many were none in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        kept = self._dump(step, samples)
        if self._in_a_row >= self._limit:
            raise NotFinite(
                f"step {step}: the loss is {loss} and the gradient's norm {grad_norm}, {self._in_a_row} optimiser steps in "
                f"a row; the weights are those before. Lower optimizer.lr{kept}"
            )
        return False

    def _dump(self, step: int, samples: Sequence[Sample]) -> str:
        if self._folder is None:
            return ""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step:06}-{self.skipped}.jsonl"
        write_whole(path, b"".join(orjson.dumps(asdict(sample)) + b"\n" for sample in samples))
        return f", or look at the batch in {path}"
