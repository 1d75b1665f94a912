"""Sweeps: a grid of recipes, one training process for each, and a table of their results.

runs/grpo/                  the sweep's folder: the recipe's `output`
    lr=1e-6,seed=0/         a run's folder
    lr=1e-6,seed=0.log      its output
    sweep.jsonl             how each run ended

A run that crashes becomes a row of the table. The same command again skips finished runs and starts the others from
scratch; with --resume, those that have a checkpoint continue from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import FrameType
from typing import IO, Literal, NamedTuple

import orjson
import yaml

from ngym.errors import ConfigError, NgymError, UsageError
from ngym.files import jsonl
from ngym.files.atomic import held_folder, write_whole
from ngym.runtime.event_loop import await_exit, deferred_signals
from ngym.runtime.live_region import sanitize
from ngym.schema import Json

from .checkpoints import FOLDER as CHECKPOINTS
from .checkpoints import FREE, differences, read_recipe_of_run
from .recipe.recipe import SWEEP, read_launch
from .recipe.recipe_reader import as_yaml
from .run_folder import METRICS, POLICY, RESOLVED
from .train import OTHERWISE, check_recipe

SHUTDOWN_S = 60  # seconds for its child processes to stop and its last output to arrive
Status = Literal["finished", "failed", "interrupted"]
FILE = "sweep.jsonl"
MAX_LINE_CHARS = 1000  # characters of a plain line, which goes to a file and does not wrap
SHOWN_METRICS = ("loss", "reward/mean", "frac_unscored")
NOT_SHOWN = ("low", "high", "count", "failed", "pass")
UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
INTERRUPTED = 130


class FinishedRun(NamedTuple):
    """exit_code: negative for a signal that killed it. last: the last nonempty line of its output."""

    exit_code: int
    last: str


class TimeWarning:
    """A scheduler's warning of the time limit (SIGUSR1): the run in progress gets it too, and no other run starts."""

    def __init__(self) -> None:
        self.received = False
        self._process: subprocess.Popen[bytes] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        self.received = True
        self._forward()

    def forward_to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on this process gets the warning, also one that arrived while it started."""
        self._process = process
        if self.received:
            self._forward()

    def _forward(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)  # does nothing after its end


def run_command(command: Sequence[str], log: Path, warning: TimeWarning | None = None) -> FinishedRun:
    """Run a command until it ends. Interrupted here (Ctrl-C), it is interrupted too, and its end is awaited.

    It runs in a separate process group, so that Ctrl-C reaches it once, through us, with all its child processes.
    SWEEP in its environment is the folder of the log.
    """
    log.write_bytes(b"")  # one that cannot be made ends the sweep here, and not its reader later
    process: subprocess.Popen[bytes] | None = None
    reader: threading.Thread | None = None
    last = [""]
    try:
        with deferred_signals():
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, SWEEP: str(log.parent.absolute())},
            )
            if warning is not None:
                warning.forward_to(process)
            assert process.stdout is not None
            reader = threading.Thread(target=_copy, args=(process.stdout, log, last), daemon=True)
            reader.start()
        code = await_exit(process)
    except BaseException:
        if process is not None:
            _stop_process(process)
        raise
    finally:
        if reader is not None:
            reader.join(SHUTDOWN_S)
    return FinishedRun(code, last[0])


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process; kill it if that takes too long, or on a second interrupt here.

    Where Ctrl-C is ignored, as for a script's `&`, the process ignores it too, and is terminated.
    """
    with deferred_signals():
        if process.poll() is not None:
            return
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.killpg(process.pid, signal.SIGTERM if ignored else signal.SIGINT)
    try:
        with suppress(subprocess.TimeoutExpired):
            await_exit(process, SHUTDOWN_S)
    finally:
        with deferred_signals():
            running = process.poll() is None
        if running:
            os.killpg(process.pid, signal.SIGKILL)
            await_exit(process)


def _copy(stream: IO[bytes], log: Path, last: list[str]) -> None:
    """Copy the output of a run to its log and to standard output. It is read to its end, also if one of these cannot be
    written: without a reader, the run would wait forever.
    """
    with log.open("wb", buffering=0) as file:
        places: dict[str, Callable[[bytes], object]] = {str(log): file.write, "standard output": _print}
        for raw in stream:
            for name, write in [*places.items()]:
                try:
                    write(raw)
                except OSError as error:
                    del places[name]
                    with suppress(OSError):
                        print(f"{name}: the run's output is lost: {error.strerror}", file=sys.stderr, flush=True)
            last[0] = raw.decode(errors="replace").strip() or last[0]


def _print(line: bytes) -> None:
    print(line.decode(errors="replace"), end="", flush=True)


