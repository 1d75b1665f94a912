"""A run in numbers (the mean with its interval, pass@k, rewards as a histogram, failures), and two runs task by task.

The arithmetic is that of ngym.stats.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from ngym.schema import Json
from ngym.stats import Interval, Rewards, bootstrap
from ngym.view.filter_query import FROM, WrongFilter
from ngym.view.growing_index import row_name
from ngym.view.rows import RunRows, Selection

BINS, DIGITS = 20, 12
MAX_POINTS = 2000
CACHED_COMPARISONS = 8


@dataclass
class Environment:
    """The rows of one agent."""

    rewards: Rewards = field(default_factory=Rewards)
    n: int = 0
    failed: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def as_json(self, name: str | None) -> Json:
        return {
            "name": name,
            "n": self.n,
            "unscored": self.n - self.rewards.count,
            "mean": self.rewards.mean,
            "interval": _pair(self.rewards.interval),
            "failed": self.failed,
            "tokens": fmean(self.tokens) if self.tokens else None,
            "seconds": fmean(self.seconds) if self.seconds else None,
        }


class Stats:
    """The numbers of one run, kept until it grows."""

    def __init__(self, rows: RunRows) -> None:
        self._rows = rows
        self._cache: OrderedDict[tuple[str, int], Json] = OrderedDict()

    def of(self, q: str) -> Json:
        """Of the rows that a filter lets through. Raises WrongFilter: the filter says nothing."""
        extent = self._rows.index.extent()
        key = (q, extent.version)
        if key in self._cache:
            return self._cache[key]
        selection = self._rows.selection(q, extent)
        if extent.version < 0:
            return _summarize([], {})
        with self._rows.index.reading() as database:
            result = _compute(database, selection)
        if selection.scanned < 1:
            return {**result, "searching": True, "scanned": selection.scanned}
        self._cache[key] = result
        while len(self._cache) > CACHED_COMPARISONS:
            self._cache.popitem(last=False)
        return result


def _compute(database: sqlite3.Connection, selection: Selection) -> Json:
    columns = "r.seq, r.task_key, r.agent, r.reward, r.failure, r.stop_reason, r.output_tokens, r.seconds"
    sql = f"SELECT {columns} FROM {FROM} WHERE {selection.where} ORDER BY r.seq"
    rows = database.execute(sql, selection.parameters).fetchall()
    parts = database.execute(
        f"SELECT part.key, avg(part.value) FROM {FROM}, json_each(x.components) part WHERE {selection.where} "
        "GROUP BY part.key ORDER BY part.key",
        selection.parameters,
    )
    return _summarize(rows, dict(parts.fetchall()))


def _summarize(rows: Sequence[Sequence[Any]], parts: dict[str, float]) -> Json:
    whole = Rewards()
    environments: dict[str | None, Environment] = {}
    failures: dict[str, Json] = {}
    stops: Counter[str] = Counter()
    points = []
    for seq, task, agent, reward, failure, stop, tokens, seconds in rows:
        own = environments.setdefault(agent, Environment())
        if failure is not None:
            own.failed += 1
            failures.setdefault(failure, {"class": failure, "count": 0, "example": row_name(seq)})["count"] += 1
            continue
        own.n += 1
        stops[stop or "unknown"] += 1
        if tokens is not None:
            own.tokens.append(tokens)
        if seconds is not None:
            own.seconds.append(seconds)
        if reward is not None:
            unit = -(1 << 64) - seq if task is None else task  # a rollout that names no task is a separate task
            whole.add(unit, reward)
            own.rewards.add(unit, reward)
            if tokens is not None:
                points.append((tokens, reward, seq))
    n = sum(own.n for own in environments.values())
    return {
        "n": n,
        "scored": whole.count,
        "unscored": n - whole.count,
        "failed": sum(own.failed for own in environments.values()),
        "tasks": len({row[1] for row in rows} - {None}),
        "mean": whole.mean,
        "interval": _pair(whole.interval),
        "binary": whole.binary,
        "pass_at": {str(item.k): item.mean for item in whole.best_of()},
        "histogram": _histogram(whole.values),
        "by_environment": [
            own.as_json(name) for name, own in sorted(environments.items(), key=lambda each: each[0] or "")
        ],
        "failures": sorted(failures.values(), key=lambda each: -each["count"]),
        "length": _length(points),
        "components": [{"name": name, "mean": mean} for name, mean in parts.items()],
        "stop_reasons": dict(stops.most_common()),
    }


def _histogram(rewards: Sequence[float]) -> Json:
    """Bins of equal width; the last has its upper edge, too. Rewards from 0 to 1 are shown over all of that.

    The edges are short decimals, and rewards are counted by the rounded edges: a filter between two edges matches
    what the bin counts.
    """
    if not rewards:
        return {"edges": [], "counts": []}
    low, high = min(rewards), max(rewards)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = [low, *(round(low + (high - low) * edge / BINS, DIGITS) for edge in range(1, BINS)), high]
    counts = [0] * BINS
    for reward in rewards:
        counts[min(BINS, bisect_right(edges, reward)) - 1] += 1
    return {"edges": edges, "counts": counts}


def _length(points: Sequence[tuple[int, float, int]]) -> Json:
    """Every so many of them, where they are more than a plot shows."""
    every = -(-len(points) // MAX_POINTS) or 1
    points_drawn = [[tokens, reward, row_name(seq)] for tokens, reward, seq in points[::every]]
    return {"points": points_drawn, "sampled": every > 1, "of": len(points)}


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(asdict(interval).values())


MAX_NAMED = 64  # rollouts of a task
DEFAULT_SORT = "-abs_delta"
Key = str | tuple[str | None, int | None]
"""A task's id; its agent and index where rows have no id."""


