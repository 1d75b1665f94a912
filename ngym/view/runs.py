"""The opened runs: the named rollout files and training runs, and those in the named folders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from ngym.did_you_mean import near_file
from ngym.errors import NotFound, UsageError
from ngym.files.atomic import COMPRESSED
from ngym.net.auth import wrong_url
from ngym.schema import Json, is_failed_attempt
from ngym.view.growing_index import Extent, Index, path_text
from ngym.view.rows import RunRows
from ngym.view.stats import Stats
from ngym.view.tokens import row_tokens, tokenizer_file
from ngym.view.training import READ, ROLLOUTS, TrainingRun, is_training, summary, training_run, training_values

MAX_DEPTH = 3
MAX_RUNS = 100
MAX_FILES = 2000  # that are looked at in the folders
PROBE_BYTES = 8 << 20  # bytes of a file's first line, to tell what it is
SUFFIX, FAILED = ".jsonl", "_failures"
COMPANION_SUFFIXES = (
    "_materialized_inputs",
    "_tasks",
    "metrics",
)  # ends of the names of other files of a run, which may be empty
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "policy", "checkpoints"})
MAX_CLASSES = 8  # of failures, in the list of runs
# Rows of other programs may name no task, and are in no group.
AGENTS = """
SELECT agent FROM groups WHERE agent IS NOT NULL UNION SELECT agent FROM rows WHERE g IS NULL AND agent IS NOT NULL
"""
REWARDS = """
SELECT sum(total) * 1.0 / sum(scored), 1 - sum(scored) * 1.0 / sum(n) FROM (
    SELECT total, scored, n FROM groups
    UNION ALL SELECT sum(reward), count(reward), sum(failure IS NULL) FROM rows WHERE g IS NULL
)
"""
RECENT_S = 10.0  # a file that was written to so recently grows
KEYS = (b'"response"', b'"failure"')
REMEDY = "ng_view shows the rollouts of ng_collect_rollouts and the folders of ng_train"


class RolloutRun:
    """The rollouts of one collection, or of one training run."""

    def __init__(self, id: str, name: str, output: Path, tokenizer: Path | None) -> None:
        self.id = id
        self.name = name
        self.path = output
        self.index = Index(output, _failures(output))
        self.rows = RunRows(self.index)
        self.stats = Stats(self.rows)
        self._tokenizer = tokenizer
        self._cached: tuple[int, Json] | None = None  # of a version of the index

    def tokens(self, seq: int) -> Json:
        """A rollout's tokens. Raises NotFound: there is no such row."""
        line = self.index.line(seq)
        (row,) = self.rows.rows([seq])
        advantage = (self.trained(seq) or row)["advantage"]
        return row_tokens(line, advantage, tokenizer_file(self._tokenizer, self.path))

    def trained(self, seq: int) -> Json | None:
        """The trainer's record of a rollout; None: no trainer recorded it."""
        (row,) = self.rows.rows([seq])
        known = self.path.name == ROLLOUTS and row["rollout_id"]
        return training_values(self.path, row["rollout_id"]) if known else None

    def as_json(self) -> Json:
        """Its line in the list of runs."""
        extent = self.index.extent()
        growing = self.index.reading_on or _is_growing(self.index.paths.values())
        if self._cached is None or self._cached[0] != extent.version:
            self._cached = (extent.version, self._facts(extent))
        return {
            "id": self.id,
            "name": self.name,
            "path": path_text(self.path),
            "kind": "rollouts",
            "rows": extent.rows,
            "failures": extent.failures,
            "modified": _modified_at(self.path),
            "bytes": extent.bytes,
            "indexed_bytes": extent.indexed_bytes,
            "growing": growing,
            "head": _head(self.path) if growing else None,
            "error": self.index.error,
            "note": self.index.note,
            **self._cached[1],
        }

    def _facts(self, extent: Extent) -> Json:
        if extent.version < 0:
            return {
                "bad_lines": 0,
                "bad": [],
                "run_id": None,
                "mean_reward": None,
                "unscored_share": None,
                "environments": [],
                "has_tokens": False,
                "fields": [],
                "tool_errors": 0,
                "failure_classes": [],
            }
        with self.index.reading() as database:
            bad = database.execute("SELECT part, line, problem FROM bad_lines ORDER BY part, line LIMIT 20").fetchall()
            run_id = database.execute("SELECT run_id FROM texts ORDER BY seq LIMIT 1").fetchone()
            agents = database.execute(AGENTS)
            classes = database.execute(
                "SELECT failure, count(*) AS n FROM rows WHERE failure IS NOT NULL GROUP BY failure ORDER BY n DESC LIMIT ?",
                (MAX_CLASSES,),
            ).fetchall()
            (tool_errors,) = database.execute("SELECT count(*) FROM rows WHERE tool_errors > 0").fetchone()
            mean_reward, unscored_share = database.execute(REWARDS).fetchone()
            return {
                "bad_lines": extent.bad,
                "bad": [
                    f"{path_text(self.index.paths[part].name)}:{line + 1}: {problem}" for part, line, problem in bad
                ],
                "run_id": run_id[0] if run_id else None,
                "mean_reward": mean_reward,
                "unscored_share": unscored_share,
                "environments": [agent for (agent,) in agents],
                "has_tokens": database.execute("SELECT 1 FROM rows WHERE tokens LIMIT 1").fetchone() is not None,
                "fields": [name for (name,) in database.execute("SELECT name FROM fields ORDER BY name")],
                "tool_errors": tool_errors,
                "failure_classes": [{"class": name, "count": count} for name, count in classes],
            }


