"""The files of one collection: resuming, appending rows, progress, and replacement with `--overwrite`.

`--overwrite` writes the new files under `.new` names. When the first row (a rollout or a failed attempt) is on the
disk, each old file gets an `.old` name and its new one takes its place, `out.jsonl` last. A kill leaves one of three
states:

    .new files, none with a row     the old collection is valid; the next one removes the .new files
    .new files, one with a row      the next collection completes the replacement, before it does anything else
    no .new files                   the new collection is valid; the old one has the .old names
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import index
from pathlib import Path
from typing import NamedTuple

import orjson

from ngym.collect.aggregate import Aggregates
from ngym.collect.plan import InputCheck, PlannedRollout, input_rows, no_rows, plan_rollouts
from ngym.collect.rollout_rows import FailedAttempt, Outcome, stored_row_problem
from ngym.collect.rollout_scheduler import CollectionLimits, Gate, RolloutScheduler
from ngym.collect.run_record import CollectionSettings, RunRecord, remedy
from ngym.errors import UsageError
from ngym.files.atomic import WriteFailed, check_output, open_locked, sync_folder, whole_file, write_whole
from ngym.files.jsonl import READ_BYTES, Line
from ngym.files.row_log import RowLog
from ngym.option_names import another_output, option, option_name
from ngym.peers import Peers
from ngym.schema import Json, RolloutKey, is_failed_attempt, row_problem

TICK_S = 0.2

NEW, OLD = ".new", ".old"


class CollectionPaths(NamedTuple):
    """The paths of `out.jsonl` and of the files next to it, such as out_failures.jsonl."""

    output: Path
    failures: Path
    materialized: Path
    aggregates: Path
    run: Path

    @classmethod
    def for_output(cls, output: Path) -> CollectionPaths:
        def sibling(ending: str) -> Path:
            return output.with_name(output.stem + ending)

        siblings = ("_failures.jsonl", "_materialized_inputs.jsonl", "_aggregate_metrics.json", "_run.json")
        return cls(output, *map(sibling, siblings))

    def with_ending(self, ending: str) -> CollectionPaths:
        """The same files with another ending: NEW or OLD. A link is followed, so that a rename stays on its file system."""
        return CollectionPaths(*(Path(os.path.realpath(path) + ending) for path in self))


def recover(paths: CollectionPaths) -> None:
    """Complete an interrupted replacement, or remove the files of a collection that wrote no row.

    Raises:
        FileLocked: another process uses the output. WriteFailed: a file cannot be renamed.
    """
    new = paths.with_ending(NEW)
    if not any(path.exists() for path in new):
        return
    fd = open_locked(paths.output, paths.output, another_output())
    try:
        # `replace_files` renames the failures before the output, so an output alone is a replacement that has begun
        replaced = new.output.exists() and not new.failures.exists()
        if replaced or has_row(new.output) or has_row(new.failures):
            replace_files(paths)
        else:
            discard(paths)
    finally:
        os.close(fd)


def replace_files(paths: CollectionPaths) -> None:
    """Rename the old files to `.old` and the new ones to their final names; safe to repeat after a kill at any point.

    Old files without a rollout do not take the place of `.old` files with rollouts.

    Raises:
        WriteFailed: a file cannot be renamed; calling it again continues there.
    """
    new, old = paths.with_ending(NEW), paths.with_ending(OLD)
    keeps = _size(paths.output) > 0 or _size(old.output) == 0
    try:
        for name in ("aggregates", "run", "materialized", "failures", "output"):
            path, staged = getattr(paths, name), getattr(new, name)
            if not staged.exists():
                continue  # renamed before the kill
            if keeps:
                _keep(path, getattr(old, name))
            staged.rename(os.path.realpath(path))
        for folder in {path.parent for path in new}:
            sync_folder(folder)
    except OSError as error:
        raise WriteFailed(f"{paths.output}: cannot be replaced: {error.strerror}; its rows are untouched") from error


def discard(paths: CollectionPaths) -> None:
    """Remove the `.new` files, the output first (see `recover`)."""
    for path in paths.with_ending(NEW):
        path.unlink(missing_ok=True)


def has_row(path: Path) -> bool:
    """Whether the file has a complete line."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return any(b"\n" in part for part in iter(lambda: file.read(READ_BYTES), b""))


