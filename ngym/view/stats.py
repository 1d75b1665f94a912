"""A run in numbers: the mean with its interval, pass@k, rewards as a histogram, failures by class; the arithmetic is ngym.stats.pass_at_k's."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from ngym.schema import Json
from ngym.stats.pass_at_k import Interval, Rewards
from ngym.view.index_store import row_name
from ngym.view.query import FROM
from ngym.view.rows import Rows, Selection

BINS, DIGITS = 20, 12
MOST_POINTS = 2000
KEPT = 8


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

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._kept: OrderedDict[tuple[str, int], Json] = OrderedDict()

    def of(self, q: str) -> Json:
        """Of the rows that a filter lets through.

        Raises:
            WrongFilter: the filter says nothing.
        """
        extent = self._rows.index.extent()
        key = (q, extent.version)
        if key in self._kept:
            return self._kept[key]
        selection = self._rows.selection(q, extent)
        if extent.version < 0:
            return _told([], {})
        with self._rows.index.reading() as database:
            found = _computed(database, selection)
        if selection.scanned < 1:
            return {**found, "searching": True, "scanned": selection.scanned}
        self._kept[key] = found
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found


def _computed(database: sqlite3.Connection, selection: Selection) -> Json:
    columns = "r.seq, r.task_key, r.agent, r.reward, r.failure, r.stop_reason, r.output_tokens, r.seconds"
    sql = f"SELECT {columns} FROM {FROM} WHERE {selection.where} ORDER BY r.seq"
    rows = database.execute(sql, selection.parameters).fetchall()
    parts = database.execute(
        f"SELECT part.key, avg(part.value) FROM {FROM}, json_each(x.components) part WHERE {selection.where} "
        "GROUP BY part.key ORDER BY part.key",
        selection.parameters,
    )
    return _told(rows, dict(parts.fetchall()))


def _told(rows: Sequence[Sequence[Any]], parts: dict[str, float]) -> Json:
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
    every = -(-len(points) // MOST_POINTS) or 1
    shown = [[tokens, reward, row_name(seq)] for tokens, reward, seq in points[::every]]
    return {"points": shown, "sampled": every > 1, "of": len(points)}


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(asdict(interval).values())
