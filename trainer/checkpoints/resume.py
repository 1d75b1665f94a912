"""Saves what the next step of a run depends on, and resumes an interrupted run from it.

A checkpoint of step n is that run after n batches. Later log entries are cut off; rollouts that were collected later
are in the spool and are not collected again. On a CPU, a resumed run has the same losses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import yaml

from ngym.errors import UsageError
from ngym.files import jsonl
from ngym.schema import Json

from .store import Checkpoint, Checkpoints, CheckpointUnusable, differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine
    from ..engine.nan_guard import Guard

# What may change on resume: the run's length, and how it is computed and shown, but not what is learned.
FREE = (
    "checkpoint",
    "engine",
    "evaluation",
    "logging",
    "max_skipped",
    "max_steps",
    "epochs",
    "micro_batch_tokens",
    "output",
    "rollouts.concurrency",
    "rollouts.services",
    "rollouts.timeout_s",
)


class Saver:
    """Saves a run. Every rank has one, and calls it.

    Args:
        metrics: the file of the run's metrics. source: the state of the batch source, as JSON.
        budget: tokens that a rank computes at once.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        learner: Engine,
        tokenizer: PreTrainedTokenizerBase,
        guard: Guard,
        metrics: Path,
        source: Callable[[], Json | None],
        steps: int,
        budget: int,
    ) -> None:
        self._checkpoints = checkpoints
        self._learner = learner
        self._tokenizer = tokenizer
        self._guard = guard
        self._metrics = metrics
        self._source = source
        self._steps = steps
        self._budget = budget
        self._due = False

    def begin(self) -> None:
        """Mark the run as not yet trained, so that a resume knows that no checkpoint exists to load."""
        if self._learner.rank == 0:
            self._checkpoints.save(0, {"step": 0}, lambda folder: None)

    def restore(self, earlier: Checkpoint, say: Callable[[str], None]) -> list[dict[str, float]]:
        """Load a checkpoint; returns the metrics up to it.

        Raises:
            CheckpointUnusable, StateMissing: it cannot be loaded.
        """
        say(f"resuming after step {earlier.step}, from {earlier.folder}")
        if earlier.step > 0:
            self._learner.load_state(earlier.folder, earlier.state["learner"])
            self._guard.skipped = earlier.state["skipped"]
        return cut(self._metrics, earlier) if self._learner.rank == 0 else []

    def check(self) -> None:
        """
        Raises:
            NotFinite: the weights must not be saved.
        """
        self._guard.check(self._learner, self._budget)

    def discard(self, step: int) -> None:
        """Remove the checkpoint of this step, whose weights turned out to be unusable."""
        if self._learner.rank == 0:
            self._checkpoints.discard(step)

    def tidy(self) -> None:
        """Remove the checkpoints that need not be kept."""
        if self._learner.rank == 0:
            self._checkpoints.tidy(line.row for line in jsonl.read(self._metrics))

    def after(self, step: int) -> None:
        """Save if a checkpoint is due after this batch. While steps are skipped, the save waits for the next successful
        one.

        Raises:
            NotFinite: the weights must not be saved.
        """
        self._due |= self._checkpoints.due(step, self._steps)
        if not self._due or self._guard.skipping:
            return
        self._due = False
        self.check()
        learner = self._learner
        state: Json = {"step": step, "skipped": self._guard.skipped, "source": self._source()}
        if learner.rank == 0:
            state["metrics_bytes"] = self._metrics.stat().st_size
            self._checkpoints.save(step, state, lambda folder: self._write(folder, state))
            self.tidy()
        else:
            self._write(Path(os.devnull), state)

    def _write(self, folder: Path, state: Json) -> None:
        state["learner"] = self._learner.save_state(folder)
        self._learner.save(folder / "policy", self._tokenizer)


def resumable(output: Path, resolved: str) -> None:
    """Check that this folder holds a run that this recipe can resume. resolved: the recipe, as YAML.

    Raises:
        UsageError: there is no such run, or its recipe learns something else.
    """
    earlier = output / "recipe.yaml"
    if not earlier.is_file():
        raise UsageError(f"{output}: no run to resume (there is no {earlier.name}); start it without --resume")
    try:
        before = yaml.safe_load(earlier.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{earlier}: damaged, so the run's recipe is unknown: {error}") from None
    if not isinstance(before, dict):
        raise UsageError(f"{earlier}: damaged, so the run's recipe is unknown: it is not a mapping")
    changed = differences(before, yaml.safe_load(resolved), FREE)
    if changed:
        remedy = "set it back, or start a new run in another output"
        raise UsageError("\n".join(f"--resume: {one}; {remedy}" for one in changed))


def cut(metrics: Path, checkpoint: Checkpoint) -> list[dict[str, float]]:
    """The metrics up to the checkpoint. Later entries are removed, because those steps are taken again.

    Raises:
        CheckpointUnusable: the file has changed.
    """
    size = checkpoint.state.get("metrics_bytes", 0)
    there = metrics.stat().st_size if metrics.exists() else 0
    if there < size:
        raise CheckpointUnusable(
            f"{metrics}: has {there} bytes, fewer than the {size} that it had at step {checkpoint.step}; put it back"
        )
    if there == 0:
        return []
    os.truncate(metrics, size)
    try:
        return [orjson.loads(line) for line in metrics.read_bytes().splitlines()]
    except orjson.JSONDecodeError as error:
        raise CheckpointUnusable(f"{metrics}: damaged before step {checkpoint.step}: {error}; put it back") from None
