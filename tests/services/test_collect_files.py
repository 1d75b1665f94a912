"""The files of a collection: contents, resumed runs, and refusals."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import json
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from stub_agents import Answer, instant_agent, problem, scored_row, serving, task

from ngym.collect import CollectionLimits, CollectionPlan
from ngym.collect.aggregate import Aggregates
from ngym.collect.collection_files import CollectionFiles
from ngym.collect.plan import InputCheck
from ngym.collect.run_record import CollectionSettings
from ngym.errors import UsageError
from ngym.files.atomic import FileLocked
from ngym.files.jsonl import read
from ngym.peers import Peers
from ngym.schema import Json

LIMITS = CollectionLimits(retry_s=(0.0,), poll_s=0.05)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Ten tasks in a file."""
    return write_rows(tmp_path / "tasks.jsonl", [task(n) for n in range(10)])


def write_rows(path: Path, rows: list[Json]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def rows(path: Path) -> list[Json]:
    return [line.row for line in read(path)] if path.exists() else []


def keys(path: Path) -> list[tuple[int, int]]:
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows(path)]


async def session(
    source: CollectionSettings,
    answer: Answer = scored_row,
    *,
    stop_after: int | None = None,
    max_attempts: int = 3,
    resume: bool = False,
    overwrite: bool = False,
) -> CollectionFiles:
    """One run of the collector on `out.jsonl` beside the input."""
    files = CollectionFiles(source.inputs[0].with_name("out.jsonl"), source)
    try:
        files.prepare(
            resume=resume, overwrite=overwrite, max_attempts=max_attempts, agents={"agent"}, command=["test", "--x"]
        )
        async with serving(answer) as url:
            peers = Peers({"agent": [url]})
            run = files.run(peers, CollectionLimits(4, max_attempts=max_attempts, retry_s=(0.0,)))
            count = 0
            try:
                async with aclosing(run.outcomes(files.todo(max_attempts))) as outcomes:
                    async for _ in outcomes:
                        count += 1
                        if count == stop_after:
                            break
            finally:
                await files.flush()
                await peers.close()
        files.finish("done" if stop_after is None else "interrupted")
    finally:
        files.close()
    return files


async def test_the_files_of_a_collection(tmp_path: Path, tasks: Path) -> None:
    params = {"temperature": 0.5}
    await session(
        CollectionSettings(
            tasks, CollectionPlan("agent", repeats=2, limit=3, params=params), services={"agent": {"kind": "agent"}}
        )
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.jsonl",
        "out_aggregate_metrics.json",
        "out_materialized_inputs.jsonl",
        "out_run.json",
        "tasks.jsonl",
    ]
    assert sorted(keys(tmp_path / "out.jsonl")) == [(n, i) for n in range(3) for i in range(2)]
    assert rows(tmp_path / "out_materialized_inputs.jsonl")[1] == {
        **task(0),
        "responses_create_params": {"input": "task 0", "temperature": 0.5},
        "_ng_task_index": 0,
        "_ng_rollout_index": 1,
        "agent_ref": {"type": "responses_api_agents", "name": "agent"},
    }
    record = json.loads((tmp_path / "out_run.json").read_text())
    assert record["run_id"] == rows(tmp_path / "out.jsonl")[0]["ng"]["run_id"]
    assert record["config"]["params"] == params and record["rollouts"] == 6
    assert record["invocations"][0]["status"] == "done" and record["invocations"][0]["command"] == ["test", "--x"]
    [aggregate] = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    assert aggregate["agent_ref"]["name"] == "agent"
    assert aggregate["key_metrics"] == {
        "mean/reward": 1.0,
        "unscored/reward": 0.0,
        "pass@1/reward": 1.0,
        "pass@2/reward": 1.0,
    }
    assert aggregate["agent_metrics"]["mean/output_tokens"] == 3.0
    assert len(aggregate["group_level_metrics"]) == 3


@pytest.mark.parametrize("own", [None, "a text", {"class": "of a bridge"}])
async def test_a_task_may_have_a_field_that_is_called_failure(tmp_path: Path, own: Any) -> None:
    source = CollectionSettings(
        write_rows(tmp_path / "tasks.jsonl", [{**task(n), "failure": own} for n in range(6)]), CollectionPlan("agent")
    )
    fails = {"task 1"}
    answers: Answer = lambda row: problem(500) if row["responses_create_params"]["input"] in fails else scored_row(row)
    await session(source, answers, stop_after=4, max_attempts=1)
    await session(source, answers, resume=True, max_attempts=1)
    fails.clear()
    await session(source, answers, resume=True, max_attempts=2)
    assert sorted(keys(tmp_path / "out.jsonl")) == [(n, 0) for n in range(6)]
    assert keys(tmp_path / "out_failures.jsonl") == [(1, 0)]


