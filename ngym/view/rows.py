"""The rows of a page: filtered, sorted and searched. A requested order is cached, so scrolling costs nothing."""

from __future__ import annotations

import sqlite3
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson

from ngym.schema import Json
from ngym.view.filter_query import FROM, NUMBERS, SORTED_ONLY, WORDS, Query, Search, WrongFilter, order, parse
from ngym.view.growing_index import Extent, Index, row_name

MAX_ROWS = 1000  # of a page
CACHED_ORDERS = 12

_SHOWN = (
    "task", "rollout", "task_id", "rollout_id", "agent", "reward", "status", "stop_reason", "turns", "tool_calls",
    "tool_errors", "input_tokens", "output_tokens", "seconds", "attempt", "policy_version", "learned", "group_mean",
    "group_size", "advantage", "failure", "prompt", "answer",
)  # fmt: skip
_EXPRESSIONS = {**NUMBERS, **WORDS, **SORTED_ONLY}
COLUMNS = {name: _EXPRESSIONS[name] for name in _SHOWN} | {"components": "x.components", "fields": "x.fields"}
_ROW = f"SELECT r.seq, {', '.join(COLUMNS.values())} FROM {FROM}"

# The weights of a rollout: how many batches they had learned, or the policy version where no trainer says so.
WEIGHTS = "COALESCE(r.learned, r.policy_version)"
_X, _Y = f"(CASE WHEN r.reward IS NOT NULL THEN {WEIGHTS} END)", f"(CASE WHEN {WEIGHTS} IS NOT NULL THEN r.reward END)"
_N = f"count({_X} + {_Y})"
# The rise of the least-squares line of the reward over the weights, from the first to the last.
TREND = (
    f"(({_N} * sum({_X} * {_Y}) - sum({_X}) * sum({_Y})) * 1.0 * (max({_X}) - min({_X}))"
    f" / NULLIF({_N} * sum({_X} * {_X}) - sum({_X}) * sum({_X}), 0))"
)
MAX_POINTS = 60  # of a task's curve

TASK_COLUMNS = {
    "task": "min(r.task)",
    "task_id": "max(t.task_id)",
    "agent": "max(r.agent)",
    "groups": "count(DISTINCT r.g)",
    "n": "count(*) FILTER (WHERE r.failure IS NULL)",
    "unscored": "count(*) FILTER (WHERE r.failure IS NULL AND r.reward IS NULL)",
    "mean": "avg(r.reward)",
    "best": "max(r.reward)",
    "worst": "min(r.reward)",
    "spread": "max(r.reward) - min(r.reward)",
    "failures": "count(*) FILTER (WHERE r.failure IS NOT NULL)",
    "trend": TREND,
    "tokens": "avg(r.output_tokens)",
    "prompt": "(SELECT prompt FROM texts WHERE seq = t.first)",
}


class Page(NamedTuple):
    """A part of a table. total: the known number of its rows. scanned: below 1 while a search continues."""

    rows: list[Json]
    total: int
    indexed: int
    scanned: float

    def as_json(self) -> Json:
        going_on = {"searching": True, "scanned": self.scanned} if self.scanned < 1 else {}
        return {"total": self.total, "indexed": self.indexed, **going_on, "rows": self.rows}


class Selection(NamedTuple):
    """Rows, as a condition on FROM with its parameters."""

    where: str
    parameters: tuple[Any, ...]
    scanned: float


class _Order(NamedTuple):
    """Keys of a table's lines in their order."""

    keys: Sequence[int]
    scanned: float


