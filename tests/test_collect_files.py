"""The files of a collection: what stands where, what a resumed run does, and what it refuses."""

from __future__ import annotations

import fcntl
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson
import pytest
from stub_agents import Answer, instant_agent, problem, scored, serving, task

from ngym.collect import Limits, Recipe
from ngym.collect.files import Files
from ngym.collect.record import Source
from ngym.errors import UsageError
from ngym.held import FileLocked
from ngym.jsonl import read
from ngym.peers import Peers
from ngym.schema import Json

LIMITS = Limits(retry_s=(0.0,), poll_s=0.05)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Ten tasks in a file."""
    return written(tmp_path / "tasks.jsonl", [task(n) for n in range(10)])


def written(path: Path, rows: list[Json]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def rows(path: Path) -> list[Json]:
    return [line.row for line in read(path)] if path.exists() else []


def keys(path: Path) -> list[tuple[int, int]]:
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows(path)]


async def sitting(
    source: Source,
    answer: Answer = scored,
    *,
    stop_after: int | None = None,
    max_attempts: int = 3,
    resume: bool = False,
    overwrite: bool = False,
) -> Files:
    """One run of the collector on `out.jsonl` beside the input."""
    files = Files(source.input.with_name("out.jsonl"), source)
    try:
        files.prepare(
            resume=resume, overwrite=overwrite, max_attempts=max_attempts, agents={"agent"}, command=["test", "--x"]
        )
        async with serving(answer) as url:
            peers = Peers({"agent": [url]})
            run = files.run(peers, Limits(4, max_attempts=max_attempts, retry_s=(0.0,)))
            count = 0
            async with aclosing(run.outcomes(files.todo(max_attempts))) as outcomes:
                async for _ in outcomes:
                    count += 1
                    if count == stop_after:
                        break
            await files.flush()
            await peers.close()
        files.finish("done" if stop_after is None else "interrupted")
    finally:
        files.close()
    return files


async def test_the_files_of_a_collection(tmp_path: Path, tasks: Path) -> None:
    params = {"temperature": 0.5}
    await sitting(
        Source(tasks, Recipe("agent", repeats=2, limit=3, params=params), services={"agent": {"kind": "agent"}})
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
    assert record["sittings"][0]["status"] == "done" and record["sittings"][0]["command"] == ["test", "--x"]
    [aggregate] = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    assert aggregate["agent_ref"]["name"] == "agent"
    assert aggregate["key_metrics"] == {"mean/reward": 1.0, "pass@1/reward": 1.0, "pass@2/reward": 1.0}
    assert aggregate["agent_metrics"]["mean/output_tokens"] == 3.0
    assert len(aggregate["group_level_metrics"]) == 3


async def test_unscored_rollouts_and_failures_are_left_out_of_the_mean(tasks: Path) -> None:
    def answer(row: Json) -> Any:
        if row["n"] == 0:
            return scored(row, None)
        return problem(500, failure="verify_error", retryable=False) if row["n"] == 1 else scored(row, row["n"] % 2)

    files = await sitting(Source(tasks, Recipe("agent")), answer)
    [tally] = files.aggregates.by_agent.values()
    assert (tally.rollouts, tally.rewards.count, tally.rewards.mean, tally.unscored) == (9, 8, 0.5, 1)
    assert (dict(tally.failures), dict(tally.given_up)) == ({"verify_error": 1}, {"verify_error": 1})
    [failed] = rows(tasks.with_name("out_failures.jsonl"))
    assert (failed["n"], failed["attempt"], failed["failure"]["class"]) == (1, 0, "verify_error")


async def test_output_that_exists_is_neither_deleted_nor_mixed(tasks: Path) -> None:
    await sitting(Source(tasks, Recipe("agent", limit=1)))
    before = tasks.with_name("out.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"already holds rollouts; add --resume .* or --overwrite"):
        await sitting(Source(tasks, Recipe("agent", limit=1)))
    assert tasks.with_name("out.jsonl").read_bytes() == before
    await sitting(Source(tasks, Recipe("agent", limit=2)), overwrite=True)
    assert len(rows(tasks.with_name("out.jsonl"))) == 2


async def test_overwrite_forgets_old_failures_too(tasks: Path) -> None:
    await sitting(Source(tasks, Recipe("agent")), lambda row: problem(500, retryable=False))
    assert len(rows(tasks.with_name("out_failures.jsonl"))) == 10
    files = await sitting(Source(tasks, Recipe("agent")), overwrite=True)
    assert not tasks.with_name("out_failures.jsonl").exists() and files.aggregates.given_up == 0


async def test_a_resumed_run_does_the_rest_and_counts_everything(tasks: Path) -> None:
    written(tasks, [task(n) for n in range(200)])
    source = Source(tasks, Recipe("agent", repeats=2))
    first = await sitting(source, lambda row: scored(row, row["n"] % 2), stop_after=70)
    assert 70 <= len(keys(tasks.with_name("out.jsonl"))) < 400
    assert first.aggregates.done == len(keys(tasks.with_name("out.jsonl"))), "what was told is what is on the disk"
    second = await sitting(source, lambda row: scored(row, row["n"] % 2), resume=True)
    assert sorted(keys(tasks.with_name("out.jsonl"))) == [(n, i) for n in range(200) for i in range(2)]
    assert (second.run_id, second.progress.done) == (first.run_id, first.aggregates.done)
    assert second.aggregates.by_agent["agent"].rewards.mean == 0.5
    record = json.loads(tasks.with_name("out_run.json").read_text())
    assert [sitting["status"] for sitting in record["sittings"]] == ["interrupted", "done"]


async def test_a_resumed_run_that_is_done_does_nothing(tasks: Path) -> None:
    source = Source(tasks, Recipe("agent"))
    await sitting(source)
    before = tasks.with_name("out.jsonl").read_bytes()
    await sitting(source, lambda row: problem(500), resume=True)
    assert tasks.with_name("out.jsonl").read_bytes() == before


async def test_resume_without_output_begins(tasks: Path) -> None:
    await sitting(Source(tasks, Recipe("agent")), resume=True)
    assert len(rows(tasks.with_name("out.jsonl"))) == 10


async def test_a_resumed_run_may_have_more_tasks_and_repeats(tasks: Path) -> None:
    await sitting(Source(tasks, Recipe("agent", repeats=1, limit=2)))
    files = await sitting(Source(tasks, Recipe("agent", repeats=2, limit=3)), resume=True)
    assert sorted(keys(tasks.with_name("out.jsonl"))) == [(n, i) for n in range(3) for i in range(2)]
    assert files.progress.done == 2


async def test_a_torn_last_row_is_done_again(tasks: Path) -> None:
    source, out = Source(tasks, Recipe("agent")), tasks.with_name("out.jsonl")
    await sitting(source)
    content = out.read_bytes()
    out.write_bytes(content[:-9])
    await sitting(source, resume=True)
    assert sorted(keys(out)) == [(n, 0) for n in range(10)]
    assert out.read_bytes()[: len(content) // 2] == content[: len(content) // 2]


async def test_a_row_that_stands_twice_is_dropped(tasks: Path) -> None:
    source, out = Source(tasks, Recipe("agent")), tasks.with_name("out.jsonl")
    await sitting(source)
    content = out.read_bytes()
    out.write_bytes(content + content.splitlines(keepends=True)[3])
    files = await sitting(source, resume=True)
    assert (out.read_bytes(), files.duplicates) == (content, 1)


async def test_a_changed_input_is_refused_with_both_hashes(tasks: Path) -> None:
    source = Source(tasks, Recipe("agent"))
    await sitting(source)
    before = source.digests()["input"]
    tasks.write_bytes(tasks.read_bytes().replace(b"task 3", b"task X"))
    with pytest.raises(UsageError, match=r"the input .* changed since this run began") as caught:
        await sitting(source, resume=True)
    assert before in str(caught.value) and source.digests()["input"] in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"recipe": Recipe("agent", params={"temperature": 0.7})}, "params.temperature: 1 then, 0.7 now"),
        ({"recipe": Recipe("agent", params={"temperature": 1}, seed=3)}, "seed: None then, 3 now"),
        ({"token_format": "nemo"}, "token_format: 'ng' then, 'nemo' now"),
        ({"services": {"policy": {"kind": "model", "model": "b"}}}, "services.policy.model: 'a' then, 'b' now"),
    ],
)
async def test_a_changed_config_is_refused_with_both_hashes(tasks: Path, changed: Any, difference: str) -> None:
    first: dict[str, Any] = {
        "recipe": Recipe("agent", params={"temperature": 1}),
        "services": {"policy": {"kind": "model", "model": "a"}},
    }
    await sitting(Source(tasks, **first))
    now = Source(tasks, **{**first, **changed})
    with pytest.raises(UsageError, match="the config or its overrides changed since") as caught:
        await sitting(now, resume=True)
    assert now.digests()["config"] in str(caught.value) and difference in str(caught.value)
    await sitting(now, overwrite=True)


def test_where_a_service_runs_does_not_make_another_run(tasks: Path) -> None:
    here = {"policy": {"kind": "model", "url": "http://node1:8000"}, "ngym": {"head": {"port": 1}}}
    there = {"policy": {"kind": "model", "urls": ["http://node2:8000"], "replicas": 2}}
    assert Source(tasks, Recipe(), services=here).digests() == Source(tasks, Recipe(), services=there).digests()


async def test_rows_of_nobody_knows_which_run_are_refused(tasks: Path) -> None:
    source = Source(tasks, Recipe("agent"))
    await sitting(source)
    tasks.with_name("out_run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"out_run\.json is not a run's record, so nobody can tell which run wrote"):
        await sitting(source, resume=True)
    tasks.with_name("out_run.json").unlink()
    with pytest.raises(UsageError, match=r"out_run\.json does not exist"):
        await sitting(source, resume=True)


async def test_a_row_of_another_run_is_refused_with_its_line(tasks: Path) -> None:
    source, out = Source(tasks, Recipe("agent")), tasks.with_name("out.jsonl")
    await sitting(source)
    lines = out.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"run_id":"2', b'"run_id":"9')
    out.write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=rf"out\.jsonl:3 \(byte {len(lines[0] + lines[1])}\): a row of another run"):
        await sitting(source, resume=True)
    lines[2] = b'{"text": "a row of something else"}\n'
    out.write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=r"out\.jsonl:3 .* not a row that was written here"):
        await sitting(source, resume=True)


async def test_attempts_are_counted_over_sittings(tasks: Path) -> None:
    source = Source(tasks, Recipe("agent", limit=2))

    def broken(row: Json) -> Any:
        return problem(500, failure="agent_error", retryable=row["n"] == 0)

    first = await sitting(source, broken)
    assert first.aggregates.given_up == 2
    assert [row["attempt"] for row in rows(tasks.with_name("out_failures.jsonl")) if row["n"] == 0] == [0, 1, 2]
    second = await sitting(source, resume=True)
    assert second.progress.given_up == 1, "its attempts are used up; the other one failed only once"
    assert [row["_ng_task_index"] for row in rows(tasks.with_name("out.jsonl"))] == [1]
    assert second.aggregates.given_up == 1
    third = await sitting(source, max_attempts=4, resume=True)
    assert len(rows(tasks.with_name("out.jsonl"))) == 2 and third.aggregates.given_up == 0
    assert rows(tasks.with_name("out.jsonl"))[1]["ng"]["attempt"] == 3


async def test_a_bad_input_touches_nothing(tmp_path: Path, tasks: Path) -> None:
    await sitting(Source(tasks, Recipe("agent")))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"responses_create_params": {}}\n{"responses_create\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl:2: not JSON"):
        await sitting(Source(bad, Recipe("agent")), overwrite=True)
    bad.unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_work_is_one_line(tmp_path: Path, tasks: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*/none does not exist; make it first: mkdir -p"):
        Files(tmp_path / "none" / "out.jsonl", Source(tasks, Recipe("agent")))
    with pytest.raises(UsageError, match="is both --input and --output"):
        Files(tasks, Source(tasks, Recipe("agent")))
    sent = tmp_path / "out_materialized_inputs.jsonl"
    sent.write_bytes(tasks.read_bytes())
    with pytest.raises(
        UsageError, match=r"inputs\.jsonl is --input, and is written with --output .*/out\.jsonl; choose"
    ):
        Files(tmp_path / "out.jsonl", Source(sent, Recipe("agent")))
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    files = Files(tmp_path / "out.jsonl", Source(empty, Recipe("agent")))
    with pytest.raises(UsageError, match="no rows in it"):
        files.prepare(resume=False, overwrite=False, max_attempts=3, agents=None, command=[])
    files.close()
    assert not (tmp_path / "out.jsonl").exists()


def test_a_second_collector_on_the_same_file_is_refused(tmp_path: Path, tasks: Path) -> None:
    files = Files(tmp_path / "out.jsonl", Source(tasks, Recipe("agent")))
    with pytest.raises(FileLocked, match="is being written by process"):
        Files(tmp_path / "out.jsonl", Source(tasks, Recipe("agent")))
    files.close()


COLLECTOR = """
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from ngym.collect import Limits, Recipe
from ngym.collect.files import Files
from ngym.collect.record import Source
from ngym.process import run
from ngym.peers import Peers

