"""sql: gold cases, generated rows, files, and queries that write, leak or never end."""

import asyncio
import hashlib
import json
import runpy
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from local_services import local_services
from paths import ROOT

from ngym.errors import ServiceError
from ngym.services.base.app import load

SETUP = "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c');"
OTHER = "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO t VALUES (7, 'secret');"
TASK = {"setup": SETUP, "hidden": [OTHER], "gold": "SELECT count(*) FROM t"}


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "data" / "sql" / f"{file}.jsonl").read_text().splitlines()]


def request(task: dict[str, Any], text: str) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"responses_create_params": {"input": "a question"}, "response": {"output": [message]}, **task}


def serving(**options: Any):
    return local_services({"sql": options}, sql=load(ROOT / "gym_servers/sql/app.py").app)


@pytest.fixture
async def gym():
    async with serving(deadline_s=2.0) as peers:
        yield peers["sql"]


async def test_every_gold_case_gets_the_reward_it_must_get(gym):
    wrong = []
    for case in rows("gold"):
        session, row = gym.session(), request(case["task"], case["text"])
        await session.post("/seed_session", row)
        for tool, arguments in case.get("calls", ()):
            await session.post(f"/{tool}", arguments)
        answer = await session.post("/verify", row)
        actual = {key: answer.get(key) for key in case["expect"]}
        if actual != case["expect"]:
            wrong.append((case["case"], actual, answer["reason"]))
    assert not wrong


async def test_the_query_of_a_shipped_row_is_worth_one_and_its_result_alone_nothing(gym):
    for row in rows("validation"):
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(row["setup"])
            result = connection.execute(row["gold"]).fetchall()
        literal = " UNION ALL ".join("SELECT " + ", ".join("NULL" if v is None else repr(v) for v in r) for r in result)
        task = {key: row[key] for key in ("setup", "hidden", "gold")}
        right, listed = await asyncio.gather(
            *(gym.post("/verify", request(task, f"```sql\n{sql}\n```")) for sql in (row["gold"], literal))
        )
        assert (right["reward"], listed["reward"]) == (1.0, 0.0), row["gold"]


HOSTILE = (
    "DELETE FROM t", "UPDATE t SET name = 'x'", "INSERT INTO t VALUES (9, 'z')", "DROP TABLE t", "CREATE TABLE u (x)",
    "REPLACE INTO t VALUES (1, 'x')", "ATTACH '/tmp/ngym-sql.db' AS other", "VACUUM INTO '/tmp/ngym-sql.db'",
    "PRAGMA query_only = OFF", "PRAGMA writable_schema = ON", "SELECT * FROM pragma_database_list",
    "PRAGMA hard_heap_limit = 0", "BEGIN EXCLUSIVE", "SAVEPOINT s", "REINDEX", "ANALYZE", "DETACH main",
    "CREATE TEMP TABLE u AS SELECT 1", "CREATE TRIGGER r AFTER INSERT ON t BEGIN SELECT 1; END",
    "SELECT load_extension('/tmp/evil.so')", "SELECT fts3_tokenizer('simple')", "SELECT readfile('/etc/passwd')",
    "SELECT writefile('/tmp/ngym-sql.db', 'x')", "SELECT length(randomblob(1000000000))", "SELECT zeroblob(400000000)",
    "SELECT length(hex(zeroblob(900000)))",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
    "WITH RECURSIVE n(s) AS (SELECT zeroblob(900000) UNION ALL SELECT s || zeroblob(1) FROM n) SELECT s FROM n",
    ("WITH RECURSIVE n(i, s) AS (SELECT 1, hex(zeroblob(400000)) UNION ALL SELECT i + 1, s FROM n WHERE i < 100000) "
     "SELECT sum(length(replace(s, '0', '1'))) FROM n"),
    "SELECT count(*) FROM t a, t b, t c, t d, t e, t f, t g, t h, t i, t j, t k, t l, t m, t n, t o, t p, t q, t r, t s",
    "SELECT name LIKE '" + "%a" * 3000 + "' FROM t", "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT 1" + " UNION SELECT 1" * 1000, "SELECT 1; DELETE FROM t", "", ";", "-- nothing", "EXPLAIN SELECT 1",
    "SELECT printf('%.*c', 100000000, 'x')", 
    "SELECT group_concat(a.name) FROM t a, t b, t c, t d, t e, t f, t g, t h, t i, t j, t k, t l, t m",
    "SELECT json_extract('" + "[" * 5000 + "', '$')", "SELECT '\x00', char(0)",
)  # fmt: skip