@dataclass
class Side:
    """A task's rollouts in one run."""

    task: int | None
    agent: str | None
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
            "agent": self.agent,
            "n": self.n,
            "scored": scored,
            "mean": self.mean,
            "rows": [row_name(seq) for seq in self.rows],
        }


@dataclass(frozen=True)
class Pair:
    """A task that at least one of the runs has. key: what it was matched by."""

    key: Key
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


def compare(a: RunRows, b: RunRows, q: str, sort: str, offset: int, limit: int) -> Json:
    """The tasks of both runs and how their mean rewards differ.

    Tasks are matched by task id; rows without ids by task index, and by agent if a run has several. `matched_by` says
    which one was used, and is None if the runs have no task in common.

    Raises:
        WrongFilter: the filter or the sort says nothing.
    """
    (a_tasks, a_scanned), (b_tasks, b_scanned) = (_tasks(rows, q) for rows in (a, b))
    if not (_has_agents(a_tasks) or _has_agents(b_tasks)):
        a_tasks, b_tasks = _without_agents(a_tasks), _without_agents(b_tasks)
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
        "rows": [pair.as_json() for pair in _sort(pairs, sort or DEFAULT_SORT)[offset : offset + limit]],
    }


def _unscored(sides: list[Side | None]) -> float:
    """The share of a run's rollouts without a reward, which its means do not have."""
    there = [side for side in sides if side is not None]
    rollouts = sum(side.n for side in there)
    return 1 - sum(len(side.rewards) for side in there) / rollouts if rollouts else 0.0


def _has_agents(tasks: dict[Key, Side]) -> bool:
    """Whether tasks without an id are of several agents."""
    return len({key[0] for key in tasks if not isinstance(key, str)}) > 1


def _without_agents(tasks: dict[Key, Side]) -> dict[Key, Side]:
    return {key if isinstance(key, str) else (None, key[1]): side for key, side in tasks.items()}


def _tasks(rows: RunRows, q: str) -> tuple[dict[Key, Side], float]:
    """A run's tasks, and the share of the run that was searched. Failed attempts are not rollouts."""
    tasks: dict[Key, Side] = {}
    extent = rows.index.extent()
    if extent.version < 0:
        return tasks, 1.0
    selection = rows.selection(q, extent)
    sql = (
        f"SELECT r.seq, t.task, t.task_id, r.agent, r.reward, (SELECT prompt FROM texts WHERE seq = t.first) "
        f"FROM {FROM} WHERE r.failure IS NULL AND r.g IS NOT NULL AND ({selection.where}) ORDER BY r.seq"
    )
    with rows.index.reading() as database:
        for seq, task, task_id, agent, reward, prompt in database.execute(sql, selection.parameters):
            side = tasks.setdefault((agent, task) if task_id is None else task_id, Side(task, agent, prompt))
            side.n += 1
            if reward is not None:
                side.rewards.append(reward)
            if len(side.rows) < MAX_NAMED:
                side.rows.append(seq)
    return tasks, selection.scanned


def _sort(pairs: list[Pair], sort: str) -> list[Pair]:
    result = pairs
    for key in reversed([part.strip() for part in sort.split(",") if part.strip()]):
        name = key.removeprefix("-")
        if name not in SORTS:
            raise WrongFilter(f"a comparison cannot be sorted by {name!r:.60}; there are {', '.join(SORTS)}")
        value = SORTS[name]
        known = [pair for pair in result if value(pair) is not None]
        known.sort(key=value, reverse=name != key)
        result = known + [pair for pair in result if value(pair) is None]
    return result