async def main(files, url):
    peers = Peers({"agent": [url]})
    collection = files.run(peers, Limits(64))
    async with aclosing(collection.outcomes(files.todo(3))) as outcomes:
        async for outcome in outcomes:
            print(f"{outcome.key.task_index} {outcome.key.rollout_index}".ljust(99), flush=True)
    await files.flush()
    await peers.close()
    files.finish("done")
    print("done", flush=True)

folder, url = Path(sys.argv[1]), sys.argv[2]
files = Files(folder / "out.jsonl", Source(folder / "tasks.jsonl", Recipe("agent", repeats=4)))
files.prepare(resume=True, overwrite=False, max_attempts=3, agents=None, command=[])
print("begins", flush=True)
run(main(files, url))
"""


def small(n: int) -> int:
    return n * 37 % 2000


def some_of_megabytes(n: int) -> int:
    """1 KB to 8 MB: every 16th task has megabytes."""
    return (1 + n // 16 % 8) << 20 if n % 16 == 0 else 1000 + small(n)


def killed_and_resumed(folder: Path, count: int, kills: int, characters: Callable[[int], int] = small) -> None:
    """`count` rollouts with `kills` kill -9 at random moments; then every acknowledged row is there, each exactly once.

    characters: of the n-th task, and so of each of its rows.
    """
    written(folder / "tasks.jsonl", [task(n, pad="x" * characters(n)) for n in range(count // 4)])
    draw, acknowledged, died = random.Random(5), set[tuple[int, int]](), 0
    with instant_agent() as url:
        for _ in range(10 * kills):
            command = [sys.executable, "-c", COLLECTOR, str(folder), url]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as collector:
                assert collector.stdout is not None
                # Room for 40 acknowledgements: it cannot be done before it is killed, however fast it is.
                fcntl.fcntl(collector.stdout, fcntl.F_SETPIPE_SZ, 4096)
                assert collector.stdout.readline() == b"begins\n"
                if died < kills:
                    for _ in range(draw.randrange(1, count // kills // 2)):
                        acknowledged.add(pair(collector.stdout.readline()))
                    time.sleep(draw.uniform(0, 0.01))
                    collector.send_signal(signal.SIGKILL)
                told = collector.stdout.read().split(b"\n")
            died += collector.returncode == -signal.SIGKILL
            acknowledged |= {pair(text) for text in told if len(text) == 99}
            here = keys(folder / "out.jsonl") if collector.returncode == 0 else keys_but_torn(folder / "out.jsonl")
            assert acknowledged <= set(here), "a row that was acknowledged is lost"
            assert len(here) == len(set(here)), "a row stands twice"
            if collector.returncode == 0 and b"done" in told:
                break
    assert died == kills
    assert sorted(keys(folder / "out.jsonl")) == [(n, i) for n in range(count // 4) for i in range(4)]
    [aggregate] = json.loads((folder / "out_aggregate_metrics.json").read_text())
    assert aggregate["ng"]["rollouts"] == count


def pair(text: bytes) -> tuple[int, int]:
    task_index, rollout_index = text.split()
    return int(task_index), int(rollout_index)


def keys_but_torn(path: Path) -> list[tuple[int, int]]:
    """The keys of a file whose last line may be torn."""
    lines = list(read(path))
    assert all(line.complete for line in lines[:-1])
    whole = [line.row for line in lines if line.problem is None]
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in whole]


def test_twenty_kills_lose_no_acknowledged_row_and_double_none(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, count=6000, kills=20)


@pytest.mark.soak
def test_a_hundred_kills_lose_no_acknowledged_row_and_double_none(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, count=40_000, kills=100)


@pytest.mark.soak
def test_kills_while_rows_of_megabytes_are_written_lose_none_and_double_none(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, count=2400, kills=12, characters=some_of_megabytes)
