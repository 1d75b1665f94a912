"""The contents of a training run's folder: its growing metrics, its recipe, and its rollouts.

Everything is read when it is asked for; nothing is kept between two questions.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson

from ngym.errors import UsageError
from ngym.plot.runs import ELAPSED, METRICS, RECIPE, STEP, metrics_file, read_recipe
from ngym.schema import Json
from ngym.view.growing_index import path_text

ADVANTAGES = "advantages.jsonl"  # beside ROLLOUTS: a line for each step
ROLLOUTS, HELD_OUT, POLICY = "rollouts.jsonl", "eval_rollouts.jsonl", "policy"
READ = (METRICS, RECIPE, ROLLOUTS, HELD_OUT)  # of a run's folder
PIECE_BYTES = 4 << 20  # of metrics in one answer
TAIL_BYTES = 256 << 10  # in which the last values are looked for
MARK_BYTES = 64  # before a cursor, which distinguish a file that was cut from one that grew
PACKED_ENTRIES = 2000
WAITED_S, WAITED_STEPS = 60.0, 5.0  # a run that logged nothing for so long, and for so many of its steps, has stopped
BEGINNING = "0"


@dataclass(frozen=True)
class TrainingRun:
    """folder: of the run. metrics: its metrics.jsonl. recipe, rollouts, held_out: None where there is no such file.

    held_out: the rollouts of its evaluations.
    """

    id: str
    name: str
    folder: Path
    metrics: Path
    recipe: Path | None
    rollouts: Path | None
    held_out: Path | None = None


class _Tail(NamedTuple):
    """The last entries of a file, and when it was last written to (seconds since 1970)."""

    entries: list[Json]
    written: float


def is_training(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def training_run(id: str, place: Path, name: str | None = None) -> TrainingRun:
    """A run by its folder or its file of metrics. Raises UsageError: there are no metrics."""
    metrics = metrics_file(place)
    folder = metrics.parent

    def there(file: str) -> Path | None:
        return folder / file if (folder / file).is_file() else None

    name = name or folder.resolve().name
    return TrainingRun(id, name, folder, metrics, there(RECIPE), there(ROLLOUTS), there(HELD_OUT))


def summary(run: TrainingRun) -> Json:
    """An entry of the list of runs. steps: the last one that was logged. growing: whether more is expected.

    Raises:
        UsageError: the metrics cannot be read.
    """
    tail = _tail(run.metrics)
    last: dict[str, float | None] = {}
    for entry in tail.entries:
        last |= _numbers(entry)
    steps = last.pop(STEP, None) or 0
    return {
        "id": run.id,
        "name": run.name,
        "path": path_text(run.folder),
        "kind": "training",
        "steps": steps,
        "last": last,
        "growing": _is_growing(run, tail),
    }


def metrics(run: TrainingRun, after: str = BEGINNING) -> Json:
    """The whole lines behind a cursor, as columns with null where an entry has no number; at most a piece of the file.

    `next` is the cursor to continue from, `more` whether there is already more. `reset`: the file is not the one that
    the cursor was given for, because the run was taken back to a checkpoint; these entries are those from its beginning.

    Raises:
        UsageError: the file cannot be read, or the cursor is invalid.
    """
    try:
        with run.metrics.open("rb") as file:
            start = _cursor_position(after)
            reset = start > 0 and _cursor(file, start) != after
            start = 0 if reset else start
            file.seek(start)
            piece = file.read(PIECE_BYTES)
            if len(piece) == PIECE_BYTES:
                piece += file.readline()
            end = piece.rfind(b"\n") + 1
            more = len(piece) >= PIECE_BYTES and bool(file.read(1))
            following = _cursor(file, start + end)
    except OSError as error:
        raise UsageError(f"{run.metrics}: cannot be read: {error.strerror}") from None
    return {"next": following, "more": more, "reset": reset, **_columns(_entries(piece[:end]))}


def config(run: TrainingRun) -> Json:
    """The recipe as it was resolved, flat by dotted keys, and as it is written. Secrets are references in it (ng_train).

    Raises:
        UsageError: it is not YAML.
    """
    if run.recipe is None:
        return {"recipe": {}, "text": None}
    recipe = read_recipe(run.recipe)
    return {"recipe": recipe.values, "text": recipe.text}


def samples(run: TrainingRun) -> Json:
    """The way to find the rollouts of a step among those of the run: a field of a row, and how reliable it is.

    A row of rollouts.jsonl says how many batches the oldest weights in it had learned (`_ng_train.oldest`; the filter
    `learned:N`). The step that trained it is the next one; with `max_lag: n` one of the next n + 1.
    A held-out rollout says it in the same field: `learned:10` are those of the evaluation after step 10.
    """
    recipe = config(run)["recipe"]
    if run.rollouts is None:
        source = recipe.get("data.path")
        learned = (
            f"this run learned from a finished file, {source}, whose rows do not say in which step they were trained"
        )
        return {"field": None, "max_lag": None, "note": learned if source else "this run kept no rollouts"}
    lag = recipe.get("rollouts.max_lag", 0)
    notes = [f"with max_lag {lag} a step also trains rollouts of the weights before"] if lag else []
    if (recipe.get("rollouts.dynamic_sampling") or 1) > 1:
        notes.append("with dynamic_sampling some of them taught nothing and were left out")
    return {"field": "learned", "max_lag": lag, "note": "; ".join(notes) or None}


def training_values(rollouts: Path, rollout_id: str) -> Json | None:
    """The mean advantage of a rollout's tokens as the trainer had it, and the last step that trained it.

    An empty object: no step trained it (yet). None: there is no such record.
    """
    record: Json = {}
    try:
        with rollouts.with_name(ADVANTAGES).open("rb") as file:
            for line in file:
                if rollout_id.encode() not in line:
                    continue
                with suppress(ValueError, LookupError, TypeError):  # a torn line, or another file of this name
                    entry = orjson.loads(line)
                    record = {"step": entry["step"], "advantage": float(entry["advantages"][rollout_id])}
    except OSError:
        return None
    return record


def pack_runs(runs: Iterable[TrainingRun]) -> Json:
    """Everything of these runs for an exported page, by their ids; of many entries some, evenly, and all evaluations."""
    some = list(runs)
    return {
        "runs": [summary(run) for run in some],
        "metrics": {run.id: _thin(run) for run in some},
        "config": {run.id: config(run) for run in some},
        "samples": {run.id: samples(run) for run in some},
    }


def _thin(run: TrainingRun) -> Json:
    lines = run.metrics.read_bytes()
    entries = list(_entries(lines[: lines.rfind(b"\n") + 1]))
    every = math.ceil(len(entries) / PACKED_ENTRIES) or 1
    evaluation = ("eval/", "val/")
    selected = [e for place, e in enumerate(entries) if place % every == 0 or any(n.startswith(evaluation) for n in e)]
    return {"next": BEGINNING, "more": False, "reset": False, **_columns(selected)}


def _columns(entries: Iterable[Json]) -> Json:
    columns: dict[str, list[float | None]] = {}
    count = 0
    for entry in entries:
        for name, value in _numbers(entry).items():
            column = columns.setdefault(name, [])
            column.extend([None] * (count - len(column)))
            column.append(value)
        count += 1
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return {"entries": count, "columns": columns}


def _entries(lines: bytes) -> Iterator[Json]:
    """The entries with a step; others are skipped: a page that shows the rest is more useful than an error."""
    for line in lines.splitlines():
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get(STEP), int | float):
            yield entry


def _numbers(entry: Json) -> dict[str, float | None]:
    """Its numbers; null for values that are not finite."""
    return {
        name: value
        for name, value in entry.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _tail(file: Path) -> _Tail:
    try:
        with file.open("rb") as opened:
            written = os.fstat(opened.fileno()).st_mtime
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL_BYTES))
            tail = opened.read()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    first = tail.find(b"\n") + 1 if size > TAIL_BYTES else 0
    return _Tail(list(_entries(tail[first : tail.rfind(b"\n") + 1])), written)


def _is_growing(run: TrainingRun, tail: _Tail) -> bool:
    """Not if its policy was saved after the last entry, nor if far more time has passed than its steps take."""
    policy = run.folder / POLICY
    if policy.is_dir() and policy.stat().st_mtime >= tail.written:
        return False
    times = [entry[ELAPSED] for entry in tail.entries if isinstance(entry.get(ELAPSED), int | float)]
    longest = max((later - earlier for earlier, later in pairwise(times[-10:])), default=0.0)
    return time.time() - tail.written < max(WAITED_S, WAITED_STEPS * longest)


def _cursor_position(cursor: str) -> int:
    place = cursor.partition("-")[0]
    if not place.isascii() or not place.isdigit():
        raise UsageError(
            f"after={cursor!r:.40}: no place in a file of metrics; give the `next` of an earlier answer, or 0"
        )
    return int(place)


def _cursor(file: BinaryIO, place: int) -> str:
    """A position in the file, and a check on the bytes before it."""
    start = max(0, place - MARK_BYTES)
    file.seek(start)
    return f"{place}-{zlib.crc32(file.read(place - start)):08x}"