class SweepOutcome(NamedTuple):
    """One run that was started.

    values: of the swept keys. metrics: the last value of each metric that ranks runs. problem: of a failed run, the
    last line of its output.
    """

    run: str
    values: dict[str, str]
    status: Status
    exit_code: int
    seconds: float
    problem: str | None
    metrics: dict[str, float]


def read(folder: Path) -> dict[str, SweepOutcome]:
    """The outcomes of an earlier sweep, by the name of the run; {} without one.

    Raises:
        UsageError: a line is not an outcome.
    """
    if not (folder / FILE).exists():
        return {}

    def wrong(row: dict[str, object]) -> str | None:
        return None if set(row) == set(SweepOutcome._fields) else "no outcome of a run; is this file of a sweep?"

    rows = [line.row for line in jsonl.check_lines(folder / FILE, wrong)]
    return {row["run"]: SweepOutcome(**row) for row in rows}


def summary(folder: Path) -> Json:
    """The output of `ng_train --sweep --json` at the end."""
    return {"output": str(folder), "runs": [outcome._asdict() for outcome in read(folder).values()]}


def write(folder: Path, outcomes: Sequence[SweepOutcome]) -> None:
    """Rewrite the whole file."""
    write_whole(folder / FILE, b"".join(orjson.dumps(outcome._asdict()) + b"\n" for outcome in outcomes))


def last_metrics(file: Path) -> dict[str, float]:
    """The last loss, the last reward and the last held-out evaluation of a run's metrics.jsonl."""
    metrics: dict[str, float] = {}
    if file.exists():
        for line in jsonl.read(file):
            # JSON has no NaN or infinity; they are stored as null
            values = {name: math.nan if value is None else value for name, value in line.row.items()}
            metrics |= {name: value for name, value in values.items() if _is_shown(name)}
    return metrics


def show(outcomes: Sequence[SweepOutcome], waiting: Sequence[str]) -> None:
    """Print the table of a sweep. waiting: the names of runs that were not started."""
    from rich.console import Console
    from rich.table import Table

    names = sorted({name for outcome in outcomes for name in outcome.metrics}, key=_order)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("run", "status", *names, "seconds", ""):
        table.add_column(heading, justify="right" if heading in (*names, "seconds") else "left", overflow="fold")
    for outcome in outcomes:
        values = [f"{outcome.metrics[name]:.4g}" if name in outcome.metrics else "-" for name in names]
        status = outcome.status if outcome.status != "failed" else f"failed ({outcome.exit_code})"
        table.add_row(outcome.run, status, *values, f"{outcome.seconds:.0f}", sanitize(outcome.problem or ""))
    for run in waiting:
        table.add_row(run, "not started", *("-" for _ in names), "-", "")
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else MAX_LINE_CHARS).print(table)


def _is_shown(name: str) -> bool:
    last = name.rpartition("/")[2].partition("@")[0]
    return name in SHOWN_METRICS or (name.startswith(("eval/", "val/")) and last not in NOT_SHOWN)


def _order(name: str) -> tuple[int, str]:
    return (SHOWN_METRICS.index(name) if name in SHOWN_METRICS else len(SHOWN_METRICS), name)


LONGEST_VALUE, LONGEST_NAME = 40, 160  # characters; a file name may have 255 bytes


class Axis(NamedTuple):
    """A key of the recipe and its values, as written."""

    key: str
    values: list[str]


class Combination(NamedTuple):
    """One run of a sweep."""

    name: str
    values: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]


def axes(sweeps: Sequence[str]) -> list[Axis]:
    """The axes from arguments `key=value,value`.

    Raises:
        UsageError: an argument has another form, or a key or value occurs twice; one line for each mistake.
    """
    result: list[Axis] = []
    wrong: list[str] = []
    for sweep in sweeps:
        try:
            result.append(_axis(sweep))
        except UsageError as error:
            wrong.append(str(error))
    keys = Counter(axis.key for axis in result)
    wrong += [f"--sweep {key}: given {count} times; list all values once" for key, count in keys.items() if count > 1]
    if wrong:
        raise UsageError("\n".join(wrong))
    return result


def combinations(of: Sequence[Axis]) -> list[Combination]:
    """The cartesian product of the axes; the last one changes fastest."""
    ends = [axis.key.rpartition(".")[2] for axis in of]
    # the whole key if two would be equal
    labels = [end if ends.count(end) == 1 else axis.key for end, axis in zip(ends, of, strict=True)]
    words = [_file_names(axis.values) for axis in of]
    result = []
    for places in product(*(range(len(axis.values)) for axis in of)):
        parts = [f"{label}={word[place]}" for label, word, place in zip(labels, words, places, strict=True)]
        values = {axis.key: axis.values[place] for axis, place in zip(of, places, strict=True)}
        result.append(Combination(_shorten(LONGEST_NAME, ",".join(parts)), values))
    return result