async def test_unscored_rollouts_and_failures_are_left_out_of_the_mean(tasks: Path) -> None:
    def answer(row: Json) -> Any:
        if row["n"] == 0:
            return scored_row(row, None)
        return problem(500, failure="verify_error", retryable=False) if row["n"] == 1 else scored_row(row, row["n"] % 2)

    files = await session(CollectionSettings(tasks, CollectionPlan("agent")), answer)
    [tally] = files.aggregates.by_agent.values()
    assert (tally.rollouts, tally.rewards.count, tally.rewards.mean, tally.unscored) == (9, 8, 0.5, 1)
    assert (dict(tally.failures), dict(tally.given_up)) == ({"verify_error": 1}, {"verify_error": 1})
    [failed] = rows(tasks.with_name("out_failures.jsonl"))
    assert (failed["n"], failed["attempt"], failed["failure"]["class"]) == (1, 0, "verify_error")


async def test_output_that_exists_is_neither_deleted_nor_mixed(tasks: Path) -> None:
    await session(CollectionSettings(tasks, CollectionPlan("agent", limit=1)))
    before = tasks.with_name("out.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"already holds rollouts; add --resume .* or --overwrite"):
        await session(CollectionSettings(tasks, CollectionPlan("agent", limit=1)))
    assert tasks.with_name("out.jsonl").read_bytes() == before
    await session(CollectionSettings(tasks, CollectionPlan("agent", limit=2)), overwrite=True)
    assert len(rows(tasks.with_name("out.jsonl"))) == 2


async def test_overwrite_forgets_old_failures_too(tasks: Path) -> None:
    await session(CollectionSettings(tasks, CollectionPlan("agent")), lambda row: problem(500, retryable=False))
    assert len(rows(tasks.with_name("out_failures.jsonl"))) == 10
    files = await session(CollectionSettings(tasks, CollectionPlan("agent")), overwrite=True)
    assert not tasks.with_name("out_failures.jsonl").exists() and files.aggregates.given_up == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_overwrite_touches_nothing_until_the_first_new_row_and_keeps_the_old_files(tasks: Path) -> None:
    folder, out = tasks.parent, tasks.with_name("out.jsonl")
    await session(
        CollectionSettings(tasks, CollectionPlan("agent")),
        lambda row: scored_row(row) if row["n"] else problem(500, retryable=False),
    )
    before = contents(folder)
    during: list[dict[str, bytes]] = []

    def answer(row: Json) -> Any:
        during.append(contents(folder))
        return scored_row(row)

    await session(CollectionSettings(tasks, CollectionPlan("agent", limit=1)), answer, overwrite=True)
    assert before.items() <= during[0].items(), "nothing of the old set is touched"
    assert keys(out) == [(0, 0)]
    after = contents(folder)
    olds = {name.removesuffix(".old"): content for name, content in after.items() if name.endswith(".old")}
    assert olds == {name: content for name, content in before.items() if name != "tasks.jsonl"}
    assert not any(name.endswith(".new") for name in after)
    assert "out_failures.jsonl" not in after
    assert json.loads(after["out_run.json"])["run_id"] != json.loads(olds["out_run.json"])["run_id"]


async def test_an_overwrite_that_ends_before_its_first_row_leaves_everything_as_it_was(tasks: Path) -> None:
    await session(CollectionSettings(tasks, CollectionPlan("agent")))
    before = contents(tasks.parent)
    source = CollectionSettings(tasks, CollectionPlan("agent", repeats=2))
    files = CollectionFiles(tasks.with_name("out.jsonl"), source)
    files.prepare(resume=False, overwrite=True, max_attempts=3, agents={"agent"}, command=[])
    assert files.replaces
    await files.flush()
    files.finish("interrupted")
    files.close()
    assert contents(tasks.parent) == before
    again = await session(CollectionSettings(tasks, CollectionPlan("agent")), lambda row: problem(500), resume=True)
    assert again.progress.done == 10, "the old run can be resumed"


async def test_old_rollouts_are_not_replaced_by_a_run_without_any(tasks: Path) -> None:
    out = tasks.with_name("out.jsonl")
    await session(CollectionSettings(tasks, CollectionPlan("agent")))
    before = out.read_bytes()
    await session(
        CollectionSettings(tasks, CollectionPlan("agent")), lambda row: problem(500, retryable=False), overwrite=True
    )
    assert not out.exists() and len(rows(tasks.with_name("out_failures.jsonl"))) == 10
    await session(CollectionSettings(tasks, CollectionPlan("agent", limit=2)), overwrite=True)
    assert len(rows(out)) == 2 and Path(f"{out}.old").read_bytes() == before
    await session(CollectionSettings(tasks, CollectionPlan("agent", limit=3)), overwrite=True)
    assert len(rows(Path(f"{out}.old"))) == 2 and len(rows(out)) == 3


OVERWRITER = """
import os, signal, sys
from pathlib import Path

step = int(sys.argv[3])
calls = 0

def counted(call):
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapper

for name in ("rename", "unlink", "link", "fdatasync", "fsync", "open"):
    setattr(os, name, counted(getattr(os, name)))  # Path.rename and Path.unlink call these

from ngym.collect import CollectionLimits, CollectionPlan
from ngym.collect.aggregate import Aggregates
from ngym.collect.collection_files import CollectionFiles
from ngym.collect.plan import InputCheck
from ngym.collect.run_record import CollectionSettings
from ngym.runtime.event_loop import run
from ngym.peers import Peers

async def main(files, url):
    peers = Peers({"agent": [url]})
    collection = files.run(peers, CollectionLimits(4))
    async for outcome in collection.outcomes(files.todo(3)):
        pass
    await files.flush()
    await peers.close()
    files.finish("done")

folder, url = Path(sys.argv[1]), sys.argv[2]
files = CollectionFiles(folder / "out.jsonl", CollectionSettings(folder / "tasks.jsonl", CollectionPlan("agent", repeats=2)))
calls = 0
files.prepare(resume=False, overwrite=True, max_attempts=3, agents=None, command=[])
run(main(files, url))
files.close()
print(calls)
"""


async def test_an_overwrite_killed_at_any_step_loses_no_old_row_while_there_is_not_a_new_one(tasks: Path) -> None:
    """Before each call that touches the disk; then --resume continues whichever run has the rows."""
    out = tasks.with_name("out.jsonl")
    await session(
        CollectionSettings(tasks, CollectionPlan("agent")),
        lambda row: scored_row(row) if row["n"] else problem(500, retryable=False),
    )
    first = contents(tasks.parent)
    resumed_old = resumed_new = 0
    with instant_agent() as url:
        for step in range(1, 200):
            for path in tasks.parent.iterdir():
                path.unlink()
            for name, content in first.items():
                tasks.with_name(name).write_bytes(content)
            command = [sys.executable, "-c", OVERWRITER, str(tasks.parent), url, str(step)]
            ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
            assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
            old_rows, before = first["out.jsonl"], contents(tasks.parent)
            if before.get("out.jsonl") != old_rows:
                assert before["out.jsonl.old"] == old_rows, f"step {step}"
                assert before["out.jsonl"].count(b"\n") >= 1, f"step {step}: a new row takes the place of the old ones"
            if ended.returncode == 0:
                break
            replaced = b"\n" in before.get("out.jsonl.new", b"") or before["out.jsonl"] != old_rows
            repeats = 2 if replaced else 1
            files = await session(
                CollectionSettings(tasks, CollectionPlan("agent", repeats=repeats)), max_attempts=1, resume=True
            )
            after = contents(tasks.parent)
            assert not any(name.endswith(".new") for name in after), f"step {step}"
            if replaced:
                resumed_new += 1
                assert sorted(keys(out)) == [(n, i) for n in range(10) for i in range(2)]
                assert after["out.jsonl.old"] == old_rows and after["out_run.json.old"] == first["out_run.json"]
                assert after["out_failures.jsonl.old"] == first["out_failures.jsonl"]
            else:
                resumed_old += 1
                assert (files.progress.done, files.progress.given_up) == (9, 1)
                assert after["out.jsonl"] == old_rows and "out.jsonl.old" not in after
    assert ended.returncode == 0 and resumed_old > 5 and resumed_new > 5


async def test_an_input_that_an_overwrite_would_replace_is_refused(tasks: Path) -> None:
    await session(CollectionSettings(tasks, CollectionPlan("agent")))
    old = tasks.with_name("out.jsonl.old")
    old.write_bytes(tasks.read_bytes())
    with pytest.raises(UsageError, match=r"out\.jsonl\.old is --input, and is written with --output"):
        CollectionFiles(tasks.with_name("out.jsonl"), CollectionSettings(old, CollectionPlan("agent")))


async def test_a_resumed_run_does_the_rest_and_counts_everything(tasks: Path) -> None:
    write_rows(tasks, [task(n) for n in range(1000)])
    source = CollectionSettings(tasks, CollectionPlan("agent", repeats=2))
    first = await session(source, lambda row: scored_row(row, row["n"] % 2), stop_after=70)
    assert 70 <= len(keys(tasks.with_name("out.jsonl"))) < 2000
    assert first.aggregates.done == len(keys(tasks.with_name("out.jsonl"))), "what was yielded is on the disk"
    second = await session(source, lambda row: scored_row(row, row["n"] % 2), resume=True)
    assert sorted(keys(tasks.with_name("out.jsonl"))) == [(n, i) for n in range(1000) for i in range(2)]
    assert (second.run_id, second.progress.done) == (first.run_id, first.aggregates.done)
    assert second.aggregates.by_agent["agent"].rewards.mean == 0.5
    record = json.loads(tasks.with_name("out_run.json").read_text())
    assert [session["status"] for session in record["invocations"]] == ["interrupted", "done"]


async def test_a_resumed_run_that_is_done_does_nothing(tasks: Path) -> None:
    source = CollectionSettings(tasks, CollectionPlan("agent"))
    await session(source)
    before = tasks.with_name("out.jsonl").read_bytes()
    await session(source, lambda row: problem(500), resume=True)
    assert tasks.with_name("out.jsonl").read_bytes() == before


async def test_resume_without_output_begins(tasks: Path) -> None:
    await session(CollectionSettings(tasks, CollectionPlan("agent")), resume=True)
    assert len(rows(tasks.with_name("out.jsonl"))) == 10


async def test_a_resumed_run_may_have_more_tasks_and_repeats(tasks: Path) -> None:
    await session(CollectionSettings(tasks, CollectionPlan("agent", repeats=1, limit=2)))
    files = await session(CollectionSettings(tasks, CollectionPlan("agent", repeats=2, limit=3)), resume=True)
    assert sorted(keys(tasks.with_name("out.jsonl"))) == [(n, i) for n in range(3) for i in range(2)]
    assert files.progress.done == 2


async def test_a_torn_last_row_is_done_again(tasks: Path) -> None:
    source, out = CollectionSettings(tasks, CollectionPlan("agent")), tasks.with_name("out.jsonl")
    await session(source)
    content = out.read_bytes()
    out.write_bytes(content[:-9])
    await session(source, resume=True)
    assert sorted(keys(out)) == [(n, 0) for n in range(10)]
    assert out.read_bytes()[: len(content) // 2] == content[: len(content) // 2]


async def test_a_row_that_appears_twice_is_dropped(tasks: Path) -> None:
    source, out = CollectionSettings(tasks, CollectionPlan("agent")), tasks.with_name("out.jsonl")
    await session(source)
    content = out.read_bytes()
    out.write_bytes(content + content.splitlines(keepends=True)[3])
    files = await session(source, resume=True)
    assert (out.read_bytes(), files.duplicates) == (content, 1)


async def test_a_changed_input_is_refused_with_both_hashes(tasks: Path) -> None:
    source = CollectionSettings(tasks, CollectionPlan("agent"))
    await session(source)
    before = source.digests()["input"]
    tasks.write_bytes(tasks.read_bytes().replace(b"task 3", b"task X"))
    with pytest.raises(UsageError, match=r"the input .* changed since this run began") as caught:
        await session(source, resume=True)
    assert before in str(caught.value) and source.digests()["input"] in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"recipe": CollectionPlan("agent", params={"temperature": 0.7})}, "params.temperature: 1 then, 0.7 now"),
        ({"recipe": CollectionPlan("agent", params={"temperature": 1}, seed=3)}, "seed: None then, 3 now"),
        ({"token_format": "nemo"}, "token_format: 'ng' then, 'nemo' now"),
        ({"services": {"policy": {"kind": "model", "model": "b"}}}, "services.policy.model: 'a' then, 'b' now"),
    ],
)
async def test_a_changed_config_is_refused_with_both_hashes(tasks: Path, changed: Any, difference: str) -> None:
    first: dict[str, Any] = {
        "recipe": CollectionPlan("agent", params={"temperature": 1}),
        "services": {"policy": {"kind": "model", "model": "a"}},
    }
    await session(CollectionSettings(tasks, **first))
    now = CollectionSettings(tasks, **{**first, **changed})
    with pytest.raises(UsageError, match="the config or its overrides changed since") as caught:
        await session(now, resume=True)
    assert now.digests()["config"] in str(caught.value) and difference in str(caught.value)
    await session(now, overwrite=True)


