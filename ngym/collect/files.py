"""The files of one collection (wire.md, section 4): which run they belong to, what is done already, and where a new row goes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

import ngym
from ngym.collect.aggregate import Aggregates
from ngym.collect.gate import Gate
from ngym.collect.outcome import FailedAttempt, Outcome, TokenFormat
from ngym.collect.plan import PlannedRollout, Recipe, input_rows, planned
from ngym.collect.run import Limits, Run, new_run_id
from ngym.errors import UsageError
from ngym.jsonl import WriteFailed, write_whole
from ngym.peers import Peers
from ngym.rowlog import RowLog
from ngym.schema import SCHEMA_VERSION, Json, RolloutKey

PLACES = frozenset({"url", "urls", "host", "port", "replicas"})  # where a service runs, not what it does
TICK_S = 0.2


@dataclass(frozen=True)
class Paths:
    """Beside `out.jsonl`: out_failures.jsonl and so on."""

    output: Path
    failures: Path
    materialized: Path
    aggregates: Path
    run: Path

    @classmethod
    def beside(cls, output: Path) -> Paths:
        def sibling(ending: str) -> Path:
            return output.with_name(output.stem + ending)

        siblings = ("_failures.jsonl", "_materialized_inputs.jsonl", "_aggregate_metrics.json", "_run.json")
        return cls(output, *map(sibling, siblings))


@dataclass(frozen=True)
class Source:
    """What is collected, as far as a resumed run must agree. services: the resolved config, name -> stanza."""

    input: Path
    recipe: Recipe
    token_format: TokenFormat = "ng"
    services: Json = field(default_factory=dict)

    def config(self) -> Json:
        """What decides a rollout beside its row. More repeats or rows are more rollouts, not others, so they are not in it."""
        recipe = asdict(self.recipe)
        stanzas = {
            name: {key: value for key, value in stanza.items() if key not in PLACES}
            for name, stanza in self.services.items()
            if name != "ngym" and isinstance(stanza, dict)
        }
        own = {key: recipe[key] for key in ("agent", "params", "seed")}
        return {**own, "token_format": self.token_format, "services": stanzas}

    def digests(self) -> dict[str, str]:
        """`{"input": sha256 of the file, "config": sha256 of config()}`."""
        with self.input.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        settings = orjson.dumps(self.config(), option=orjson.OPT_SORT_KEYS)
        return {"input": content, "config": hashlib.sha256(settings).hexdigest()}


@dataclass
class Progress:
    """How far the plan is: rollouts in all, finished before this sitting, and given up before it."""

    total: int = 0
    done: int = 0
    given_up: int = 0


class Files:
    """The files of one collection, locked for this process.

    Use: `Files(...)` locks; `prepare` checks the input, resumes or clears, and writes everything but rows; `keep` appends.

    Raises:
        FileLocked, UsageError, WriteFailed: see RowLog.
    """

    def __init__(
        self, output: Path, source: Source, *, on_stall: Callable[[str | None], None] = lambda reason: None
    ) -> None:
        if not output.parent.is_dir():
            raise UsageError(
                f"{output}: the folder {output.parent} does not exist; make it first: mkdir -p {output.parent}"
            )
        if output.exists() and source.input.exists() and output.samefile(source.input):
            raise UsageError(f"{output} is both --input and --output; choose another --output")
        self.paths = Paths.beside(output)
        self.source = source
        self.run_id = new_run_id()
        self.aggregates = Aggregates()
        self.progress = Progress()
        self.duplicates = 0
        self._done: set[RolloutKey] = set()
        self._failed: dict[RolloutKey, list[str]] = {}  # the class of each failed attempt
        self._record: Json = {}
        self._rows = RowLog(self.paths.output, _row_key, on_stall=on_stall)
        self._failures = RowLog(self.paths.failures, _failure_key, on_stall=on_stall)

    def prepare(
        self,
        *,
        resume: bool,
        overwrite: bool,
        max_attempts: int,
        agents: Collection[str] | None,
        command: list[str],
        tick: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Everything that comes before the first rollout.

        Args:
            agents: the agents that exist; None if that is not known.
            tick: told what is being done, a few times a second.

        Raises:
            UsageError: bad input lines (all of them), output that exists, or a run that is not this one.
        """
        used = not (self._rows.empty and self._failures.empty)
        if used and not (resume or overwrite):
            raise UsageError(
                f"{self.paths.output} already holds rollouts; add --resume to go on with that run, or --overwrite to start again"
            )
        digests = self.source.digests()
        if used and resume:
            self._continue(digests, tick)
        self._materialize(agents, max_attempts, tick)
        if used and not resume:
            self._rows.clear()
            self._failures.clear()
        self._write_record(digests, command)

    def run(self, peers: Peers, limits: Limits, gate: Gate | None = None) -> Run:
        """The run whose outcomes go into these files: `run.outcomes(files.todo(...))`."""
        return Run(
            peers,
            limits,
            run_id=self.run_id,
            token_format=self.source.token_format,
            keep=self.keep,
            failed_before=self._failed_before,
            gate=gate,
        )

    def todo(self, max_attempts: int) -> Iterator[PlannedRollout]:
        """The rollouts that are neither done nor out of attempts."""
        plan = planned(input_rows(self.source.input, self.source.recipe), self.source.recipe)
        return (rollout for rollout in plan if not self._settled(rollout, max_attempts))

    async def keep(self, outcome: Outcome) -> None:
        """Append an outcome's row; returns when it is on the disk."""
        log = self._failures if isinstance(outcome, FailedAttempt) else self._rows
        try:
            await log.append(orjson.dumps(outcome.row))
        except asyncio.CancelledError:
            self._count(outcome)  # nobody waits for it any more, but flush() will write it
            raise
        self._count(outcome)

    def _settled(self, rollout: PlannedRollout, max_attempts: int) -> bool:
        return rollout.key in self._done or self._failed_before(rollout) >= max_attempts

    def _failed_before(self, rollout: PlannedRollout) -> int:
        """Its failed attempts in earlier sittings."""
        return len(self._failed.get(rollout.key, ()))

    def _count(self, outcome: Outcome) -> None:
        if isinstance(outcome, FailedAttempt):
            self.aggregates.add_failure(outcome.row, final=outcome.final)
        else:
            self.aggregates.add(outcome.row)

    def finish(self, status: str) -> None:
        """Write the aggregates, and how this sitting ended."""
        write_whole(self.paths.aggregates, orjson.dumps(self.aggregates.as_json(), option=orjson.OPT_INDENT_2))
        self._record["sittings"][-1] |= {"ended_at": _now(), "status": status}
        self._save_record()

    async def flush(self) -> None:
        """Put on the disk what waits; nothing can be kept after it."""
        await asyncio.gather(self._rows.flush(), self._failures.flush())

    def close(self) -> None:
        """Let go of the files."""
        self._rows.close()
        self._failures.close()

    def _continue(self, digests: dict[str, str], tick: Callable[[str], None]) -> None:
        """Take up the run whose rows stand in the files."""
        self._record = self._read_record()
        before = self._record["digests"]
        for name, label in (("input", f"the input ({self.source.input})"), ("config", "the config or its overrides")):
            if before[name] != digests[name]:
                raise UsageError(
                    f"{self.paths.output}: {label} changed since this run began: sha256 {before[name]} then, "
                    f"{digests[name]} now; restore it, choose another --output, or start again with --overwrite"
                    + (_difference(self._record["config"], self.source.config()) if name == "config" else "")
                )
        self.run_id = self._record["run_id"]
        ticking = _Ticker(tick)
        for line in chain(self._rows.rows(), self._failures.rows()):
            run_id = line.row["ng"].get("run_id")
            if run_id != self.run_id:
                path = self.paths.failures if "failure" in line.row else self.paths.output
                raise UsageError(
                    f"{path}:{line.number} (byte {line.start}): a row of another run ({run_id}; this file's run is {self.run_id}); "
                    "take it out, or start again with --overwrite"
                )
            if "failure" in line.row:
                self._failed.setdefault(_row_key(line.row), []).append(line.row["failure"]["class"])
                self.aggregates.add_failure(line.row, final=False)
            else:
                self._done.add(_row_key(line.row))
                self.aggregates.add(line.row)
            ticking(f"reading what is done: {line.number}")
        self.duplicates = self._rows.duplicates + self._failures.duplicates

    def _materialize(self, agents: Collection[str] | None, max_attempts: int, tick: Callable[[str], None]) -> None:
        """Check every input row, and write what will be sent to the agents (aside, then renamed)."""
        path = self.paths.materialized
        beside = path.with_name(path.name + ".tmp")
        ticking = _Ticker(tick)
        self.progress = Progress()
        rows = input_rows(self.source.input, self.source.recipe, agents)
        try:
            with beside.open("wb") as file:
                for rollout in planned(rows, self.source.recipe):
                    file.write(orjson.dumps(rollout.row) + b"\n")
                    self._settle(rollout, max_attempts)
                    ticking(f"checking the input: {self.progress.total} rollouts")
            beside.rename(path)
        except OSError as error:
            raise WriteFailed(f"{path}: cannot be written: {error.strerror}") from error
        finally:
            beside.unlink(missing_ok=True)
        if self.progress.total == 0:
            raise UsageError(f"{self.source.input}: no rows in it; each line is one task")

    def _settle(self, rollout: PlannedRollout, max_attempts: int) -> None:
        self.progress.total += 1
        if rollout.key in self._done:
            self.progress.done += 1
        elif self._settled(rollout, max_attempts):
            self.progress.given_up += 1
            self.aggregates.give_up(rollout.row["agent_ref"], self._failed[rollout.key][-1])

    def _write_record(self, digests: dict[str, str], command: list[str]) -> None:
        recipe = self.source.recipe
        sitting = {"started_at": _now(), "pid": os.getpid(), "command": command}
        self._record = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "input": str(self.source.input),
            "repeats": recipe.repeats,
            "limit": recipe.limit,
            "rollouts": self.progress.total,
            "digests": digests,
            "config": self.source.config(),
            "versions": {"ngym": ngym.__version__, "python": platform.python_version()},
            "sittings": [*self._record.get("sittings", []), sitting],
        }
        self._save_record()

    def _save_record(self) -> None:
        write_whole(self.paths.run, orjson.dumps(self._record, option=orjson.OPT_INDENT_2))

    def _read_record(self) -> Json:
        path = self.paths.run
        try:
            record = orjson.loads(path.read_bytes())
            if {"run_id", "digests", "config", "sittings"} <= record.keys():
                return dict(record)
            problem = "is not a run's record"
        except FileNotFoundError:
            problem = "does not exist"
        except (OSError, orjson.JSONDecodeError, AttributeError) as error:
            problem = f"cannot be read ({error})"
        raise UsageError(
            f"{path} {problem}, so nobody can tell which run wrote {self.paths.output}; "
            "choose another --output, or start again with --overwrite"
        )


class _Ticker:
    """Passes on a text now and then, not for every row."""

    def __init__(self, tick: Callable[[str], None]) -> None:
        self._tick = tick
        self._next = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + TICK_S
            self._tick(text)


def _row_key(row: Json) -> RolloutKey:
    return RolloutKey(row["ng"]["task_id"], row["_ng_task_index"], row["_ng_rollout_index"])


def _failure_key(row: Json) -> tuple[RolloutKey, int]:
    return _row_key(row), row["attempt"]


def _difference(before: Any, now: Any, path: str = "") -> str:
    """` (first difference: policy.model: 'a' then, 'b' now)`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    return f" (first difference: {path}: {before!r:.80} then, {now!r:.80} now)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