class RunRows:
    """The rows of one run, for several threads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._search = Search(index)
        self._orders: OrderedDict[tuple[str, str, str, int], _Order] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def fields(self) -> list[str]:
        """The names of the scalar fields that the rows have of their own."""
        if self.index.extent().version < 0:
            return []
        with self.index.reading() as database:
            return [name for (name,) in database.execute("SELECT name FROM fields ORDER BY name")]

    def page(self, q: str, sort: str, offset: int, limit: int) -> Page:
        """
        Raises:
            WrongFilter: the filter or the sort says nothing.
        """
        extent = self.index.extent()
        keys, scanned = self._order("rows", q, sort, extent)
        return Page(self.rows(keys[offset : offset + limit]), len(keys), extent.rows + extent.failures, scanned)

    def all(self, q: str) -> Sequence[int]:
        """All rows that a filter lets through, in the order of the file, by seq."""
        return self._order("rows", q, "", self.index.extent()).keys

    def rows(self, seqs: Sequence[int]) -> list[Json]:
        """These rows, in this order."""
        if not seqs:
            return []
        with self.index.reading() as database:
            numbers = orjson.dumps(list(seqs)).decode()
            sql = f"{_ROW} WHERE r.seq IN (SELECT value FROM json_each(?))"
            by_seq = {row[0]: _as_json(row) for row in database.execute(sql, (numbers,))}
        return [by_seq[seq] for seq in seqs if seq in by_seq]

    def group(self, task: int) -> list[Json]:
        """The rows with this task index, failed attempts included: rollouts that were sampled together."""
        return self._with_task("g", task)

    def task(self, task: int) -> list[Json]:
        """All rows of the task that has this index, of its other groups, too, in the order of their indices."""
        return self._with_task("task_key", task)

    def _with_task(self, key: str, task: int) -> list[Json]:
        if self.index.extent().version < 0:
            return []
        with self.index.reading() as database:
            own = f"SELECT {key} FROM groups WHERE task = ?"
            by = "r.task, r.rollout IS NULL, r.rollout, r.seq"
            sql = f"{_ROW} WHERE r.{key} IN ({own}) ORDER BY {by} LIMIT ?"
            return [_as_json(row) for row in database.execute(sql, (task, MAX_ROWS))]

    def tasks(self, q: str, sort: str, offset: int, limit: int) -> Page:
        """The tasks of these rows; their numbers are those of these rows alone."""
        extent = self.index.extent()
        selection = self.selection(q, extent)
        keys, scanned = self._order("tasks", q, sort, extent)
        some = list(keys[offset : offset + limit])
        by_task = {}
        if some:
            with self.index.reading() as database:
                columns = ", ".join(TASK_COLUMNS.values())
                own = "r.task_key IN (SELECT value FROM json_each(?))"
                sql = (
                    f"SELECT r.task_key, {columns} FROM {FROM} WHERE {own} AND ({selection.where}) GROUP BY r.task_key"
                )
                parameters = (orjson.dumps(some).decode(), *selection.parameters)
                by_task = {
                    row[0]: dict(zip(TASK_COLUMNS, row[1:], strict=True)) for row in database.execute(sql, parameters)
                }
                for key, curve in _curves(database, f"{own} AND ({selection.where})", parameters).items():
                    by_task[key]["curve"] = curve[:: -(-len(curve) // MAX_POINTS)]
        rows = [by_task[key] for key in some if key in by_task]
        return Page(rows, len(keys), extent.rows + extent.failures, scanned)

    def selection(self, q: str, extent: Extent) -> Selection:
        """The rows that a filter lets through."""
        return _selection(parse(q, self.fields()), lambda: self._order("rows", q, "", extent))

    def _order(self, table: str, q: str, sort: str, extent: Extent) -> _Order:
        if extent.version < 0:
            return _Order([], 1.0)
        with self._one_at_a_time:
            make = self._sorted_rows if table == "rows" else self._sorted_tasks
            return self._cached_order((table, q, sort, extent.version), lambda: make(q, sort, extent))

    def _cached_order(self, key: tuple[str, str, str, int], make: Callable[[], _Order]) -> _Order:
        """A cached or new order; an unfinished search is not cached."""
        order = self._orders.get(key) or make()
        if order.scanned >= 1:
            self._orders[key] = order
            self._orders.move_to_end(key)
            while len(self._orders) > CACHED_ORDERS:
                self._orders.popitem(last=False)
        return order

    def _sorted_rows(self, q: str, sort: str, extent: Extent) -> _Order:
        query = parse(q, self.fields())
        if not query.texts:
            return self._candidates(query, sort)
        key = ("candidates", f"{query.where}{query.parameters}", sort, extent.version)
        candidates = self._cached_order(key, lambda: self._candidates(query, sort))
        result = self._search.filter(candidates.keys, query.texts, extent.epoch)
        return _Order(array("q", result.rows), result.scanned)

    def _candidates(self, query: Query, sort: str) -> _Order:
        """Rows in their order, whatever texts they have."""
        by, values = order(sort, self.fields())
        with self.index.reading() as database:
            sql = f"SELECT r.seq FROM {FROM} WHERE {query.where} ORDER BY {by}"
            return _Order(_column(database, sql, (*query.parameters, *values)), 1.0)

    def _sorted_tasks(self, q: str, sort: str, extent: Extent) -> _Order:
        where, parameters, scanned = _selection(parse(q, self.fields()), lambda: self._sorted_rows(q, "", extent))
        by = _task_order(sort)
        key = "r.task_key"
        sql = f"SELECT {key} FROM {FROM} WHERE {key} IS NOT NULL AND ({where}) GROUP BY {key} ORDER BY {by}"
        with self.index.reading() as database:
            return _Order(_column(database, sql, parameters), scanned)


def _selection(query: Query, search: Callable[[], _Order]) -> Selection:
    """The rows of a query. search: finds those that have its texts."""
    if not query.texts:
        return Selection(query.where, query.parameters, 1.0)
    keys, scanned = search()
    return Selection("r.seq IN (SELECT value FROM json_each(?))", (orjson.dumps(list(keys)).decode(),), scanned)


def _curves(database: sqlite3.Connection, where: str, parameters: Sequence[Any]) -> dict[int, list[list[float]]]:
    """By task: [weights, mean reward, rollouts], in the order of the weights."""
    curves: dict[int, list[list[float]]] = {}
    sql = (
        f"SELECT r.task_key, {WEIGHTS} AS weights, avg(r.reward), count(*) FROM {FROM} WHERE {where} "
        "AND weights IS NOT NULL AND r.reward IS NOT NULL GROUP BY r.task_key, weights ORDER BY weights"
    )
    for key, *point in database.execute(sql, parameters):
        curves.setdefault(key, []).append(point)
    return curves


def _task_order(sort: str) -> str:
    keys = []
    for key in filter(None, (part.strip() for part in (sort or "task").split(","))):
        name = key.removeprefix("-")
        if name not in TASK_COLUMNS:
            raise WrongFilter(f"tasks cannot be sorted by {name!r:.60}; there are {', '.join(TASK_COLUMNS)}")
        keys.append(f"{TASK_COLUMNS[name]} IS NULL, {TASK_COLUMNS[name]} {'DESC' if name != key else 'ASC'}")
    return ", ".join([*keys, "min(r.task)", "r.task_key"])


def _column(database: sqlite3.Connection, sql: str, parameters: Sequence[Any]) -> array[int]:
    return array("q", (key for (key,) in database.execute(sql, parameters)))


def _as_json(row: Sequence[Any]) -> Json:
    record: Json = {"row": row_name(row[0]), **dict(zip(COLUMNS, row[1:], strict=True))}
    for name in ("components", "fields"):
        record[name] = orjson.loads(record[name]) if record[name] else {}
    return record
