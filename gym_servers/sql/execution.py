"""Runs untrusted queries in a worker process: read-only, with bounded time and output.

A statement may only select; an authorizer refuses everything else at compile time. Its work is counted in SQLite's
own instructions, so that the same query gets the same verdict on any machine.
"""

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ngym.grading.number_match import close

Rows = list[tuple[Any, ...]]
Database = dict[str, str | None]

MAX_STEPS = 20_000_000
STEPS_A_LOOK = 1_000
MAX_ROWS = 10_000
MAX_CELLS = 200_000
SHOWN_ROWS = 30
SHOWN_CHARS = 200  # of a cell
HEAP_BYTES = 64 << 20
TOLERANCE = 1e-6
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
# A script that fills a database may not use other files or settings of the connection.
NOT_IN_SCRIPTS = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
SCRIPT_PRAGMAS = {"foreign_keys", "encoding"}
# Functions that are random or not about the data.
REFUSED_FUNCTIONS = {"load_extension", "random", "randomblob", "sqlite_compileoption_get", "fts3_tokenizer"}


class QueryTooExpensive(Exception):
    """More steps, rows or bytes than a query may have."""


def call(name: str, *arguments: Any) -> Any:
    """The worker's entry: `show`, `expect` or `grade`."""
    entries: dict[str, Callable[..., dict[str, Any]]] = {"show": show, "expect": expect, "grade": grade}
    return entries[name](*arguments)


def show(database: Database, sql: str) -> dict[str, Any]:
    """The first rows, for the policy, or `{"error"}` with what is wrong with the query."""
    try:
        with open_database(database) as connection:
            columns, rows = fetch(connection, sql)
    except (sqlite3.Error, sqlite3.Warning, QueryTooExpensive, MemoryError, ValueError) as error:
        return {"error": str(error) or "out of memory"}
    cells = [[format_cell(value) for value in row] for row in rows[:SHOWN_ROWS]]
    return {"columns": columns, "rows": cells, "row_count": len(rows), "truncated": len(rows) > SHOWN_ROWS}


def expect(databases: list[Database], gold: str) -> dict[str, Any]:
    """Run the gold query on all databases; `{"error"}` says what is wrong."""
    try:
        for database in databases:
            with open_database(database) as connection:
                fetch(connection, gold)
    except (sqlite3.Error, sqlite3.Warning, QueryTooExpensive, MemoryError, ValueError) as error:
        return {"error": str(error) or "out of memory"}
    return {}


def grade(databases: list[Database], gold: str, query: str, ordered: bool) -> dict[str, Any]:
    """`{"outcome": "correct" | "wrong" | "sql_error" | "too_heavy", "reason"}`."""
    for number, database in enumerate(databases):
        with open_database(database) as connection:
            expected = fetch(connection, gold)[1]
        try:
            with open_database(database) as connection:
                got = fetch(connection, query)[1]
        except QueryTooExpensive as error:
            return {"outcome": "too_heavy", "reason": str(error)}
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
            return {"outcome": "sql_error", "reason": str(error) or "out of memory"}
        if not equal(expected, got, ordered):
            which = "the database" if number == 0 else f"hidden database {number}"
            return {"outcome": "wrong", "reason": f"other rows on {which}"}
    return {"outcome": "correct", "reason": None}


@contextmanager
def open_database(database: Database) -> Iterator[sqlite3.Connection]:
    """A connection with limits that can only read. It leaves no changes."""
    path = database["file"]
    location = "file::memory:" if path is None else f"{Path(path).as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(location, uri=True, isolation_level=None, cached_statements=0)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # so that no script writes a file
        if database["script"] is not None:
            connection.set_authorizer(authorize_script)
            with limit_steps(connection):
                connection.executescript(database["script"])
            connection.set_authorizer(None)
        connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA query_only = ON")
        connection.text_factory = lambda text: text.decode(errors="replace")
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(authorize)
        yield connection


def authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Allow only selects from tables and harmless functions."""
    if action in ALLOWED:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def authorize_script(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Allow anything that stays in the one database."""
    if action in NOT_IN_SCRIPTS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in SCRIPT_PRAGMAS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() == "load_extension":
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def fetch(connection: sqlite3.Connection, sql: str) -> tuple[list[str], Rows]:
    """Column names and all rows. Raises sqlite3.Error, QueryTooExpensive or ValueError (not a query)."""
    rows: Rows = []
    with limit_steps(connection):
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise ValueError("not a query")
        for row in cursor:
            rows.append(row)
            if len(rows) > MAX_ROWS or len(rows) * len(row) > MAX_CELLS:
                raise QueryTooExpensive(f"more than {min(MAX_ROWS, MAX_CELLS // len(row)):,} rows")
    return [column[0] for column in cursor.description], rows


@contextmanager
def limit_steps(connection: sqlite3.Connection) -> Iterator[None]:
    """Raises QueryTooExpensive after MAX_STEPS of SQLite's instructions."""
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looks * STEPS_A_LOOK > MAX_STEPS

    connection.set_progress_handler(look, STEPS_A_LOOK)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            raise QueryTooExpensive(f"more than {MAX_STEPS:,} steps") from None
        raise


def equal(expected: Rows, got: Rows, ordered: bool) -> bool:
    """The same rows equally often, in the same order if `ordered`; floats within TOLERANCE, column names ignored."""
    if len(expected) != len(got):
        return False
    if not ordered:
        expected, got = sorted(expected, key=rank), sorted(got, key=rank)
    return all(len(row) == len(other) and all(map(same, row, other)) for row, other in zip(expected, got, strict=True))


def same(expected: Any, got: Any) -> bool:
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got  # no tolerance for counts and ids
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return expected == got or close(expected, got, TOLERANCE)
    return type(expected) is type(got) and bool(expected == got)


def rank(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A sort key with exact values first, so that rows that differ only by rounding are at the same place."""
    exact = tuple((kind(value), value) for value in row if not isinstance(value, int | float) and value is not None)
    return exact, tuple(kind(value) for value in row), tuple(v for v in row if isinstance(v, int | float))


def kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) else type(value).__name__


def format_cell(value: Any) -> Any:
    """A value as the policy sees it."""
    if isinstance(value, bytes):
        value = f"x'{value[:SHOWN_CHARS].hex()}'"
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return value[:SHOWN_CHARS] + "..."
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
