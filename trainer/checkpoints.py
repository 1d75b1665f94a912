"""Checkpoints: atomic folders on disk, what a run saves in them, and how it resumes from one.

    checkpoints/step-000050/
        policy/                     a Hugging Face folder, to serve or evaluate this policy
        training-00001.safetensors  of each trainable weight: the float32 master value and the optimizer's state
        state.json                  everything else that the next step depends on
        manifest.json               the size and the SHA-256 of every other file

Reading it executes no code: it holds safetensors and JSON.

A checkpoint of step n is that run after n batches. Later log entries are cut off; rollouts that were collected later
are in the spool and are not collected again. On a CPU, a resumed run has the same losses.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import yaml
from pydantic import TypeAdapter

from ngym.did_you_mean import nearest
from ngym.errors import NgymError, UsageError
from ngym.files import jsonl
from ngym.files.atomic import file_digest, sync_file, sync_folder, whole_folder
from ngym.schema import Json

from .recipe.objective import FrozenOptions, find_path
from .recipe.recipe import CheckpointOptions, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .engine.engine import Engine
    from .engine.sanity_checks import NanGuard

FOLDER = "checkpoints"
BLOCKS, BLOCK_BYTES = 64, 64 << 10  # of a file, for a model's digest
STATE = "state.json"
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{6,})")
# What may change on resume: the run's length, and how it is computed and shown, but not what is learned.
FREE = (
    "checkpoint", "engine", "evaluation", "logging", "max_skipped", "max_steps", "epochs", "micro_batch_tokens",
    "output", "rollouts.concurrency", "rollouts.services", "rollouts.timeout_s", "trainer",
)  # fmt: skip


class CheckpointUnusable(NgymError):
    """There is no checkpoint to resume from, or it is damaged."""


class FileEntry(FrozenOptions):
    """The manifest's entry for a file."""

    bytes: int
    sha256: str


WRITTEN = TypeAdapter(dict[str, FileEntry])


class Checkpoint(NamedTuple):
    """A complete checkpoint. step: how many batches were trained."""

    step: int
    folder: Path
    state: Json


