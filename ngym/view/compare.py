"""Compares two runs task by task: where the second run is better, and where it is worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ngym.schema import Json
from ngym.stats.pass_at_k import bootstrap
from ngym.view.index_store import row_name
from ngym.view.query import FROM, WrongFilter
from ngym.view.rows import Rows

MOST_NAMED = 64  # rollouts of a task
DEFAULT_SORT = "-abs_delta"


@dataclass
class Side:
    """A task's rollouts in one run."""

    task: int | None
    prompt: str | None
    n: int = 0
    rewards: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    def as_json(self) -> Json:
        scored = len(self.rewards)
        return {
            "task": self.task,
            "n": self.n,
            "scored": scored,
            "mean": self.mean,
            "rows": [row_name(seq) for seq in self.rows],
        }


@dataclass(frozen=True)
class Pair:
    """A task that at least one of the runs has. key: what it was matched by."""

    key: str | int
    a: Side | None
    b: Side | None

    @property
    def first(self) -> Side:
        """The side of the first run that has the task."""
        side = self.a or self.b
        assert side is not None
        return side

    @property
    def means(self) -> tuple[float, float] | None:
        """Of both runs, where both have scored rollouts."""
        if self.a is None or self.b is None or self.a.mean is None or self.b.mean is None:
            return None
        return self.a.mean, self.b.mean

    @property
    def delta(self) -> float | None:
        """The second run's mean minus the first's."""
        return None if self.means is None else self.means[1] - self.means[0]

    def as_json(self) -> Json:
        return {
            "task_id": self.key if isinstance(self.key, str) else None,
            "task": self.first.task,
            "prompt": self.first.prompt,
            "a": None if self.a is None else self.a.as_json(),
            "b": None if self.b is None else self.b.as_json(),
            "delta": self.delta,
        }


SORTS: dict[str, Callable[[Pair], Any]] = {
    "abs_delta": lambda pair: None if pair.delta is None else abs(pair.delta),
    "delta": lambda pair: pair.delta,
    "a": lambda pair: None if pair.a is None else pair.a.mean,
    "b": lambda pair: None if pair.b is None else pair.b.mean,
    "task": lambda pair: pair.first.task,
}


def compare(a: Rows, b: Rows, q: str, sort: str, offset: int, limit: int) -> Json:
    """The tasks of both runs and how their mean rewards differ.

    Tasks are matched by task id; rows without ids by task index. `matched_by` says which one was used, and is None if
    the runs have no task in common.

    Raises:
        WrongFilter: the filter or the sort says nothing.
    """
    (a_tasks, a_scanned), (b_tasks, b_scanned) = (_tasks(rows, q) for rows in (a, b))
    pairs = [Pair(key, a_tasks.get(key), b_tasks.get(key)) for key in dict.fromkeys([*a_tasks, *b_tasks])]
    common = [pair.key for pair in pairs if pair.a is not None and pair.b is not None]
    means = [means for pair in pairs if (means := pair.means) is not None]
    deltas = [second - first for first, second in means]
    interval = bootstrap(deltas)
    searching = min(a_scanned, b_scanned)
    return {
        "better": sum(delta > 0 for delta in deltas),
        "worse": sum(delta < 0 for delta in deltas),
        "same": sum(delta == 0 for delta in deltas),
        "only_a": sum(pair.b is None for pair in pairs),
        "only_b": sum(pair.a is None for pair in pairs),
        "unscored": len(common) - len(deltas),
        "mean_a": fmean(first for first, _ in means) if means else None,
        "mean_b": fmean(second for _, second in means) if means else None,
        "unscored_a": _unscored([pair.a for pair in pairs]),
        "unscored_b": _unscored([pair.b for pair in pairs]),
        "delta": fmean(deltas) if deltas else None,
        "interval": None if interval is None else [interval.low, interval.high],
        "matched_by": None if not common else "task_id" if any(isinstance(key, str) for key in common) else "task",
        "total": len(pairs),
        **({"searching": True, "scanned": searching} if searching < 1 else {}),
        "rows": [pair.as_json() for pair in _sorted(pairs, sort or DEFAULT_SORT)[offset : offset + limit]],
    }


def _unscored(sides: list[Side | None]) -> float:
    """The share of a run's rollouts without a reward, which its means do not have."""
    there = [side for side in sides if side is not None]
    rollouts = sum(side.n for side in there)
    return 1 - sum(len(side.rewards) for side in there) / rollouts if rollouts else 0.0


def _tasks(rows: Rows, q: str) -> tuple[dict[str | int, Side], float]:
    """A run's tasks by id, or by index where rows have none, and the share of the run that was searched.

    Failed attempts are not rollouts.
    """
    found: dict[str | int, Side] = {}
    extent = rows.index.extent()
    if extent.version < 0:
        return found, 1.0
    selection = rows.selection(q, extent)
    sql = (
        f"SELECT r.seq, t.task, t.task_id, r.reward, (SELECT prompt FROM texts WHERE seq = t.first) "
        f"FROM {FROM} WHERE r.failure IS NULL AND r.g IS NOT NULL AND ({selection.where}) ORDER BY r.seq"
    )
    with rows.index.reading() as database:
        for seq, task, task_id, reward, prompt in database.execute(sql, selection.parameters):
            side = found.setdefault(task if task_id is None else task_id, Side(task, prompt))
            side.n += 1
            if reward is not None:
                side.rewards.append(reward)
            if len(side.rows) < MOST_NAMED:
                side.rows.append(seq)
    return found, selection.scanned


def _sorted(pairs: list[Pair], sort: str) -> list[Pair]:
    found = pairs
    for key in reversed([part.strip() for part in sort.split(",") if part.strip()]):
        name = key.removeprefix("-")
        if name not in SORTS:
            raise WrongFilter(f"a comparison cannot be sorted by {name!r:.60}; there are {', '.join(SORTS)}")
        value = SORTS[name]
        known = [pair for pair in found if value(pair) is not None]
        known.sort(key=value, reverse=name != key)
        found = known + [pair for pair in found if value(pair) is None]
    return found