def test_where_a_service_runs_does_not_make_another_run(tasks: Path) -> None:
    here = {"policy": {"kind": "model", "url": "http://node1:8000"}, "ngym": {"head": {"port": 1}}}
    there = {"policy": {"kind": "model", "urls": ["http://node2:8000"], "replicas": 2}}
    assert (
        CollectionSettings(tasks, CollectionPlan(), services=here).digests()
        == CollectionSettings(tasks, CollectionPlan(), services=there).digests()
    )


async def test_rows_of_an_unknown_run_are_refused(tasks: Path) -> None:
    source = CollectionSettings(tasks, CollectionPlan("agent"))
    await session(source)
    tasks.with_name("out_run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"out_run\.json is not a run's record, so the run that wrote"):
        await session(source, resume=True)
    tasks.with_name("out_run.json").unlink()
    with pytest.raises(UsageError, match=r"out_run\.json does not exist"):
        await session(source, resume=True)


async def test_a_row_of_another_run_is_refused_with_its_line(tasks: Path) -> None:
    source, out = CollectionSettings(tasks, CollectionPlan("agent")), tasks.with_name("out.jsonl")
    await session(source)
    lines = out.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"run_id":"2', b'"run_id":"9')
    out.write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=rf"out\.jsonl:3 \(byte {len(lines[0] + lines[1])}\): a row of another run"):
        await session(source, resume=True)
    lines[2] = b'{"text": "a row of something else"}\n'
    out.write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=r"out\.jsonl:3 .* not a row that was written here"):
        await session(source, resume=True)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("response", None, "response = None: "),
        ("ng", {"timings": 3}, "ng.timings = 3: "),
        ("ng", {"stop_reason": ["x"]}, "ng.stop_reason = "),
        ("reward_components", True, "reward_components = True: "),
        ("agent_ref", {"name": []}, "agent_ref.name = "),
        ("_ng_task_index", 0.5, "indices are missing"),
    ],
)
async def test_a_damaged_row_is_named_with_its_line(tasks: Path, name: str, value: Any, problem: str) -> None:
    source, out = CollectionSettings(tasks, CollectionPlan("agent")), tasks.with_name("out.jsonl")
    await session(source)
    first, *others = map(orjson.loads, out.read_bytes().splitlines())
    first[name] = {**first["ng"], **value} if name == "ng" else value
    out.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in (first, *others)))
    with pytest.raises(UsageError) as caught:
        await session(source, resume=True)
    assert str(caught.value).startswith(f"{out}:1 (byte 0): not a row that was written here")
    assert problem in str(caught.value) and "fix or delete that line" in str(caught.value)