class OpenedRuns(NamedTuple):
    """Everything that is shown; ids are r1, r2, ... and t1, t2, ..."""

    rollouts: dict[str, RolloutRun]
    training: dict[str, TrainingRun]

    def rollout_run(self, id: str) -> RolloutRun:
        if id not in self.rollouts:
            raise NotFound(f"no run {id!r:.40} with rollouts; there are {', '.join(self.rollouts) or 'none'}")
        return self.rollouts[id]

    def training_run(self, id: str) -> TrainingRun:
        if id not in self.training:
            raise NotFound(f"no training run {id!r:.40}; there are {', '.join(self.training) or 'none'}")
        return self.training[id]

    def id_of(self, output: Path | None) -> str | None:
        """The run with this file's rollouts, if it was opened."""
        own = None if output is None else output.resolve()
        return next((id for id, run in self.rollouts.items() if run.path == own), None)

    def as_json(self) -> list[Json]:
        """The list of runs."""
        return [run.as_json() for run in self.rollouts.values()] + self.training_as_json()

    def training_as_json(self) -> list[Json]:
        return [_summary(run) for run in self.training.values()]

    def start(self) -> None:
        for run in self.rollouts.values():
            run.index.start()

    def close(self) -> None:
        for run in self.rollouts.values():
            run.index.stop()  # all at once: one of them may wait for another
        for run in self.rollouts.values():
            run.index.close()


def _summary(run: TrainingRun) -> Json:
    try:
        return summary(run)
    except UsageError as error:  # its files are gone; the others are still there
        problem = {
            "id": run.id,
            "name": run.name,
            "path": path_text(run.folder),
            "kind": "training",
            "steps": 0,
            "last": {},
        }
        return {**problem, "growing": False, "error": str(error)}


def open_runs(paths: Sequence[Path], tokenizer: Path | None = None) -> OpenedRuns:
    """The runs in these files and folders.

    Args:
        tokenizer: the folder with the tokenizer of all of them; None: each run's record names it.

    Raises:
        UsageError: one of them is not there, or holds nothing to show.
    """
    outputs: dict[Path, None] = {}
    folders: dict[Path, None] = {}
    for path in paths:
        files = list(_in(path))
        if not files:
            raise UsageError(f"{path}: nothing to show in it; {REMEDY}")
        for kind, place in files:
            (folders if kind == "training" else outputs)[place] = None
    if len(outputs) > MAX_RUNS:
        raise UsageError(f"{len(outputs):,} runs are too many to show at once, at most {MAX_RUNS}; name some of them")
    names = _names([*outputs, *folders])
    return OpenedRuns(
        {
            id: RolloutRun(id, names[path], path, tokenizer)
            for number, path in enumerate(outputs, 1)
            if (id := f"r{number}")
        },
        {id: training_run(id, path, names[path]) for number, path in enumerate(folders, 1) if (id := f"t{number}")},
    )


