"""Every combination of some values is a run: checked before the first starts, one after another, a table at the end.

runs/grpo/                  the sweep's folder: the recipe's `output`
    lr=1e-6,seed=0/         a run's folder, as any
    lr=1e-6,seed=0.log      what it said
    sweep.jsonl             how each ended

Each is a process of its own, so one that crashes is a row of the table. The same command again skips what is finished, and
begins the others anew; with --resume those that have a checkpoint go on from it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ngym.errors import ConfigError, NgymError, UsageError
from ngym.files.file_lock import held_folder

from ..checkpoints.store import FOLDER as CHECKPOINTS
from ..output_files import METRICS, POLICY, RESOLVED
from ..recipe.recipe import as_yaml, read_launch
from ..train import OTHERWISE, checked
from . import child_process, results
from .grid import Axis, Combination, axes, combinations
from .results import Outcome

INTERRUPTED = 130


class Run(NamedTuple):
    combination: Combination
    folder: Path
    recipe: str  # as it will stand in the run's folder


def main(
    files: Sequence[str],
    overrides: Sequence[str],
    sweeps: Sequence[str],
    *,
    overwrite: bool,
    resume: bool,
) -> Path:
    """Run a recipe with every combination of the values; see `ng_train --help`. Returns the sweep's folder.

    Raises:
        UsageError: one of them cannot run; none was started.
        NgymError: some failed. FileLocked: another process sweeps there.
    """
    folder, runs = planned(files, overrides, sweeps)
    folder.mkdir(parents=True, exist_ok=True)
    with held_folder(folder, OTHERWISE):
        _sweep(folder, runs, files, overrides, overwrite, resume)
    return folder


def _sweep(
    folder: Path, runs: Sequence[Run], files: Sequence[str], overrides: Sequence[str], overwrite: bool, resume: bool
) -> None:
    names = [run.combination.name for run in runs]
    earlier = results.read(folder)
    others = [outcome for name, outcome in earlier.items() if name not in names]  # of other values in the same folder
    known = {} if overwrite else _finished(earlier, runs)
    for run in runs:
        if run.combination.name in known:
            print(f"{run.folder}: finished already, skipped", flush=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what runs is ended, and the table is shown
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup
            signal.signal(number, _leave)
    try:
        for place, run in enumerate(runs, 1):
            if run.combination.name not in known:
                print(f"\n[{place}/{len(runs)}] {run.combination.name}", flush=True)
                try:
                    _run(run, files, overrides, resume, known)
                finally:
                    redone = {**earlier, **known}  # until a run is done again, its earlier outcome counts
                    results.write(folder, others + [redone[name] for name in names if name in redone])
    finally:
        ended = [known[name] for name in names if name in known]
        print()
        results.show(ended, [name for name in names if name not in known])
    failed = sum(outcome.status == "failed" for outcome in ended)
    if failed:
        raise NgymError(f"{failed} of {len(runs)} runs failed; what they said is in {folder}/*.log")


def planned(files: Sequence[str], overrides: Sequence[str], sweeps: Sequence[str]) -> tuple[Path, list[Run]]:
    """The sweep's folder and its runs, each of which can be run as far as can be told.

    Raises:
        UsageError: they cannot.
    """
    if read_launch().launched:
        raise UsageError(
            "--sweep starts its runs itself, and a launcher would start the sweep on every rank: leave it out"
        )
    wanted = axes(sweeps)
    _refuse_settled(wanted, overrides)
    return _planned(files, overrides, combinations(wanted))


def _refuse_settled(wanted: Sequence[Axis], overrides: Sequence[str]) -> None:
    """A key that is swept is not given another value, and `output` is where the sweep goes."""
    settled = {override.partition("=")[0].lstrip("+") for override in overrides}
    wrong = [
        f"--sweep {axis.key}: {axis.key} is among the overrides, too; keep one of the two"
        for axis in wanted
        if axis.key in settled
    ]
    if any(axis.key == "output" for axis in wanted):
        wrong.append("--sweep output: each run gets a folder of its own under the recipe's output; leave it out")
    if wrong:
        raise UsageError("\n".join(wrong))


def _planned(files: Sequence[str], overrides: Sequence[str], wanted: Sequence[Combination]) -> tuple[Path, list[Run]]:
    """The sweep's folder and all runs, each of which has a recipe without a mistake."""
    runs: list[Run] = []
    folders: set[Path] = set()
    mistakes: defaultdict[str, list[str]] = defaultdict(list)
    for combination in wanted:
        try:
            words = [*overrides, *combination.overrides]
            parent = checked(files, words)[0].output
            recipe, tree = checked(files, [*words, _output(parent / combination.name)])
        except ConfigError as error:
            for line in str(error).splitlines():
                mistakes[line].append(combination.name)
            continue
        folders.add(parent)
        runs.append(Run(combination, recipe.output, as_yaml(recipe, tree)))
    if mistakes:
        raise ConfigError("\n".join(_told(line, names, len(wanted)) for line, names in mistakes.items()))
    if len(folders) > 1:
        raise UsageError("output depends on a key that is swept; name one folder for the sweep: output=runs/sweep")
    return folders.pop(), runs


def _told(line: str, names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return line
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{line} (in the run {names[0]}{more})"


def _output(folder: Path) -> str:
    return f"output={json.dumps(str(folder))}"


def _finished(earlier: dict[str, Outcome], runs: Sequence[Run]) -> dict[str, Outcome]:
    """What an earlier sweep in this folder has done already.

    Raises:
        UsageError: a folder holds a run of another recipe.
    """
    finished: dict[str, Outcome] = {}
    others: list[Path] = []
    for run in runs:
        resolved = run.folder / RESOLVED
        if resolved.exists() and resolved.read_text(encoding="utf-8") != run.recipe:
            others.append(run.folder)
        name = run.combination.name
        if name in earlier and earlier[name].status == "finished" and (run.folder / POLICY).exists():
            finished[name] = earlier[name]
    if others:
        raise UsageError(
            "\n".join(
                f"{path}: holds a run of another recipe; choose another output=FOLDER, or pass --overwrite"
                for path in others
            )
        )
    return finished


def _run(run: Run, files: Sequence[str], overrides: Sequence[str], resume: bool, known: dict[str, Outcome]) -> None:
    """Run it, and enter its outcome into `known`, also when it is interrupted."""
    name, values = run.combination
    goes_on = resume and any((run.folder / CHECKPOINTS).glob("*"))
    how = "--resume" if goes_on else "--overwrite"
    words = [*files, *overrides, *run.combination.overrides, _output(run.folder), how]
    began, earlier = time.monotonic(), None if goes_on else _version(run.folder / METRICS)

    def enter(status: results.Status, code: int, problem: str | None) -> None:
        seconds = round(time.monotonic() - began, 1)
        file = run.folder / METRICS
        # a run that never began to train has none; what is there is an earlier run's
        metrics = {} if _version(file) == earlier else results.last_metrics(file)
        known[name] = Outcome(name, values, status, code, seconds, problem, metrics)

    try:
        ended = child_process.run([sys.executable, "-m", "ngym", "train", *words], run.folder.with_name(f"{name}.log"))
    except (KeyboardInterrupt, SystemExit):
        enter("interrupted", INTERRUPTED, None)
        raise
    failed = ended.exit_code != 0
    enter("failed" if failed else "finished", ended.exit_code, ended.last if failed else None)


def _version(file: Path) -> tuple[int, ...] | None:
    """Tells a file from one that takes its place."""
    found = file.stat() if file.exists() else None
    return found and (found.st_ino, found.st_size, found.st_mtime_ns)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