async def test_rows_of_a_newer_format_are_not_resumed(tasks: Path) -> None:
    source, out = CollectionSettings(tasks, CollectionPlan("agent")), tasks.with_name("out.jsonl")
    await session(source)
    rows = out.read_bytes().replace(b'"schema_version":1', b'"schema_version":2')
    out.write_bytes(rows)
    with pytest.raises(UsageError, match=r"out\.jsonl:1 \(byte 0\): its ng.schema_version is 2, and this ngym reads 1"):
        await session(source, resume=True)
    assert out.read_bytes() == rows


async def test_attempts_are_counted_over_sittings(tasks: Path) -> None:
    source = CollectionSettings(tasks, CollectionPlan("agent", limit=2))

    def broken(row: Json) -> Any:
        return problem(500, failure="agent_error", retryable=row["n"] == 0)

    first = await session(source, broken)
    assert first.aggregates.given_up == 2
    assert [row["attempt"] for row in rows(tasks.with_name("out_failures.jsonl")) if row["n"] == 0] == [0, 1, 2]
    second = await session(source, resume=True)
    assert second.progress.given_up == 1, "its attempts are used up; the other one failed only once"
    assert [row["_ng_task_index"] for row in rows(tasks.with_name("out.jsonl"))] == [1]
    assert second.aggregates.given_up == 1
    third = await session(source, max_attempts=4, resume=True)
    assert len(rows(tasks.with_name("out.jsonl"))) == 2 and third.aggregates.given_up == 0
    assert rows(tasks.with_name("out.jsonl"))[1]["ng"]["attempt"] == 3


