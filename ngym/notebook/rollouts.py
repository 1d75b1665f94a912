"""`ngym.Rollouts` and `ngym.load_rollouts`: rollouts as a sequence with statistics, groups, tables and views."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from glob import glob
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, overload

import orjson

from ngym.collect.aggregate import Aggregates
from ngym.collect.collection_files import CollectionPaths
from ngym.errors import UsageError
from ngym.files.jsonl import BOM, COMPRESSED, READ_BYTES, open_rows, read
from ngym.notebook.frames import KINDS, SHOWN_ROWS, Failures, Table, Transcript, full, slim, table
from ngym.schema import Json, RolloutCopies, agent_name, is_failed_attempt, rollout_id, row_problem, trace_of
from ngym.stats import Interval, Rewards, all_equal, best_at_k, reaches

if TYPE_CHECKING:
    import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import polars  # type: ignore[import-not-found, unused-ignore]

SOLVED = 1.0
NO_TASK = "rows name no task, which a comparison of a task's rollouts needs: give each row its `_ng_task_index`"
MAX_REPR_ROWS = 20_000  # more rows are not read only for a repr
REPR_COLUMNS = ("task_index", "rollout_index", "reward", "stop_reason", "turns", "asked", "answered")
COMPANION_SUFFIXES = ("_failures.jsonl", "_materialized_inputs.jsonl")  # files of a collection without rollouts


class Folder:
    """A temporary folder that lives as long as this object, at most as long as the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ngym-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class RolloutSummary(NamedTuple):
    """The facts of a rollout that stay in memory. Rows of other tools may not name their task."""

    agent: str
    task_id: str
    task_index: int | None
    reward: float | None

    @property
    def names_task(self) -> bool:
        return bool(self.task_id) or self.task_index is not None

    @property
    def task(self) -> tuple[str, str | int | None]:
        """The key of a task, also if a training run sampled it several times."""
        return self.agent, self.task_id or self.task_index


class StoredRows:
    """The rows of a Rollouts and of its selections. folder: kept alive as long as they are."""

    def __init__(self, rows: Sequence[Json], paths: tuple[Path, ...] = (), folder: object = None) -> None:
        self.rows = rows
        self.paths = paths
        self._folder = folder
        self._copies: dict[int, int] = {}  # the place of a row -> that of the first row with its rollout

    @cached_property
    def facts(self) -> list[RolloutSummary]:
        facts, first = [], dict[str, int]()
        for place, row in enumerate(self.rows):
            facts.append(_fact(row))
            name = rollout_id(row)
            if name is not None and first.setdefault(name, place) != place:
                self._copies[place] = first[name]
        return facts

    def check_copies(self, places: Sequence[int]) -> None:
        """
        Raises:
            UsageError: a rollout is at two of these places, so that numbers would count it twice.
        """
        if not self._copies:
            return
        first_of_copies: dict[int, int] = {}
        for place in places:
            other = first_of_copies.setdefault(self._copies.get(place, place), place)
            if other != place:
                raise UsageError(
                    f"the rollout {rollout_id(self.rows[place])} is there twice, as rows {other} and {place} of what "
                    "was loaded; leave out one of its copies"
                )