def _in(path: Path) -> Iterator[tuple[str, Path]]:
    """("rollouts", file) and ("training", folder)."""
    if path.is_dir():
        yield from _in_folder(path.resolve(), path.resolve())
    elif path.is_file() or _failures(path).is_file():  # no rollout of a run was finished: its failures tell why
        if path.name == "metrics.jsonl":
            yield from _in_folder(path.resolve().parent, path.resolve().parent)
            return
        output = _output(path.resolve())
        if not _has_rollouts(output):
            if path.suffix in COMPRESSED:
                raise UsageError(f"{path}: the viewer reads no compressed files; unpack it first")
            raise UsageError(f"{path}: its first line is not a rollout; {REMEDY}")
        yield "rollouts", output
    else:
        raise UsageError(f"{path}: there is no such file or folder{near_file(path)}")


def _in_folder(folder: Path, top: Path) -> Iterator[tuple[str, Path]]:
    """Runs of which a file is a link that leads out of the folder are passed over."""
    known: set[Path] = set()
    for place, folders, files in os.walk(folder):
        here = Path(place)
        depth = len(here.relative_to(top).parts)
        folders[:] = sorted(
            name for name in folders if name not in SKIPPED_FOLDERS and name[0] != "." and depth < MAX_DEPTH
        )
        if is_training(here) and all(_is_inside(here / name, top) for name in READ):
            yield "training", here
        for name in sorted(files):
            output = _output(here / name)
            if output.suffix == SUFFIX and output not in known and len(known) < MAX_FILES:
                known.add(output)
                if all(_is_inside(path, top) for path in (output, _failures(output))) and _has_rollouts(output):
                    yield "rollouts", output


def _is_inside(path: Path, top: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(top)


def _output(file: Path) -> Path:
    """The file of rollouts to which a file of failures belongs; any other file itself."""
    stem = file.stem.removesuffix(FAILED)
    return file.with_name(stem + SUFFIX) if file.suffix == SUFFIX and stem and stem != file.stem else file


def _failures(output: Path) -> Path:
    """As ngym.collect.collection_files.CollectionPaths has it, whose import takes longer than all of this."""
    return output.with_name(f"{output.stem}{FAILED}{SUFFIX}")


def _has_rollouts(output: Path) -> bool:
    """Whether the first row of this file, or of its failures, is one; an empty file may become one."""
    firsts = [first for path in (output, _failures(output)) if path.is_file() and (first := _first_line(path))]
    if not firsts:
        return output.is_file() and output.stat().st_size == 0 and not output.stem.endswith(COMPANION_SUFFIXES)
    return any(_is_rollout(first) for first in firsts)


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return next((line for line in iter(lambda: file.readline(PROBE_BYTES), b"") if line.strip()), b"")


def _is_rollout(line: bytes) -> bool:
    if not any(key in line for key in KEYS):
        return False
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return True  # corrupt, torn or long; the index reports it
    return isinstance(row, dict) and ("response" in row or is_failed_attempt(row))


def _names(paths: Iterable[Path]) -> dict[Path, str]:
    """The shortest endings of the paths that tell them apart; rollout files without their suffix."""
    bare = {path: path.with_suffix("") if path.suffix == SUFFIX else path for path in paths}
    names: dict[Path, str] = {}
    for path, own in bare.items():
        others = [other for each, other in bare.items() if each != path]
        parts = own.parts
        length = 1
        while length < len(parts) and any(other.parts[-length:] == parts[-length:] for other in others):
            length += 1
        names[path] = path_text("/".join(parts[-length:]) if length < len(parts) else own)
    return names


def _head(output: Path) -> str | None:
    """The address of the run of ng_run in the file's folder, or in the one above: it shows the rollouts that still run."""
    from ngym.supervise.head_file import find_running

    head = next(filter(None, map(find_running, (output.parent, output.parent.parent))), None)
    return None if head is None or wrong_url(head.url) else head.url  # a folder may hold anything


def _modified_at(path: Path) -> float | None:
    """Seconds since 1970."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _is_growing(paths: Iterable[Path]) -> bool:
    """Whether a process writes one of them: holds its lock, as our collector does, or has just written to it."""
    locked = _locked_inodes()
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        if stat.st_ino in locked or time.time() - stat.st_mtime < RECENT_S:
            return True
    return False


def _locked_inodes() -> frozenset[int]:
    """Files with an flock for writing, according to the kernel (Linux only); this does not block other processes."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return frozenset()
    fields = [line.split() for line in lines]
    return frozenset(
        int(each[5].rpartition(":")[2]) for each in fields if each[1:2] == ["FLOCK"] and each[3] == "WRITE"
    )