class Checkpoints:
    """The checkpoints of a run's folder. Only rank 0 writes."""

    def __init__(self, output: Path, options: CheckpointOptions) -> None:
        self._folder = output / FOLDER
        self._options = options

    def due(self, step: int, steps: int) -> bool:
        return step % self._options.every == 0 or step == steps

    def save(self, step: int, state: Json, write: Callable[[Path], None]) -> None:
        """Commit a checkpoint. write: writes the tensors into a folder."""
        with whole_folder(self._folder / f"step-{step:06}") as temporary:
            write(temporary)
            (temporary / STATE).write_bytes(orjson.dumps(state, option=orjson.OPT_INDENT_2))
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            manifest = {
                str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
                for path in files
            }
            (temporary / MANIFEST).write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))

    def tidy(self, history: Iterable[Mapping[str, float]]) -> None:
        """Remove checkpoints that need not be kept, and leftovers of killed writers. history: the metrics of the run."""
        for leftover in self._folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folders = self._folders()
        newest = set(sorted(folders)[-self._options.keep :])
        best = self.best(history)
        for step, folder in folders.items():
            if step not in newest and step != best:
                _remove(folder)

    def best(self, history: Iterable[Mapping[str, float]]) -> int | None:
        """The step of the best checkpoint on disk, if the recipe keeps the best and it is known."""
        name, folders = self._options.best, self._folders()
        if name is None:
            return None
        sign = -1 if self._options.lower_is_better else 1
        values = {int(row["step"]): sign * row[name] for row in history if name in row and math.isfinite(row[name])}
        candidates = [step for step in folders if step in values and step > 0]  # of step 0 there are no weights
        return max(candidates, key=lambda step: (values[step], step), default=None)

    def missing_best(self, history: Iterable[Mapping[str, float]]) -> str:
        """The message that the run has no metric `best`; "" if it has, or if the recipe names none."""
        name = self._options.best
        names = {key for row in history for key in row}
        if name is None or name in names:
            return ""
        near = f", did you mean {suggestion!r}" if (suggestion := nearest(name, sorted(names))) else ""
        return (
            f"warning: checkpoint.best: no step has a metric {name!r}{near}; only the newest checkpoints are kept. The "
            f"metrics are {', '.join(sorted(names))}"
        )

    @property
    def last_step(self) -> int:
        """The step of the newest checkpoint on disk, without verifying it; 0 before the first."""
        return max(self._folders(), default=0)

    def newest(self) -> Checkpoint:
        """The newest checkpoint, verified byte by byte.

        Raises:
            CheckpointUnusable: there is no checkpoint, or the newest one is damaged.
        """
        folders = self._folders()
        if not folders:
            raise CheckpointUnusable(
                f"{self._folder}: no checkpoint to resume from; put it back, or start again with --overwrite"
            )
        step = max(folders)
        folder = folders[step]
        try:
            if problem := _find_problem(folder):
                raise CheckpointUnusable(self._describe_damage(folder, problem, folders))
            return Checkpoint(step, folder, orjson.loads((folder / STATE).read_bytes()))
        except (OSError, ValueError) as error:
            raise CheckpointUnusable(self._describe_damage(folder, str(error).split("\n")[0], folders)) from error

    def discard(self, step: int) -> None:
        """Remove the checkpoint of this step, if there is one."""
        if (folder := self._folders().get(step)) is not None:
            _remove(folder)

    def _folders(self) -> dict[int, Path]:
        if not self._folder.is_dir():
            return {}
        matches = [(NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
        return {int(match[1]): path for match, path in matches if match and path.is_dir()}

    def _describe_damage(self, folder: Path, problem: str, folders: Mapping[int, Path]) -> str:
        others = [step for step in sorted(folders) if folders[step] != folder]
        remedy = f"the one before is of step {others[-1]}" if others else "there is none before it"
        return f"{folder}: damaged: {problem}; {remedy}: remove this folder to resume from there"


def _remove(folder: Path) -> None:
    """Remove a folder atomically for readers. Another process may be using its `policy/`, which must not end a
    training.
    """
    with suppress(OSError):
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old")), ignore_errors=True)


def _find_problem(folder: Path) -> str | None:
    """The first difference to what was written. Raises OSError if a file cannot be read."""
    try:
        manifest = WRITTEN.validate_json((folder / MANIFEST).read_bytes())
    except ValueError:
        return f"{MANIFEST} is not what was written"
    for name, entry in manifest.items():
        path = folder / name
        if path.stat().st_size != entry.bytes or file_digest(path) != entry.sha256:
            return f"{name} is not what was written"
    # other programs may use `policy/` and add files to it; the files next to it are loaded
    names = {path.name for path in folder.iterdir() if path.is_file()} - {MANIFEST}
    extra = sorted(names - manifest.keys())
    return f"{extra[0]} was not written with it" if extra else None


def differences(before: Json, now: Json, free: Sequence[str]) -> list[str]:
    """The dotted keys in which two recipes differ, except those that begin with a free one, with both values. Two
    spellings of the path of the data file or of the push folder are equal.
    """
    flat_before, flat_now = flatten(before), flatten(now)
    keys = [
        key
        for key in sorted(flat_before.keys() | flat_now.keys())
        if _resolve_path(key, flat_before.get(key)) != _resolve_path(key, flat_now.get(key))
        and not any(f"{key}.".startswith(f"{prefix}.") for prefix in free)
    ]
    return [f"{key}: {flat_before.get(key)!r} in the run, {flat_now.get(key)!r} now" for key in keys]


def _resolve_path(key: str, value: Any) -> Any:
    """The value; a path is resolved, because `${output}/rollouts.jsonl` has the spelling of `output`."""
    if not isinstance(value, str):
        return value
    if key == "data.path":
        return (find_path(value) or Path(value)).resolve()
    return Path(value).resolve() if key == "rollouts.push_folder" else value


def flatten(values: Json, prefix: str = "") -> Json:
    """The values of a recipe by their dotted keys."""
    flat: Json = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class CheckpointSaver:
    """Saves a run. Every rank has one, and calls it.

    Args:
        metrics: the file of the run's metrics. source: the state of the batch source, as JSON.
        budget: tokens that a rank computes at once.
        models: path of each model that the run reads again when it resumes -> `model_digest`.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        learner: Engine,
        tokenizer: PreTrainedTokenizerBase,
        guard: NanGuard,
        metrics: Path,
        source: Callable[[], Json | None],
        steps: int,
        budget: int,
        models: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._checkpoints = checkpoints
        self._models = dict(models)
        self._learner = learner
        self._tokenizer = tokenizer
        self._guard = guard
        self._metrics = metrics
        self._source = source
        self._steps = steps
        self._budget = budget
        self._is_due = self._is_last = False

    def end(self) -> None:
        """Save after the batch in progress, and end the run there; or before the first one, if none is. On rank 0; the
        others follow.
        """
        self._is_last = True

    def begin(self) -> None:
        """Mark the run as not yet trained, so that a resume knows that no checkpoint exists to load."""
        if self._learner.rank == 0:
            self._checkpoints.save(0, {"step": 0, "models": self._models}, lambda folder: None)

    def restore(self, earlier: Checkpoint, say: Callable[[str], None]) -> list[dict[str, float]]:
        """Load a checkpoint; returns the metrics up to it.

        Raises:
            CheckpointUnusable, StateMissing: it cannot be loaded. UsageError: a model has changed.
        """
        for path, digest in (earlier.state.get("models") or {}).items():
            if self._models.get(path, digest) != digest:
                raise UsageError(
                    f"{path}: the model has changed since the run began with it; restore it, or begin a new run"
                )
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

    def before(self, step: int) -> None:
        """Raises KeyboardInterrupt: `end` was called before the first batch. The checkpoint of `step` is on the disk."""
        if self._learner.broadcast(self._is_last) and step < self._steps:
            raise KeyboardInterrupt

    def after(self, step: int) -> None:
        """Save if a checkpoint is due after this batch. While steps are skipped, the save waits for the next successful
        one.

        Raises:
            NotFinite: the weights must not be saved. KeyboardInterrupt: `end` was called.
        """
        last = self._learner.broadcast(self._is_last)
        self._is_due |= last or self._checkpoints.due(step, self._steps)
        if not self._is_due or self._guard.is_skipping:
            return
        self._is_due = False
        self.check()
        learner = self._learner
        state: Json = {"step": step, "skipped": self._guard.skipped, "source": self._source()}
        state["models"] = self._models
        if learner.rank == 0:
            state["metrics_bytes"] = self._metrics.stat().st_size
            self._checkpoints.save(step, state, lambda folder: self._write_with_metrics(folder, state))
            self.tidy()
        else:
            self._write(Path(os.devnull), state)
        if last and step < self._steps:
            learner.broadcast(None)  # rank 0 has committed it: a launcher kills the others once one rank has ended
            raise KeyboardInterrupt

    def _write_with_metrics(self, folder: Path, state: Json) -> None:
        """The metrics are on the disk first: a checkpoint that has more of them than the file cannot be resumed."""
        sync_file(self._metrics)
        sync_folder(self._metrics.parent)
        self._write(folder, state)

    def _write(self, folder: Path, state: Json) -> None:
        state["learner"] = self._learner.save_state(folder)
        self._learner.save(folder / "policy", self._tokenizer)


def model_digest(name: str) -> str | None:
    """A digest of a model's config and weights; None without such a folder, or for a hub's model that is not in its cache.

    Of a large file, 64 blocks that are spread over it are read.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 else None
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(BLOCK_BYTES, (size - BLOCK_BYTES) // (BLOCKS - 1)))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def read_recipe_of_run(file: Path) -> Json:
    """The keys of a run's recipe.yaml; those that a later version added have their defaults. Raises UsageError: it is
    damaged.
    """
    try:
        recipe = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file}: damaged, so the run's recipe is unknown: {reason}") from None
    if not isinstance(recipe, dict):
        raise UsageError(f"{file}: damaged, so the run's recipe is unknown: it is not a mapping")
    try:
        complete = Recipe.model_validate(recipe).model_dump(mode="json")
    except (ValueError, NgymError):  # of another version, or with a variable in place of a number
        return recipe
    return _merge(complete, recipe)


def _merge(complete: Json, written: Json) -> Json:
    """The complete recipe, with the values that are written."""
    nested = {
        key: _merge(complete[key], value)
        for key, value in written.items()
        if isinstance(value, dict) and isinstance(complete.get(key), dict)
    }
    return complete | written | nested


def resumable(output: Path, resolved: str) -> None:
    """Check that this folder holds a run that this recipe can resume. resolved: the recipe, as YAML.

    Raises:
        UsageError: there is no such run, or its recipe learns something else.
    """
    earlier = output / "recipe.yaml"
    if not earlier.is_file():
        raise UsageError(f"{output}: no run to resume (there is no {earlier.name}); start it without --resume")
    before = read_recipe_of_run(earlier)
    now, last = yaml.safe_load(resolved), Checkpoints(output, CheckpointOptions()).last_step
    if now.get("max_steps") is not None and now["max_steps"] < last:
        raise UsageError(
            f"--resume: max_steps: {now['max_steps']:,}, but {output} has a checkpoint of step {last:,}; set it to {last:,} or "
            "more, or start a new run in another output"
        )
    lines = differences(before, now, FREE)
    if lines:
        remedy = "set it back, or start a new run in another output"
        raise UsageError("\n".join(f"--resume: {line}; {remedy}" for line in lines))


def cut(metrics: Path, checkpoint: Checkpoint) -> list[dict[str, float]]:
    """The metrics up to the checkpoint. Later entries are removed, because those steps are taken again.

    Raises:
        CheckpointUnusable: the file has changed.
    """
    size = checkpoint.state.get("metrics_bytes", 0)
    length = metrics.stat().st_size if metrics.exists() else 0
    if length < size:
        raise CheckpointUnusable(
            f"{metrics}: has {length} bytes, fewer than the {size} that it had at step {checkpoint.step}; put it back"
        )
    if length == 0:
        return []
    with metrics.open("rb") as file:
        lines = file.read(size).splitlines()
    try:
        rows = [orjson.loads(line) for line in lines]
    except orjson.JSONDecodeError as error:
        raise CheckpointUnusable(f"{metrics}: damaged before step {checkpoint.step}: {error}; put it back") from None
    if wrong := [number for number, row in enumerate(rows, 1) if not isinstance(row, dict)]:
        raise CheckpointUnusable(f"{metrics}:{wrong[0]}: damaged: it is not a JSON object; put it back")
    os.truncate(metrics, size)
    return rows
