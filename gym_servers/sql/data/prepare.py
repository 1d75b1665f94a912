"""Public questions about databases, as rows of ours (`ng_prepare synthetic_sql`)."""

import sqlite3
from contextlib import closing

from ngym.files.task_rows import function_tool
from ngym.prepare import ConvertedRow, PublicSet, Unconvertible, part, saying
from ngym.schema import Json

TASKS = {"analytics and reporting", "data retrieval"}  # the others write
PROMPT = (
    "{setup}\n\n{question}\n\nYou may try queries on the database. Answer with one SQLite SELECT in a ```sql block; it is "
    "also run on other databases with these tables."
)
SQL = {"type": "string", "description": "One SELECT statement in SQLite's dialect.", "maxLength": 20000}
QUERY = function_tool("query", "Run a SELECT on the database and see its first rows.", {"sql": SQL})
MAX_STEPS = 1_000_000  # of SQLite's own, for a statement
MAX_BYTES = 1_000_000  # of a value
REFUSED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_CREATE_VTABLE}


def synthetic_sql(record: Json) -> ConvertedRow:
    """`{"sql_task_type", "sql_prompt", "sql_context", "sql"}`: the context is a script of CREATE and INSERT.

    The hidden database is the shown one without every third row of each table.
    """
    if record["sql_task_type"] not in TASKS:
        raise Unconvertible("not a question but a change")
    setup, gold = record["sql_context"], record["sql"]
    row = {
        "responses_create_params": {
            "input": PROMPT.format(setup=setup, question=record["sql_prompt"]),
            "tools": [QUERY],
        },
        "setup": setup,
        "hidden": [_thin(setup, gold)],
        "gold": gold,
    }
    return ConvertedRow(row, saying(f"```sql\n{gold}\n```"))


def _thin(setup: str, gold: str) -> str:
    """A script for another database with these tables, on which the query has other rows."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.set_progress_handler(lambda: True, MAX_STEPS)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
        database.set_authorizer(lambda action, *_: sqlite3.SQLITE_DENY if action in REFUSED else sqlite3.SQLITE_OK)
        try:
            database.executescript(setup)
            before = database.execute(gold).fetchall()
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (table,) in tables:
                database.execute(f"DELETE FROM {_quoted(table)} WHERE rowid % 3 = 1")
            after = database.execute(gold).fetchall()
            database.set_authorizer(None)
            script = "\n".join(database.iterdump())
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise Unconvertible(f"SQLite cannot run it ({type(error).__name__})") from None
    if not before or before == after:
        raise Unconvertible("a result that can be guessed: it is empty, or the same with fewer rows")
    return script


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


SETS = (
    PublicSet(
        name="synthetic_sql",
        title="synthetic_text_to_sql",
        environment="sql",
        host="hugging_face",
        repo="gretelai/synthetic_text_to_sql",
        revision="740ab236e64503fba51be1101df7a1be83bf455d",
        licence="Apache-2.0",
        rows=105_851,
        note="synthetic, of many dialects: what SQLite cannot run is left out",
        parts=(
            part(
                "synthetic_text_to_sql_train.snappy.parquet",
                "2bee9ac07cf5057d36b5ea30fb47d948697e882f42bd1cc661185396287c0180",
                "train",
            ),
            part(
                "synthetic_text_to_sql_test.snappy.parquet",
                "f2056edcd897db59c89d12bde149a36d4e242ac0d2c6d4d42b1f2bc764318993",
                "validation",
            ),
        ),
        convert=synthetic_sql,
    ),
)