async def test_no_hostile_query_is_paid_or_lasts_and_the_next_one_is_answered(gym):
    graded = await asyncio.gather(*(gym.post("/verify", request(TASK, f"```sql\n{sql}\n```")) for sql in HOSTILE))
    assert {sql[:60]: answer["reward"] for sql, answer in zip(HOSTILE, graded, strict=True)} == {
        sql[:60]: 0.0 for sql in HOSTILE
    }
    honest = await gym.post("/verify", request(TASK, "SELECT count(*) FROM t"))
    assert (honest["reward"], honest["outcome"]) == (1.0, "correct")
    assert not Path("/tmp/ngym-sql.db").exists()


async def test_the_tool_shows_a_bounded_part_of_the_shown_database_and_nothing_of_the_hidden_ones(gym):
    session = gym.session()
    await session.post("/seed_session", request(TASK, ""))
    result = await session.post("/query", {"sql": "SELECT name, id FROM t ORDER BY id"})
    assert result == {
        "columns": ["name", "id"],
        "rows": [["a", 1], ["b", 2], ["c", 3]],
        "row_count": 3,
        "truncated": False,
    }
    wide = await session.post("/query", {"sql": "SELECT hex(zeroblob(5000)), x'00ff', 1e999 FROM t a, t b, t c, t d"})
    assert (len(wide["rows"]), wide["truncated"], len(json.dumps(wide)) < 10_000) == (30, True, True)
    for sql in ("DELETE FROM t", "SELECT nothing", "SELECT * FROM pragma_database_list", "VALUES", HOSTILE[26]):
        with pytest.raises(ServiceError, match="query: "):
            await session.post("/query", {"sql": sql})
    schema = await session.post("/query", {"sql": "SELECT group_concat(sql) FROM sqlite_master"})
    everything = await session.post("/query", {"sql": "SELECT * FROM t"})
    assert "secret" not in json.dumps([schema, everything])


async def test_queries_are_counted():
    async with serving(max_queries=2) as peers:
        session = peers["sql"].session()
        await session.post("/seed_session", request(TASK, ""))
        for _ in range(2):
            await session.post("/query", {"sql": "SELECT 1"})
        with pytest.raises(ServiceError, match="no more than 2 queries"):
            await session.post("/query", {"sql": "SELECT 1"})


async def test_databases_in_files_are_read_and_stay_as_they_are(tmp_path):
    folder = tmp_path / "shop 1?"
    files = [folder / "shop" / name for name in ("shop.sqlite", "variant.sqlite")]
    (folder / "shop").mkdir(parents=True)
    for file, script in zip(files, (SETUP, OTHER), strict=True):
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(script)
    before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    task = {"database": "shop", "gold": "SELECT count(*) FROM t"}
    async with serving(databases=str(folder), deadline_s=2.0) as peers:
        texts = ("SELECT count(*) FROM t", "SELECT 3", *(f"```sql\n{sql}\n```" for sql in HOSTILE[:25]))
        answers = await asyncio.gather(*(peers["sql"].post("/verify", request(task, text)) for text in texts))
        for name in ("../shop", "/etc", "nowhere"):
            with pytest.raises(ServiceError, match="database"):
                await peers["sql"].post("/verify", request({**task, "database": name}, texts[0]))
    assert [answer["reward"] for answer in answers] == [1.0] + [0.0] * 26
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == before


async def test_the_gold_query_does_not_take_the_time_of_the_answer(gym, monkeypatch):
    """The gold query runs within the deadline, and then once more beside the answer."""
    pool = load(ROOT / "gym_servers/sql/app.py").pool
    run, deadlines = pool.run, {}

    async def record_deadline(name, *arguments, deadline_s):
        deadlines[name] = deadline_s
        return await run(name, *arguments, deadline_s=deadline_s)

    monkeypatch.setattr(pool, "run", record_deadline)
    assert (await gym.post("/verify", request(TASK, "SELECT count(*) FROM t")))["reward"] == 1.0
    assert deadlines == {"expect": 2.0, "grade": 4.0}


async def test_a_gold_query_that_fails_is_not_a_verdict(gym):
    answer = await gym.post("/verify", request({**TASK, "gold": "SELECT nome FROM t"}, "SELECT count(*) FROM t"))
    assert (answer["reward"], answer["outcome"], answer["reason"]) == (None, "gold_error", "no such column: nome")


async def test_the_shipped_data_is_what_its_script_makes_and_no_question_of_validation_is_in_training(
    gym, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "data" / "sql" / "generate.py"), run_name="__main__")
    for file in ("train", "validation", "example"):
        assert (tmp_path / f"{file}.jsonl").read_bytes() == (ROOT / "data" / "sql" / f"{file}.jsonl").read_bytes()
    prompts = [{row["responses_create_params"]["input"] for row in rows(file)} for file in ("train", "validation")]
    assert not prompts[0] & prompts[1]
    tools = await gym.get("/tools")
    assert all(row["responses_create_params"].get("tools", []) == tools for row in rows("train") + rows("validation"))