def _axis(sweep: str) -> Axis:
    key, equals, values_text = sweep.partition("=")
    if not equals or not key:
        raise UsageError(f"--sweep {sweep!r} is not of the form key=value,value, such as optimizer.lr=1e-6,3e-6")
    text = f"[{values_text}]"
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "it cannot be read"
        raise UsageError(
            f"--sweep {sweep!r}: not a list of YAML values: {reason}; quote values with special characters"
        ) from None
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(text) or not node.value:
        raise UsageError(f"--sweep {sweep!r}: give at least one value, such as {key}=1,2")
    values = [text[value.start_mark.index : value.end_mark.index].strip() for value in node.value]
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise UsageError(f"--sweep {sweep!r}: the value {twice[0]} stands twice")
    return Axis(key, values)


def _file_names(values: Sequence[str]) -> list[str]:
    """Each value as a file name; equal ones get a hash."""
    words = [_shorten(LONGEST_VALUE, UNSAFE.sub("-", value.strip("\"'[]{} "))) for value in values]
    count = Counter(words)
    return [word if count[word] == 1 else f"{word}-{_hash(value)}" for word, value in zip(words, values, strict=True)]


def _shorten(length: int, word: str) -> str:
    """The word; if it is too long, its hash and its end, which distinguishes paths."""
    return word if len(word) <= length else f"{_hash(word)}-{word[9 - length :]}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class SweepRun(NamedTuple):
    combination: Combination
    folder: Path
    recipe: str  # as it will be in the run's folder


def main(
    files: Sequence[str], overrides: Sequence[str], sweeps: Sequence[str], *, overwrite: bool, resume: bool
) -> Path:
    """Run a recipe with every combination of the values; see `ng_train --help`. Returns the sweep's folder.

    Raises:
        UsageError: a run is invalid; none was started.
        NgymError: some runs failed. FileLocked: another process sweeps there.
    """
    folder, runs = plan_runs(files, overrides, sweeps)
    folder.mkdir(parents=True, exist_ok=True)
    with held_folder(folder, OTHERWISE):
        _sweep(folder, runs, files, overrides, overwrite, resume)
    return folder


def dry_run(files: Sequence[str], overrides: Sequence[str], sweeps: Sequence[str], *, as_json: bool) -> None:
    """Print the folder and the values of every run. Raises UsageError: a run has a mistake."""
    folder, runs = plan_runs(files, overrides, sweeps)
    if as_json:
        entries = [{"output": str(run.folder), "values": run.combination.values} for run in runs]
        print(orjson.dumps({"output": str(folder), "runs": entries}, option=orjson.OPT_INDENT_2).decode())
        return
    for run in runs:
        print(f"{run.folder}  {' '.join(run.combination.overrides)}")


def _sweep(
    folder: Path,
    runs: Sequence[SweepRun],
    files: Sequence[str],
    overrides: Sequence[str],
    overwrite: bool,
    resume: bool,
) -> None:
    names = [run.combination.name for run in runs]
    earlier = read(folder)
    others = [outcome for name, outcome in earlier.items() if name not in names]  # of other values in the same folder
    outcomes = {} if overwrite else _finished_outcomes(earlier, runs, resume)
    for run in runs:
        if run.combination.name in outcomes:
            print(f"{run.folder}: finished already, skipped", flush=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that child processes end and the table is shown
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, _exit_on_signal)
    warning = TimeWarning()
    signal.signal(signal.SIGUSR1, warning.note)
    try:
        for place, run in enumerate(runs, 1):
            if run.combination.name not in outcomes and not warning.received:
                print(f"\n[{place}/{len(runs)}] {run.combination.name}", flush=True)
                try:
                    _run(run, files, overrides, resume, outcomes, warning)
                finally:
                    redone = {**earlier, **outcomes}  # until a run is repeated, its earlier outcome counts
                    write(folder, others + [redone[name] for name in names if name in redone])
    finally:
        finished = [outcomes[name] for name in names if name in outcomes]
        print()
        show(finished, [name for name in names if name not in outcomes])
    if warning.received and (len(finished) < len(runs) or any(outcome.status == "interrupted" for outcome in finished)):
        print("interrupted by SIGUSR1, a scheduler's warning; --resume continues", flush=True)
        sys.exit(INTERRUPTED)
    failed = sum(outcome.status == "failed" for outcome in finished)
    if failed:
        raise NgymError(f"{failed} of {len(runs)} runs failed; their output is in {folder}/*.log")