async def test_a_bad_input_touches_nothing(tmp_path: Path, tasks: Path) -> None:
    await session(CollectionSettings(tasks, CollectionPlan("agent")))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"responses_create_params": {}}\n{"responses_create\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl:2: not JSON"):
        await session(CollectionSettings(bad, CollectionPlan("agent")), overwrite=True)
    bad.unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_work_is_one_line(tmp_path: Path, tasks: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*/none does not exist; make it first: mkdir -p"):
        CollectionFiles(tmp_path / "none" / "out.jsonl", CollectionSettings(tasks, CollectionPlan("agent")))
    with pytest.raises(UsageError, match="is both --input and --output"):
        CollectionFiles(tasks, CollectionSettings(tasks, CollectionPlan("agent")))
    sent = tmp_path / "out_materialized_inputs.jsonl"
    sent.write_bytes(tasks.read_bytes())
    with pytest.raises(
        UsageError, match=r"inputs\.jsonl is --input, and is written with --output .*/out\.jsonl; choose"
    ):
        CollectionFiles(tmp_path / "out.jsonl", CollectionSettings(sent, CollectionPlan("agent")))
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    files = CollectionFiles(tmp_path / "out.jsonl", CollectionSettings(empty, CollectionPlan("agent")))
    with pytest.raises(UsageError, match="no rows in it"):
        files.prepare(resume=False, overwrite=False, max_attempts=3, agents=None, command=[])
    files.close()
    assert not (tmp_path / "out.jsonl").exists()


def test_a_second_collector_on_the_same_file_is_refused(tmp_path: Path, tasks: Path) -> None:
    files = CollectionFiles(tmp_path / "out.jsonl", CollectionSettings(tasks, CollectionPlan("agent")))
    with pytest.raises(FileLocked, match="is being written by process"):
        CollectionFiles(tmp_path / "out.jsonl", CollectionSettings(tasks, CollectionPlan("agent")))
    files.close()


COLLECTOR = """
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from ngym.collect import CollectionLimits, CollectionPlan
from ngym.collect.aggregate import Aggregates
from ngym.collect.collection_files import CollectionFiles
from ngym.collect.plan import InputCheck
from ngym.collect.run_record import CollectionSettings
from ngym.runtime.event_loop import run
from ngym.peers import Peers

async def main(files, url):
    peers = Peers({"agent": [url]})
    collection = files.run(peers, CollectionLimits(64))
    async with aclosing(collection.outcomes(files.todo(3))) as outcomes:
        async for outcome in outcomes:
            print(f"{outcome.key.task_index} {outcome.key.rollout_index}".ljust(99), flush=True)
    await files.flush()
    await peers.close()
    files.finish("done")
    print("done", flush=True)

folder, url = Path(sys.argv[1]), sys.argv[2]
files = CollectionFiles(folder / "out.jsonl", CollectionSettings(folder / "tasks.jsonl", CollectionPlan("agent", repeats=4)))
files.prepare(resume=True, overwrite=False, max_attempts=3, agents=None, command=[])
print("begins", flush=True)
run(main(files, url))
"""


def small(n: int) -> int:
    return n * 37 % 2000


def some_of_megabytes(n: int) -> int:
    """1 KB to 8 MB: every 16th task has megabytes."""
    return (1 + n // 16 % 8) << 20 if n % 16 == 0 else 1000 + small(n)


def kill_and_resume(folder: Path, count: int, kills: int, characters: Callable[[int], int] = small) -> None:
    """`count` rollouts with `kills` kill -9 at random moments; then every acknowledged row is there, each exactly once.

    characters: of the n-th task, and so of each of its rows.
    """
    write_rows(folder / "tasks.jsonl", [task(n, pad="x" * characters(n)) for n in range(count // 4)])
    draw, acknowledged, died = random.Random(5), set[tuple[int, int]](), 0
    with instant_agent() as url:
        for _ in range(10 * kills):
            command = [sys.executable, "-c", COLLECTOR, str(folder), url]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as collector:
                assert collector.stdout is not None
                # A life ends after at most what is read (a quarter of its share), 80 lines in our buffer, 40 in the pipe and
                # 128 that are done or under way: it cannot be done before it is killed, however fast it is.
                fcntl.fcntl(collector.stdout, fcntl.F_SETPIPE_SZ, 4096)
                assert collector.stdout.readline() == b"begins\n"
                if died < kills:
                    for _ in range(draw.randrange(1, count // kills // 4)):
                        acknowledged.add(pair(collector.stdout.readline()))
                    time.sleep(draw.uniform(0, 0.01))
                    collector.send_signal(signal.SIGKILL)
                lines = collector.stdout.read().split(b"\n")
            died += collector.returncode == -signal.SIGKILL
            acknowledged |= {pair(text) for text in lines if len(text) == 99}
            here = keys(folder / "out.jsonl") if collector.returncode == 0 else whole_keys(folder / "out.jsonl")
            assert acknowledged <= set(here), "a row that was acknowledged is lost"
            assert len(here) == len(set(here)), "a row stands twice"
            if collector.returncode == 0 and b"done" in lines:
                break
    assert died == kills
    assert sorted(keys(folder / "out.jsonl")) == [(n, i) for n in range(count // 4) for i in range(4)]
    [aggregate] = json.loads((folder / "out_aggregate_metrics.json").read_text())
    assert aggregate["ng"]["rollouts"] == count


def pair(text: bytes) -> tuple[int, int]:
    task_index, rollout_index = text.split()
    return int(task_index), int(rollout_index)


def whole_keys(path: Path) -> list[tuple[int, int]]:
    """The keys of a file whose last line may be torn."""
    lines = list(read(path))
    assert all(line.complete for line in lines[:-1])
    intact_rows = [line.row for line in lines if line.problem is None]
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in intact_rows]


def test_twenty_kills_lose_no_acknowledged_row_and_double_none(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, count=10_000, kills=20)


@pytest.mark.soak
def test_a_hundred_kills_lose_no_acknowledged_row_and_double_none(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, count=40_000, kills=100)


@pytest.mark.soak
def test_kills_while_rows_of_megabytes_are_written_lose_none_and_double_none(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, count=2400, kills=12, characters=some_of_megabytes)


# A large input: its first part is checked before the first rollout, the rest meanwhile


@pytest.fixture
def small_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file is a large one: only its first two rows or so are checked before the first rollout."""
    monkeypatch.setattr(InputCheck.check_first, "__defaults__", (100,))


@pytest.mark.usefixtures("small_first_part")
async def test_of_a_large_input_only_a_first_part_is_read_before_the_first_rollout(tasks: Path) -> None:
    files = CollectionFiles(tasks.with_name("out.jsonl"), CollectionSettings(tasks, CollectionPlan("agent")))
    files.prepare(resume=False, overwrite=False, max_attempts=3, agents={"agent"}, command=[])
    record = json.loads(tasks.with_name("out_run.json").read_text())
    assert 0 < record["rollouts"] < 10 and record["digests"]["input"] is None
    plan = files.todo(3)
    assert (await anext(plan)).key.task_index == 0
    assert [rollout.key.task_index async for rollout in plan] == list(range(1, 10))
    assert (files.progress.total, files.progress.complete) == (10, True)
    files.close()
    record = json.loads(tasks.with_name("out_run.json").read_text())
    assert record["rollouts"] == 10
    assert record["digests"] == CollectionSettings(tasks, CollectionPlan("agent")).digests()
    assert len(rows(tasks.with_name("out_materialized_inputs.jsonl"))) == 10


@pytest.mark.usefixtures("small_first_part")
async def test_a_bad_line_far_in_ends_the_run_and_the_finished_rollouts_are_kept(tasks: Path) -> None:
    good = tasks.read_bytes()
    lines = good.splitlines(keepends=True)
    tasks.write_bytes(b"".join([*lines[:8], b"{torn\n", b'{"x": 1}\n', *lines[8:]]))
    source, out = CollectionSettings(tasks, CollectionPlan("agent")), tasks.with_name("out.jsonl")
    with pytest.raises(UsageError) as caught:
        await session(source)
    messages = str(caught.value).splitlines()
    assert (
        len(messages) == 2
        and messages[0].startswith(f"{tasks}:9: not JSON")
        and messages[1].startswith(f"{tasks}:10: no respons")
    )
    before = out.read_bytes() if out.exists() else b""
    tasks.write_bytes(good)
    await session(source, resume=True)
    assert sorted(keys(out)) == [(n, 0) for n in range(10)] and out.read_bytes().startswith(before)


@pytest.mark.usefixtures("small_first_part")
async def test_a_run_that_never_read_its_input_to_the_end_is_resumed_by_its_tasks(tasks: Path) -> None:
    source, out = CollectionSettings(tasks, CollectionPlan("agent")), tasks.with_name("out.jsonl")

    async def some(how_many: int, resume: bool) -> None:
        files = CollectionFiles(out, source)
        files.prepare(resume=resume, overwrite=False, max_attempts=3, agents={"agent"}, command=[])
        async with serving(scored_row) as url:
            peers = Peers({"agent": [url]})
            run = files.run(peers, LIMITS)
            plan = files.todo(3)
            first = [await anext(plan) for _ in range(how_many)]
            async with aclosing(run.outcomes(first)) as outcomes:
                assert [outcome async for outcome in outcomes]
            await files.flush()
            await peers.close()
        files.close()  # as if it had been killed

    await some(3, resume=False)
    record = tasks.with_name("out_run.json")
    content = json.loads(record.read_text())
    content["digests"]["input"] = None
    record.write_text(json.dumps(content))
    before = tasks.read_bytes()
    tasks.write_bytes(before.replace(b"task 1", b"task X"))
    with pytest.raises(UsageError, match=r"1 of its rows are of tasks that .* does not have"):
        await session(source, resume=True)
    tasks.write_bytes(before)
    await session(source, resume=True)
    assert sorted(keys(out)) == [(n, 0) for n in range(10)]


@pytest.mark.usefixtures("small_first_part")
def test_agents_that_only_a_later_row_names_are_known_before_services_start(tasks: Path) -> None:
    named = [{**task(n), "agent_ref": {"type": "x", "name": f"agent_{n}"}} for n in range(5)]
    tricky = [
        {
            **task(9),
            "agent_ref": {"name": "agent_0"},
            "note": {"agent_ref": {"name": "nobody"}},
            "text": '"agent_ref": {"name": "quoted"}',
        }
    ]
    write_rows(tasks, named + tricky)
    files = CollectionFiles(tasks.with_name("out.jsonl"), CollectionSettings(tasks, CollectionPlan()))
    agents = {f"agent_{n}" for n in range(6)}
    files.prepare(resume=False, overwrite=False, max_attempts=3, agents=agents, command=[], starts=True)
    assert files.progress.agents == agents - {"agent_5"}
    files.close()


@pytest.mark.usefixtures("small_first_part")
def test_the_rest_is_not_searched_for_agents_once_all_are_named(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes a second for 2 GB, before the services start."""
    monkeypatch.setattr(InputCheck, "names_in_rest", lambda check: pytest.fail("searched"))
    files = CollectionFiles(tasks.with_name("out.jsonl"), CollectionSettings(tasks, CollectionPlan("agent")))
    files.prepare(resume=False, overwrite=False, max_attempts=3, agents={"agent"}, command=[], starts=True)
    assert files.progress.agents == {"agent"}
    files.close()


@pytest.mark.usefixtures("small_first_part")
def test_the_agent_of_the_command_is_the_only_one_that_starts(tmp_path: Path) -> None:
    tasks = write_rows(tmp_path / "tasks.jsonl", [{**task(n), "agent_ref": {"name": f"agent_{n}"}} for n in range(9)])
    files = CollectionFiles(tmp_path / "out.jsonl", CollectionSettings(tasks, CollectionPlan("agent_8")))
    agents = {f"agent_{n}" for n in range(9)}
    files.prepare(resume=False, overwrite=False, max_attempts=3, agents=agents, command=[], starts=True)
    assert files.progress.agents == {"agent_8"}
    files.close()


@pytest.mark.usefixtures("small_first_part")
def test_agents_in_later_files_of_an_input_are_known_before_services_start(tmp_path: Path) -> None:
    named = [{**task(n), "agent_ref": {"type": "x", "name": f"agent_{n}"}} for n in range(9)]
    files = [write_rows(tmp_path / f"{n}.jsonl", named[3 * n : 3 * n + 3]) for n in range(3)]
    packed = tmp_path / "2.jsonl.zst"
    packed.write_bytes(zstandard.compress(files[2].read_bytes()))
    store = CollectionFiles(tmp_path / "out.jsonl", CollectionSettings((files[0], files[1], packed), CollectionPlan()))
    agents = {f"agent_{n}" for n in range(9)}
    store.prepare(resume=False, overwrite=False, max_attempts=3, agents=agents, command=[], starts=True)
    assert store.progress.agents == agents
    store.close()


async def test_several_compressed_inputs_are_one_run(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"{n}.jsonl", [task(2 * n), task(2 * n + 1)]) for n in range(3)]
    packed = tmp_path / "1.jsonl.gz"
    packed.write_bytes(gzip.compress(files[1].read_bytes()))
    source = CollectionSettings((files[0], packed, files[2]), CollectionPlan("agent"))
    await session(source, stop_after=2)
    await session(source, resume=True)
    out = tmp_path / "out.jsonl"
    inputs = sorted((row["_ng_task_index"], row["responses_create_params"]["input"]) for row in rows(out))
    assert inputs == [(n, f"task {n}") for n in range(6)]
    record = json.loads((tmp_path / "out_run.json").read_text())
    assert record["input"] == [str(files[0]), str(packed), str(files[2])]
    with pytest.raises(UsageError, match=r"the input \(.*0\.jsonl and 1 more file\) changed since this run began"):
        await session(CollectionSettings((files[0], files[2]), CollectionPlan("agent")), resume=True)


def test_a_rollout_costs_the_collector_less_than_50_bytes() -> None:
    """Of a task with one rollout: reward, answer, and what differs from row to row."""
    row = {"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "agent"}, "reward": 1.0, "n": 0,
           "extracted_answer": "0", "response": {"usage": {"input_tokens": 5, "output_tokens": 3}},
           "ng": {"status": "ok", "stop_reason": "answer", "turns": 1, "tool_calls": 0, "tool_errors": 0,
                  "timings": {"total_s": 0.5}}}  # fmt: skip
    aggregates, counts = Aggregates(), 60_000

    def add(first: int, last: int) -> None:
        for n in range(first, last):
            ng = {**row["ng"], "timings": {"total_s": n / 7}}
            aggregates.add({**row, "_ng_task_index": n, "n": n, "extracted_answer": str(n), "ng": ng})

    tracemalloc.start()
    add(0, counts)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown / counts < 50
    [entry] = json.loads(b"".join(aggregates.as_bytes()))
    assert entry == orjson.loads(orjson.dumps(aggregates.as_json()[0]))
    assert len(entry["group_level_metrics"]) == counts


async def test_a_resumed_run_does_not_mix_the_rows_agents_with_that_of_the_command(tmp_path: Path) -> None:
    tasks = write_rows(tmp_path / "tasks.jsonl", [task(n, agent_ref={"name": "theirs"}) for n in range(4)])
    source = CollectionSettings(tasks, CollectionPlan("agent"))
    await session(source, stop_after=2)
    done = rows(tmp_path / "out.jsonl")
    lines = [orjson.dumps({**row, "agent_ref": {"name": "theirs"}}) + b"\n" for row in done]
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(
        UsageError, match=r"this run has rollouts of agent 'theirs', and --agent agent now runs every row"
    ):
        await session(source, resume=True)
    assert len(rows(tmp_path / "out.jsonl")) == len(done)