def _keep(path: Path, old: Path) -> None:
    """Also give the file its `.old` name, so that a kill never leaves its own name without a file."""
    old.unlink(missing_ok=True)
    if _size(path) == 0:
        return
    try:
        os.link(os.path.realpath(path), old)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, old)
        with old.open("rb") as file:
            os.fsync(file.fileno())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@dataclass
class Progress:
    """Progress of the plan: total rollouts, those finished or given up before this session, and the agents it needs.

    complete: whether the input was read to its end; until then `total` grows.
    replaced: the rows read before the start whose agent_ref names another agent than --agent, by that name.
    """

    total: int = 0
    complete: bool = False
    done: int = 0
    given_up: int = 0
    agents: set[str] = field(default_factory=set)
    replaced: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        """Rollouts to do in this session."""
        return self.total - self.done - self.given_up


class CollectionFiles:
    """The files of one collection, locked for this process. by: the field whose values form subsets of the metrics.

    The constructor locks; `prepare` checks the input and resumes or begins; `keep` appends; `finish` writes everything
    but rows. With `overwrite` the old files are untouched until the first row is kept (see the module).

    Raises:
        FileLocked, UsageError, WriteFailed: see RowLog.
    """

    def __init__(
        self,
        output: Path,
        source: CollectionSettings,
        *,
        by: str | None = None,
        on_stall: Callable[[str | None], None] = lambda reason: None,
    ) -> None:
        check_places(output, source.inputs)
        self.paths = CollectionPaths.for_output(output)
        self.source = source
        self.aggregates = Aggregates(by)
        self.progress = Progress()
        self.duplicates = 0
        self._on_stall = on_stall
        self._done: set[RolloutKey] = set()
        self._unsettled: list[Outcome] = []  # passed to the log when the run was cancelled
        self._failed: dict[RolloutKey, list[str]] = {}  # the class of each failed attempt
        self._record = RunRecord.new(self.paths.run)
        self._sent: MaterializedInputs | None = None
        self._check: InputCheck | None = None
        recover(self.paths)
        self._rows = RowLog(self.paths.output, _row_key, on_stall=on_stall)
        self._failures = RowLog(self.paths.failures, _failure_key, on_stall=on_stall)
        self._old: tuple[RowLog, RowLog] | None = None  # the logs that the first row replaces

    def prepare(
        self,
        *,
        resume: bool,
        overwrite: bool,
        max_attempts: int,
        agents: Collection[str] | None,
        command: list[str],
        tick: Callable[[str], None] = lambda text: None,
        starts: bool = False,
    ) -> None:
        """Do everything that precedes the first rollout. Reads only the first part of a large input, see `InputCheck`.

        Args:
            agents: the agents that exist; None if that is not known.
            tick: receives a progress text a few times a second.
            starts: whether agents are started for this collection; `progress.agents` then has all agents of the input.

        Raises:
            UsageError: bad input lines (all of them), existing output, or files of another run.
        """
        used = not (self._rows.empty and self._failures.empty)
        if used and not (resume or overwrite):
            raise UsageError(
                f"{self.paths.output} already holds rollouts; add {option('resume', True)} to continue that run, or "
                f"{option('overwrite', True)} to replace it"
            )
        if used and resume:
            self._continue(tick)
            self._materialize(agents, max_attempts, tick)
        else:
            if used:
                self._stage()
            self._read_input(agents, starts)
        self._record.begin(self.source, self.progress.total, command)

    @property
    def replaces(self) -> bool:
        """Whether an old collection is untouched until the first row of this one."""
        return self._old is not None

    @property
    def unwritten(self) -> str | None:
        """The reason why the file of materialized inputs could not be written; None if it was."""
        return self._sent.problem if self._sent is not None else None

    @property
    def run_id(self) -> str:
        return self._record.run_id

    def run(self, peers: Peers, limits: CollectionLimits, gate: Gate | None = None) -> RolloutScheduler:
        """The run whose outcomes go into these files: `run.outcomes(files.todo(...))`."""
        return RolloutScheduler(
            peers,
            limits,
            run_id=self.run_id,
            token_format=self.source.token_format,
            keep=self.keep,
            failed_before=self._failed_before,
            gate=gate,
        )

    async def todo(self, max_attempts: int) -> AsyncIterator[PlannedRollout]:
        """The rollouts that are neither done nor out of attempts.

        Raises:
            UsageError: bad lines in the part of a large input that `prepare` has not read; all are named.
        """
        plan = plan_rollouts(input_rows(self.source.inputs, self.source.recipe), self.source.recipe)
        for _, group in groupby(plan, lambda rollout: rollout.first):
            due = [rollout for rollout in group if not self._is_settled(rollout, max_attempts)]
            keys = tuple(rollout.key for rollout in due)
            for rollout in due:
                if self._check is not None:
                    self._check.raise_if_bad()
                    self._count_input()
                if self._sent is not None:
                    self._sent.add(rollout.row)
                yield rollout if keys == rollout.group else replace(rollout, group=keys)
        if self._check is not None:
            await self._check.finish()
            self._count_input()

    async def keep(self, outcome: Outcome) -> None:
        """Append an outcome's row; returns when it is on the disk."""
        log = self._failures if isinstance(outcome, FailedAttempt) else self._rows
        try:
            await log.append(orjson.dumps(outcome.row))
        except asyncio.CancelledError:
            self._unsettled.append(outcome)  # the caller no longer waits for it, but flush() writes it
            raise
        self._take_over()
        self._count(outcome)

    def _is_settled(self, rollout: PlannedRollout, max_attempts: int) -> bool:
        return rollout.key in self._done or self._failed_before(rollout) >= max_attempts

    def _failed_before(self, rollout: PlannedRollout) -> int:
        """Its failed attempts in earlier sessions."""
        return len(self._failed.get(rollout.key, ()))

    def _count(self, outcome: Outcome) -> None:
        if isinstance(outcome, FailedAttempt):
            self.aggregates.add_failure(outcome.row, final=outcome.final)
        else:
            self.aggregates.add(outcome.row)

    def finish(self, status: str) -> None:
        """Write the aggregates and the end of this session; nothing if the old collection has not been replaced."""
        if self._old is not None:
            return
        self._keep_own_metrics()
        with whole_file(self.paths.aggregates) as file:
            file.writelines(self.aggregates.as_bytes())
        self._record.end(status)

    def _keep_own_metrics(self) -> None:
        """Keep an environment's metrics of the same rollouts from an earlier session if this one has none."""
        if self._check is not None:
            return  # a new run: the file belongs to another run
        try:
            before = orjson.loads(self.paths.aggregates.read_bytes())
            metrics = {each["agent_ref"]["name"]: each["ng"] for each in before}
        except (OSError, ValueError, TypeError, KeyError):
            return  # the file does not exist, or has another format
        for name, tally in self.aggregates.by_agent.items():
            if tally.own is None and metrics.get(name, {}).get("rollouts") == tally.rollouts:
                tally.own = metrics[name].get("environment")

    async def flush(self) -> None:
        """Write all pending rows to the disk; no row can be kept afterwards."""
        await asyncio.gather(self._rows.flush(), self._failures.flush())
        self._take_over()
        for outcome in self._unsettled:
            self._count(outcome)

    def close(self) -> None:
        """Close and unlock the files."""
        if self._check is not None:
            self._check.close()
        if self._sent is not None:
            self._sent.close()
        self._rows.close()
        self._failures.close()
        if self._old is not None:
            if self._rows.empty and self._failures.empty:
                discard(self.paths)
            for log in self._old:
                log.close()

    def _stage(self) -> None:
        """Begin a new run in `.new` files next to those of the old one."""
        new = self.paths.with_ending(NEW)
        self._old = self._rows, self._failures
        self._failures = RowLog(new.failures, _failure_key, on_stall=self._on_stall)  # first, see `recover`
        self._rows = RowLog(new.output, _row_key, on_stall=self._on_stall)
        self._record = RunRecord.new(new.run)
        write_whole(new.aggregates, b"[]\n")

    def _take_over(self) -> None:
        """Replace the old collection if this one has a row."""
        if self._old is None or (self._rows.empty and self._failures.empty):
            return
        replace_files(self.paths)
        self._rows.path, self._failures.path = self.paths.output, self.paths.failures
        self._record.path = self.paths.run
        if self._sent is not None:
            self._sent.path = self.paths.materialized
        for log in self._old:
            log.close(remove_empty=False)  # the new file has its name now
        self._old = None

    def _read_input(self, agents: Collection[str] | None, starts: bool) -> None:
        """Check the part of the input that a new run needs before its first rollout."""
        recipe, progress = self.source.recipe, self.progress
        self._check = InputCheck(self.source.inputs, recipe, agents)
        self._check.check_first()
        progress.agents = set(self._check.agents)
        progress.replaced = self._check.replaced.copy()
        if starts and not self._check.complete and (agents is None or not progress.agents.issuperset(agents)):
            known = self._check.names_in_rest()
            progress.agents |= known if agents is None else known & set(agents)
        self._sent = MaterializedInputs((self.paths.with_ending(NEW) if self._old else self.paths).materialized)
        self._check.begin_rest()
        self._record.input_digest = self._check.digest
        self._count_input()

    def _count_input(self) -> None:
        """Update the progress and the record with the results of the input check."""
        check = self._check
        if check is None or (self.progress.complete and self._record.input_digest is not None):
            return
        self.progress.total, self.progress.complete = check.rows * self.source.recipe.repeats, check.complete
        if check.complete and check.digest is not None and self._record.input_digest is None:
            self._record.learn(self.progress.total, check.digest)

    def _continue(self, tick: Callable[[str], None]) -> None:
        """Continue the run whose rows are in the files."""
        self._record = RunRecord.resume(self.paths.run, self.source, self.paths.output)
        ticking = _Ticker(tick)
        for line in chain(self._rows.rows(), self._failures.rows()):
            problem = row_problem(line.row)
            if problem is None and (damage := stored_row_problem(line.row)):
                problem = f"not a row that was written here: {damage}; fix or delete that line"
            run_id = line.row["ng"].get("run_id")
            if problem is None and run_id != self.run_id:
                problem = f"a row of another run ({run_id}; this file's run is {self.run_id}); remove it"
            if problem:
                path = self.paths.failures if is_failed_attempt(line.row) else self.paths.output
                where = f"{path}:{line.number} (byte {line.start})"
                raise UsageError(f"{where}: {problem}, or start again with {option('overwrite', True)}")
            self._check_agent(line)
            if is_failed_attempt(line.row):
                self._failed.setdefault(_row_key(line.row), []).append(line.row["failure"]["class"])
                self.aggregates.add_failure(line.row, final=False)
            else:
                self._done.add(_row_key(line.row))
                self.aggregates.add(line.row)
            ticking(f"reading what is done: {line.number}")
        self.duplicates = self._rows.duplicates + self._failures.duplicates

    def _check_agent(self, line: Line) -> None:
        """
        Raises:
            UsageError: an agent made this row that makes none of this plan's.
        """
        recipe, name = self.source.recipe, line.row["agent_ref"]["name"]
        if recipe.agent is not None and name not in (recipe.agent, *recipe.agents.values()):
            raise UsageError(
                f"{self.paths.output}: this run has rollouts of agent {name!r}, and {option('agent', recipe.agent)} now "
                f"runs every row; keep that agent with {option('map_agent', {name: name})} in a new run: {remedy()}"
            )

    def _materialize(self, agents: Collection[str] | None, max_attempts: int, tick: Callable[[str], None]) -> None:
        """Check every input row, and write the materialized inputs (to a temporary file, then renamed)."""
        path = self.paths.materialized
        temporary = path.with_name(path.name + ".tmp")
        ticking = _Ticker(tick)
        self.progress = Progress()
        rows = input_rows(self.source.inputs, self.source.recipe, agents, self.progress.replaced)
        try:
            with temporary.open("wb") as file:
                for rollout in plan_rollouts(rows, self.source.recipe):
                    file.write(orjson.dumps(rollout.row) + b"\n")
                    self._settle(rollout, max_attempts)
                    ticking(f"checking the input: {self.progress.total} rollouts")
            temporary.rename(path)
        except OSError as error:
            raise WriteFailed(f"{path}: cannot be written: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
        if self.progress.total == 0:
            raise no_rows(self.source.inputs)
        self.progress.complete = True
        if not self._record.has_input_digest and self.progress.done < len(self._done):
            lost = len(self._done) - self.progress.done
            raise UsageError(
                f"{self.paths.output}: {lost:,} of its rows are of tasks that {self.source.title} does not have (the run ended "
                f"before it had read its input); restore it, {remedy()}"
            )

    def _settle(self, rollout: PlannedRollout, max_attempts: int) -> None:
        self.progress.total += 1
        self.progress.agents.add(rollout.agent)
        if rollout.key in self._done:
            self.progress.done += 1
        elif self._is_settled(rollout, max_attempts):
            self.progress.given_up += 1
            self.aggregates.give_up(rollout.row["agent_ref"], self._failed[rollout.key][-1])


def check_places(output: Path, inputs: Sequence[Path]) -> None:
    """Raise a UsageError if the output cannot be written there."""
    check_output(output)
    paths = CollectionPaths.for_output(output)
    for written in (*paths, *paths.with_ending(NEW), *paths.with_ending(OLD)):
        if written.exists() and any(source.exists() and written.samefile(source) for source in inputs):
            of = (
                f"is both {option_name('input')} and {option_name('output')}"
                if written == output
                else f"is {option_name('input')}, and is written with {option('output', str(output))}"
            )
            raise UsageError(f"{written} {of}; {another_output()}")


class MaterializedInputs:
    """`out_materialized_inputs.jsonl` of a new run: each row as it is sent. A full disk costs this file, not the run.

    problem: why the file could not be written; --resume writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        try:
            self._file = path.open("wb", buffering=READ_BYTES)
        except OSError as error:
            raise WriteFailed(f"{path}: cannot be written: {error.strerror}") from error

    def add(self, row: Json) -> None:
        if self.problem is None:
            self._record_error(lambda: self._file.write(orjson.dumps(row) + b"\n"))

    def close(self) -> None:
        self._record_error(self._file.close)

    def _record_error(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self.problem = f"{self.path}: cannot be written: {error.strerror}"
            with suppress(OSError):
                self._file.close()
            self.path.unlink(missing_ok=True)


class _Ticker:
    """Forwards a text at most every TICK_S seconds."""

    def __init__(self, tick: Callable[[str], None]) -> None:
        self._tick = tick
        self._next = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + TICK_S
            self._tick(text)


def _row_key(row: Json) -> RolloutKey:
    """Raises TypeError: the indices are not integers."""
    return RolloutKey(str(row["ng"]["task_id"]), index(row["_ng_task_index"]), index(row["_ng_rollout_index"]))


def _failure_key(row: Json) -> tuple[RolloutKey, int]:
    return _row_key(row), row["attempt"]