class Rollouts(Sequence[Json]):
    """A sequence of rollouts: `rollouts[0]` is a row (docs/collecting.md); slices and filtered rollouts are Rollouts.

    >>> rollouts = Rollouts([{"response": {"output": []}, "reward": 1.0, "_ng_task_index": 0}])
    >>> len(rollouts), rollouts.mean_reward
    (1, 1.0)
    """

    def __init__(self, rows: Sequence[Json], *, paths: Sequence[Path] = (), folder: object = None) -> None:
        self._choose(StoredRows(rows, tuple(paths), folder), None)

    def _choose(self, stored: StoredRows, places: Sequence[int] | None) -> None:
        self._stored = stored
        self._places = places

    @classmethod
    def _select(cls, stored: StoredRows, places: Sequence[int]) -> Rollouts:
        rollouts = cls.__new__(cls)
        rollouts._choose(stored, places)
        return rollouts

    def __len__(self) -> int:
        return len(self._stored.rows) if self._places is None else len(self._places)

    @overload
    def __getitem__(self, index: int) -> Json: ...
    @overload
    def __getitem__(self, index: slice) -> Rollouts: ...
    def __getitem__(self, index: int | slice) -> Json | Rollouts:
        if isinstance(index, slice):
            return self._select(self._stored, self._all[index])
        return self._stored.rows[self._all[index]]

    def __iter__(self) -> Iterator[Json]:
        return iter(self._stored.rows) if self._places is None else (self._stored.rows[place] for place in self._places)

    def __repr__(self) -> str:
        return f"<{self._headline()}>"

    def _repr_html_(self) -> str:
        records = [slim(row) for row in map(_scored, self[:SHOWN_ROWS])]
        more = f"; the first {len(records)}:" if len(self) > len(records) else ""
        return table(
            REPR_COLUMNS, [[record[name] for name in REPR_COLUMNS] for record in records], self._headline() + more
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the rollouts; empty for rows of a list. A file in which every rollout failed does not exist."""
        return self._stored.paths

    @property
    def failures(self) -> Failures:
        """The failed attempts of the same collection, one row each (`*_failures.jsonl`)."""
        return Failures(list(FileRows([path for path in map(_failures_of, self.paths) if path.is_file()])))

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each rollout; None if it could not be scored."""
        return [fact.reward for fact in self._facts]

    @property
    def mean_reward(self) -> float | None:
        """The mean over the scored rollouts; None if there are none."""
        scored = [reward for reward in self.rewards if reward is not None]
        return fmean(scored) if scored else None

    @property
    def unscored_share(self) -> float:
        """The share of rollouts without a reward, 0 to 1, which means leave out."""
        return self.rewards.count(None) / len(self) if len(self) else 0.0

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the mean reward, clustered by task. None for fewer than two tasks.

        Raises:
            UsageError: a row names no task.
        """
        scores, units = Rewards(), dict[tuple[str, str | int | None], int]()
        for fact in self._facts:
            if not fact.names_task:
                raise UsageError(NO_TASK)
            unit = units.setdefault(fact.task, len(units))
            if fact.reward is not None:
                scores.add(unit, fact.reward)
        return scores.interval

    def pass_at(self, k: int, solved_at: float = SOLVED) -> float:
        """pass@k: the chance that one of k rollouts solves a task (unbiased, arXiv 2107.03374), averaged over tasks
        with k scored rollouts.

        Raises:
            UsageError: k is not a whole number of at least 1, no task has k scored rollouts, or a row names no task.
        """
        if isinstance(k, bool) or not isinstance(k, int):
            raise UsageError(f"pass_at({k!r}): k must be a whole number")
        if k < 1:
            raise UsageError(f"pass_at({k}): k must be at least 1")
        groups = [[float(reaches(reward, solved_at)) for reward in group.rewards] for group in self.groups()]
        enough = [solved for solved in groups if len(solved) >= k]
        if not enough:
            most = max(map(len, groups), default=0)
            raise UsageError(f"pass_at({k}): no task has {k} scored rollouts; the most that one has is {most}")
        return fmean(best_at_k(solved, k) for solved in enough)

    def metrics(self, by: str | None = None) -> list[Json]:
        """The contents of `*_aggregate_metrics.json` for these rollouts: an entry per agent. by: also by this field.

        Raises:
            UsageError: a row has no `_ng_task_index`, or is a copy of an earlier rollout.
        """
        aggregates, copies = Aggregates(by), RolloutCopies()
        for row in self:
            if problem := copies.problem(row):
                raise UsageError(problem)
            aggregates.add(_with_defaults(row))
        return aggregates.as_json()

    def filter(self, wanted: Callable[[Json], object]) -> Rollouts:
        """The rollouts whose row satisfies a condition: `rollouts.filter(lambda row: row["reward"] == 0)`."""
        return self._select(self._stored, [place for place, row in zip(self._all, self, strict=True) if wanted(row)])

    def worst(self, n: int = 10) -> Rollouts:
        """The n scored rollouts with the smallest rewards, the worst first."""
        return self._rank(n, 1.0)

    def best(self, n: int = 10) -> Rollouts:
        """The n scored rollouts with the largest rewards, the best first."""
        return self._rank(n, -1.0)

    def groups(self) -> list[TaskGroup]:
        """The rollouts of each task, in order of appearance; each time that a training run samples a task is a group.

        Raises:
            UsageError: a row names no task.
        """
        places: dict[RolloutSummary, list[int]] = {}
        for place, fact in zip(self._all, self._facts, strict=True):
            if not fact.names_task:
                raise UsageError(NO_TASK)
            places.setdefault(fact._replace(reward=None), []).append(place)
        facts = self._stored.facts
        return [
            TaskGroup(key.agent, key.task_id, key.task_index, self._select(self._stored, group), _rewards(facts, group))
            for key, group in places.items()
        ]

    def show(self, index: int = 0) -> Transcript:
        """One rollout as a conversation: a notebook shows it, `print` prints it."""
        return Transcript(self[index])

    def to_pandas(self, full: bool = False) -> pandas.DataFrame:
        """A row for each rollout: numbers, the last question and answer, fields of its row. full: all other data."""
        return self._table(full).to_pandas()

    def to_polars(self, full: bool = False) -> polars.DataFrame:
        """As `to_pandas`; with `full`, lists and objects are JSON text."""
        return self._table(full).to_polars()

    def to_dataset(self, full: bool = False) -> datasets.Dataset:
        """As `to_polars`, as a dataset of Hugging Face's `datasets`."""
        return self._table(full).to_dataset()

    def _table(self, everything: bool) -> Table:
        return Table(map(full if everything else slim, map(_scored, self)), KINDS)

    def _headline(self) -> str:
        where = f"; {', '.join(map(str, self.paths))}" if self.paths else ""
        if "facts" not in self._stored.__dict__ and len(self._stored.rows) > MAX_REPR_ROWS:
            return f"{len(self):,} rollouts{where}"
        facts = self._facts
        tasks = f" of {len({fact.task for fact in facts}):,} tasks" if all(fact.names_task for fact in facts) else ""
        mean = "no reward" if self.mean_reward is None else f"mean reward {self.mean_reward:.3f}"
        mean += f" ({self.unscored_share:.1%} unscored)" if self.unscored_share else ""
        return f"{len(self):,} rollouts{tasks}, {mean}{where}"

    def _rank(self, n: int, sign: float) -> Rollouts:
        scored = [(fact.reward, at) for fact, at in zip(self._facts, self._all, strict=True) if fact.reward is not None]
        if isinstance(n, bool) or not isinstance(n, int):
            raise UsageError(f"the number of rollouts must be a whole number, not {n!r:.60}")
        if n < 0:
            raise UsageError(f"the number of rollouts must be 0 or more, not {n}")
        ranked = sorted(scored, key=lambda pair: sign * pair[0])
        return self._select(self._stored, [place for _, place in ranked[:n]])

    @property
    def _all(self) -> Sequence[int]:
        return range(len(self._stored.rows)) if self._places is None else self._places

    @property
    def _facts(self) -> list[RolloutSummary]:
        facts = self._stored.facts
        self._stored.check_copies(self._all)
        return facts if self._places is None else [facts[place] for place in self._places]


class TaskGroup(NamedTuple):
    """The rollouts of one task. task_index: None if the rows only have a task_id. rewards: of the scored rollouts."""

    agent: str
    task_id: str
    task_index: int | None
    rollouts: Rollouts
    rewards: list[float]

    @property
    def mean_reward(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    @property
    def unscored(self) -> int:
        """The number of rollouts without a reward, which means leave out."""
        return len(self.rollouts) - len(self.rewards)

    @property
    def has_learning_signal(self) -> bool:
        """Whether the rewards differ: equal rewards have no learning signal for algorithms that compare them."""
        return len(self.rewards) > 1 and not all_equal(self.rewards)


def _fact(row: Json) -> RolloutSummary:
    agent = agent_name(row) or ""
    if problem := row_problem(row):
        raise UsageError(f"task {row.get('_ng_task_index')}: {problem}")
    try:
        return RolloutSummary(agent, trace_of(row).get("task_id") or "", row.get("_ng_task_index"), row["reward"])
    except KeyError:
        raise UsageError(f"task {row.get('_ng_task_index')}: a row without a reward is not a rollout") from None


def _scored(row: Json) -> Json:
    """The row. Raises UsageError if it is not a rollout."""
    _fact(row)
    if not isinstance(row.get("response"), dict):
        raise UsageError(f"task {row.get('_ng_task_index')}: a row without a response is not a rollout")
    return row


def _rewards(facts: Sequence[RolloutSummary], places: Sequence[int]) -> list[float]:
    return [reward for place in places if (reward := facts[place].reward) is not None]


def _with_defaults(row: Json) -> Json:
    """The row with defaults for the fields that metrics need and rows of other tools lack."""
    if row.get("_ng_task_index") is None:
        raise UsageError(NO_TASK)
    unknown = {"turns": None, "tool_calls": None, "tool_errors": None, "timings": {"total_s": None}}
    cut = row["response"].get("status") == "incomplete"
    status = {"status": "unscored" if row["reward"] is None else "truncated" if cut else "ok"}
    trace = {**unknown, **status, "stop_reason": "length" if cut else "answer", **trace_of(row)}
    return {"agent_ref": {"name": "unknown"}, **row, "ng": trace}


class FileRows(Sequence[Json]):
    """The rows that the files had when they were first counted; later rows are not included. A torn last line is left
    out. A compressed file is unpacked into a temporary folder when a row is accessed by its index.

    Raises:
        UsageError: on access, if a file cannot be read or a line is not a JSON object.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Json: ...
    @overload
    def __getitem__(self, index: slice) -> list[Json]: ...
    def __getitem__(self, index: int | slice) -> Json | list[Json]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        file = bisect_right(self._ends, place)
        number = place - (self._ends[file - 1] if file else 0)
        return _row_at(self._plain[file], self._starts[file][number], self.paths[file])

    def __iter__(self) -> Iterator[Json]:
        """Iterate over all rows, reading each file once."""
        for path, starts in zip(self.paths, self._starts, strict=True):
            remaining = len(starts)
            for line in read(path):
                if not remaining:
                    break
                if line.problem:
                    raise UsageError(f"{path}:{line.number}: {line.problem}")
                remaining -= 1
                yield line.row

    @cached_property
    def _starts(self) -> list[array[int]]:
        return [_starts_of(path) for path in self.paths]

    @cached_property
    def _plain(self) -> list[Path]:
        """The files, or the unpacked copies of compressed ones."""
        return [self._unpack(n) if path.suffix in COMPRESSED else path for n, path in enumerate(self.paths)]

    @cached_property
    def _folder(self) -> Folder:
        return Folder()

    def _unpack(self, number: int) -> Path:
        copy = self._folder.path / f"{number}.jsonl"
        with open_rows(self.paths[number]) as packed, copy.open("wb") as file:
            shutil.copyfileobj(packed, file, READ_BYTES)
        return copy

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self._starts)))


def _starts_of(path: Path) -> array[int]:
    """The offset of each row."""
    starts, start, raw = array("Q"), 0, b"\n"
    with open_rows(path) as file:
        for raw in file:
            if not raw.isspace():
                starts.append(start)
            start += len(raw)
    if starts and not raw.isspace() and not raw.endswith(b"\n") and not _is_json(raw.removeprefix(BOM)):
        starts.pop()
    return starts


def _row_at(plain: Path, start: int, path: Path) -> Json:
    """The row at this offset of a file that is not compressed. path: its name in messages."""
    with open_rows(plain) as file:
        file.seek(start)
        raw = file.readline()
    try:
        row = orjson.loads(raw.removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path} (byte {start}): not JSON: {error}; load the file again if it was changed") from None
    if not isinstance(row, dict):
        raise UsageError(f"{path} (byte {start}): not a JSON object but {type(row).__name__}")
    return row


def _is_json(raw: bytes) -> bool:
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True


def load_rollouts(*sources: str | Path) -> Rollouts:
    """Load the rollouts of files or patterns such as `runs/*/out.jsonl`. Rows are read when they are accessed.

        rollouts = ngym.load_rollouts("out.jsonl")
        rollouts.worst(3).show(0)

    Raises:
        UsageError: a file does not exist, or its first row is not a rollout.
    """
    files = [path for source in sources for path in _files(str(source))]
    paths = list({path.resolve(): path for path in reversed(files)}.values())[::-1]  # the first path of each file
    if not paths:
        raise UsageError("load_rollouts: name a file that ng_collect_rollouts wrote")
    for path in paths:
        first = next(iter(FileRows([path])), None) if path.exists() else None
        if first is not None:
            _check(first, path)
    return rollouts_of(paths)


def rollouts_of(paths: Sequence[Path], folder: object = None) -> Rollouts:
    """The rollouts of these files. A collection whose rollouts all failed has no file of rollouts, only failures."""
    return Rollouts(FileRows([path for path in paths if path.exists()]), paths=paths, folder=folder)


def _failures_of(path: Path) -> Path:
    return CollectionPaths.for_output(path).failures


def _files(source: str) -> list[Path]:
    if Path(source).is_dir():
        raise UsageError(f"{Path(source)} is a folder; name a file, or a pattern such as {Path(source) / '*.jsonl'}")
    if Path(source).is_file() or _failures_of(Path(source)).is_file():
        return [Path(source)]
    files = sorted(glob(source, recursive=True))
    if not files:
        raise UsageError(f"{source}: no such file")
    return [Path(path) for path in files if not path.endswith(COMPANION_SUFFIXES)]


def _check(row: Json, path: Path) -> None:
    if not isinstance(row.get("response"), dict) or "reward" not in row:
        other = "is a failed attempt" if is_failed_attempt(row) else "has no response and reward"
        raise UsageError(f"{path}: its first row {other}; ng_collect_rollouts writes rollouts")
    if problem := row_problem(row):
        raise UsageError(f"{path}: its first row: {problem}")