def plan_runs(files: Sequence[str], overrides: Sequence[str], sweeps: Sequence[str]) -> tuple[Path, list[SweepRun]]:
    """The sweep's folder and its runs, checked as far as possible without starting them.

    Raises:
        UsageError: a run is invalid.
    """
    if read_launch().launched:
        raise UsageError(
            "--sweep starts its runs itself, and a launcher would start the sweep on every rank: leave it out"
        )
    sweep_axes = axes(sweeps)
    fixed_keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    wrong = [
        f"--sweep {axis.key}: {axis.key} is among the overrides, too; keep one of the two"
        for axis in sweep_axes
        if axis.key in fixed_keys
    ]
    if any(axis.key == "output" for axis in sweep_axes):
        wrong.append("--sweep output: each run gets a separate folder under the recipe's output; leave it out")
    if wrong:
        raise UsageError("\n".join(wrong))
    return _make_plan(files, overrides, combinations(sweep_axes))


def _make_plan(
    files: Sequence[str], overrides: Sequence[str], planned: Sequence[Combination]
) -> tuple[Path, list[SweepRun]]:
    """The sweep's folder and all runs, each with a valid recipe."""
    runs: list[SweepRun] = []
    folders: set[Path] = set()
    mistakes: defaultdict[str, list[str]] = defaultdict(list)
    for combination in planned:
        try:
            words = [*overrides, *combination.overrides]
            parent = check_recipe(files, words)[0].output
            recipe, tree = check_recipe(files, [*words, _output(parent / combination.name)])
        except ConfigError as error:
            for line in str(error).splitlines():
                mistakes[line].append(combination.name)
            continue
        folders.add(parent)
        runs.append(SweepRun(combination, recipe.output, as_yaml(recipe, tree)))
    if mistakes:
        raise ConfigError("\n".join(_with_run_names(line, names, len(planned)) for line, names in mistakes.items()))
    if len(folders) > 1:
        raise UsageError("output depends on a key that is swept; name one folder for the sweep: output=runs/sweep")
    return folders.pop(), runs


def _with_run_names(line: str, names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return line
    suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{line} (in the run {names[0]}{suffix})"


def _output(folder: Path) -> str:
    return f"output={json.dumps(str(folder))}"


def _finished_outcomes(
    earlier: dict[str, SweepOutcome], runs: Sequence[SweepRun], resume: bool
) -> dict[str, SweepOutcome]:
    """The runs that an earlier sweep in this folder finished. With `resume`, a run may differ in what `FREE` lists, and is
    continued.

    Raises:
        UsageError: a folder holds a run of another recipe.
    """
    finished: dict[str, SweepOutcome] = {}
    others: list[str] = []
    for run in runs:
        name, resolved = run.combination.name, run.folder / RESOLVED
        lines: list[str] = []
        if resolved.exists():
            before, now = read_recipe_of_run(resolved), yaml.safe_load(run.recipe)
            lines = differences(before, now, ("output",))
            fixed_lines = differences(before, now, FREE)
            if fixed_lines or (lines and not resume):
                remedy = f"{OTHERWISE}, or pass --overwrite" + ("" if fixed_lines else "; --resume continues it")
                others.append(f"{run.folder}: holds a run of another recipe ({(fixed_lines or lines)[0]}); {remedy}")
        if not lines and name in earlier and earlier[name].status == "finished" and (run.folder / POLICY).exists():
            finished[name] = earlier[name]
    if others:
        raise UsageError("\n".join(others))
    return finished


def _run(
    run: SweepRun,
    files: Sequence[str],
    overrides: Sequence[str],
    resume: bool,
    outcomes: dict[str, SweepOutcome],
    warning: TimeWarning,
) -> None:
    """Run it and store its outcome in `outcomes`, even if it is interrupted."""
    name, values = run.combination
    goes_on = resume and any((run.folder / CHECKPOINTS).glob("*"))
    mode = "--resume" if goes_on else "--overwrite"
    words = [*files, *overrides, *run.combination.overrides, _output(run.folder), mode]
    began, earlier = time.monotonic(), None if goes_on else _version(run.folder / METRICS)

    def enter(status: Status, code: int, problem: str | None) -> None:
        seconds = round(time.monotonic() - began, 1)
        file = run.folder / METRICS
        # a run that never began to train has no metrics; an existing file belongs to an earlier run
        metrics = {} if _version(file) == earlier else last_metrics(file)
        outcomes[name] = SweepOutcome(name, values, status, code, seconds, problem, metrics)

    try:
        result = run_command(
            [sys.executable, "-m", "ngym", "train", *words], run.folder.with_name(f"{name}.log"), warning
        )
    except (KeyboardInterrupt, SystemExit):
        enter("interrupted", INTERRUPTED, None)
        raise
    if warning.received and result.exit_code in (INTERRUPTED, -signal.SIGUSR1):  # the latter: before it could handle it
        enter("interrupted", INTERRUPTED, None)
        return
    failed = result.exit_code != 0
    enter("failed" if failed else "finished", result.exit_code, result.last if failed else None)


def _version(file: Path) -> tuple[int, ...] | None:
    """Distinguishes a file from one that replaces it."""
    status = file.stat() if file.exists() else None
    return status and (status.st_ino, status.st_size, status.st_mtime_ns)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
