"""`--overwrite`: moves an earlier run's files into `.old/` when the new run begins to train.

Until then (services start, the data is read, the model is loaded) the earlier run is untouched, so a run that cannot
start loses nothing. The files move into `.old.partial/` first, which then replaces `.old/`. After a kill in between,
the next start restores the files from `.old.partial/`.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Collection
from pathlib import Path

from ngym.files.atomic import sync_folder
from ngym.files.jsonl import read
from ngym.schema import Json

from .checkpoints import FOLDER as CHECKPOINTS
from .recipe.recipe import run_file
from .recipe.rollout_options import ADVANTAGES, SPOOL, SPOOL_FAILURES

POLICY, ADAPTER, INITIAL = "policy", "adapter", "initial"
METRICS = "metrics.jsonl"
SPOOL_TASKS = "rollouts_tasks.jsonl"
EVALUATED, EVALUATED_FAILURES = "eval_rollouts.jsonl", "eval_rollouts_failures.jsonl"
RESOLVED = "recipe.yaml"
SKIPPED = "skipped"
CURVE = "curve.png"
ROLLOUTS = (SPOOL, ADVANTAGES, SPOOL_FAILURES, SPOOL_TASKS, EVALUATED, EVALUATED_FAILURES)
TRACKED = tuple(str(run_file(Path(), sink)) for sink in ("wandb", "mlflow"))
FILES = (METRICS, *ROLLOUTS, CHECKPOINTS, POLICY, ADAPTER, SKIPPED, CURVE, RESOLVED, *TRACKED)
OLD, PARTIAL = ".old", ".old.partial"


def contains_run(output: Path) -> bool:
    return (output / METRICS).exists() or (output / POLICY).exists()


def is_interrupted(output: Path) -> bool:
    """Whether a run was killed before it began to train, so that `put_back` must undo it."""
    return (output / PARTIAL).is_dir()


def move_aside(output: Path, names: Collection[str]) -> None:
    """Move these files of a run into `.old.partial/`; `put_back` undoes it."""
    partial = output / PARTIAL
    for name in names:
        if (output / name).exists():
            partial.mkdir(exist_ok=True)
            (output / name).rename(partial / name)


def restore(output: Path) -> None:
    """Undo the moves of a run that did not begin to train; files that it wrote under the same names are removed."""
    partial = output / PARTIAL
    if not partial.is_dir():
        return
    for entry in sorted(partial.iterdir()):
        target = output / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.rename(target)
    partial.rmdir()


def replace(output: Path, in_use: Collection[Path] = ()) -> None:
    """Move an earlier run into `.old/`. A run without results is removed instead, and `.old/` stays.

    in_use: paths that the new run reads; files and folders that contain one of them stay.
    """
    used_paths = [path.resolve() for path in in_use]
    names = [name for name in FILES if not any(path.is_relative_to((output / name).resolve()) for path in used_paths)]
    has_results = _has_row(output / METRICS) or _has_row(output / SPOOL) or (output / POLICY).exists()
    move_aside(output, names)
    old, partial = output / OLD, output / PARTIAL
    if not partial.is_dir():
        return
    if has_results:
        shutil.rmtree(old, ignore_errors=True)
        partial.rename(old)
    else:
        shutil.rmtree(partial)
    sync_folder(output)


def _has_row(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def summary(output: Path) -> Json:
    """The output of `ng_train --json` at the end: the paths of the results, and the last entry of the metrics (or {})."""
    entries = (line.row for line in read(output / METRICS) if line.problem is None)
    last = deque(entries, maxlen=1)
    files = {"policy": str(output / POLICY), "metrics": str(output / METRICS)}
    return {"output": str(output), **files, "last": last[0] if last else {}}
