"""`import ngym` in a notebook: services, rollouts, tables, verdicts, exports and metrics, with real services and
files."""

from __future__ import annotations

import asyncio
import doctest
import gc
import gzip
import importlib
import inspect
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from stub_agents import head, scored_row, task, text_item
from waiting import PATIENCE_S, running, until, wait_until

import ngym
import ngym.notebook
from ngym.notebook.collecting import rows_of
from ngym.notebook.frames import library
from ngym.notebook.progress import NotebookDisplay
from ngym.notebook.rollouts import FileRows
from ngym.notebook.services import Background, RunningServices
from ngym.schema import Json

LONGEST = '''
"""longest: the longest answer of a task gets 1."""
from ngym import VerifyGroup, VerifyRequest, gym_server


def verify(task: VerifyRequest) -> dict:
    return {"reward": None, "reward_pending": "group"}


def verify_group(group: VerifyGroup) -> list[float]:
    lengths = [len(task.text) for task in group.rollouts]
    return [float(length == max(lengths)) for length in lengths]


app = gym_server(verify=verify, verify_group=verify_group)
'''
CONFIG = """
ngym: {head: {port: 0}, max_restarts: 1}
policy: {kind: model, app: models/scripted, tokens: true, replies: [
  {turn: 1, match: "Bring it to (\\\\d+)", tool_calls: [{name: add, arguments: '{"amount": {1}}'}]},
  {turn: 2, text: "It is {tool_output}."}]}
counter: {kind: gym_server, app: gym_servers/counter}
counter_agent: {kind: agent, app: agents/simple, gym: counter, model: policy}
longest: {kind: gym_server, app: gym_servers/longest}
broken: {kind: gym_server, app: gym_servers/broken}
"""
TASKS = [
    {"responses_create_params": {"input": f"Bring it to {n}."}, "target": n, "level": "even" if n % 2 == 0 else "odd"}
    for n in (3, 14, 15)
] + [{"responses_create_params": {"input": "Do nothing."}, "target": 1, "level": "idle"}]
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "gym_servers").mkdir()
    (folder / "gym_servers" / "longest.py").write_text(LONGEST)
    (folder / "gym_servers" / "broken.py").write_text('raise RuntimeError("no such weights")\n')
    (folder / "global_config.yaml").write_text(CONFIG)
    (folder / "tasks.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in TASKS))
    return folder


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[RunningServices]:
    before = _handlers()
    with ngym.run(folder / "global_config.yaml", only=["counter_agent", "longest"], progress=False) as up:
        yield up
    assert _handlers() == before
    with pytest.raises(ngym.NgymError, match="services are stopped"):
        ngym.verify(_rollout(1.0), server="counter", head=up)


@pytest.fixture(scope="module")
def rollouts(services: RunningServices, folder: Path) -> ngym.Rollouts:
    """Two of each task; the last task is never solved."""
    call: dict[str, Any] = {"head": services, "agent": "counter_agent", "progress": False}
    return ngym.collect_rollouts(input=folder / "tasks.jsonl", output=folder / "out.jsonl", repeats=2, **call)


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]


def _rollout(reward: float | None, text: str = "4", task_index: int = 0, **fields: Any) -> Json:
    row = scored_row({"responses_create_params": {"input": "2 + 2?"}}, reward, text_item(text), **fields)
    return {**row, "_ng_task_index": task_index, "agent_ref": {"name": "agent"}}


def test_every_public_name_can_be_completed_and_is_typed() -> None:
    assert {"collect_rollouts", "load_rollouts", "run", "verify"} <= set(dir(ngym)) & set(ngym.__all__)
    for name in ngym.__all__:
        assert getattr(ngym, name) is not None
    assert (Path(ngym.__file__).parent / "py.typed").exists()
    blocking, awaited = (inspect.signature(f).parameters for f in (ngym.collect_rollouts, ngym.collect_rollouts_async))
    assert blocking == awaited


def test_examples_in_docstrings_hold() -> None:
    for module in pkgutil.iter_modules(ngym.notebook.__path__, "ngym.notebook."):
        assert doctest.testmod(importlib.import_module(module.name)).failed == 0


def test_importing_ngym_costs_nothing() -> None:
    code = "import sys, ngym; print([name for name in ('pydantic', 'rich', 'uvloop', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rollouts_are_a_sequence_with_numbers(rollouts: ngym.Rollouts) -> None:
    assert len(rollouts) == 8 and rollouts.mean_reward == 0.75 and len(rollouts.failures) == 0
    assert [row["reward"] for row in rollouts.worst(2)] == [0.0, 0.0] and rollouts.best(1)[0]["reward"] == 1.0
    assert len(rollouts[2:5]) == 3 and rollouts[2:5][-1] == rollouts[4] and rollouts[-1] == list(rollouts)[-1]
    for call, message in ((rollouts.worst, "must be 0 or more, not -1"), (rollouts.pass_at, "k must be at least 1")):
        with pytest.raises(ngym.UsageError, match=message):
            call(-1)
    idle = rollouts.filter(lambda row: row["level"] == "idle")
    assert (len(idle), idle.mean_reward, len(idle.groups())) == (2, 0.0, 1)
    groups = {group.task_index: group for group in rollouts.groups()}
    assert sorted(groups) == [0, 1, 2, 3] and groups[3].rewards == [0.0, 0.0] and not groups[0].has_learning_signal
    rounded = ngym.Rollouts([_rollout(0.1 + 0.2), _rollout(0.3)])
    assert not rounded.groups()[0].has_learning_signal
    assert rollouts.pass_at(2) == 0.75
    with pytest.raises(
        ngym.UsageError, match=r"pass_at\(3\): no task has 3 scored rollouts; the most that one has is 2"
    ):
        rollouts.pass_at(3)
    assert "8 rollouts of 4 tasks, mean reward 0.750" in repr(rollouts)
    again = ngym.Rollouts([{**row, "_ng_task_index": draw} for draw, row in enumerate(rollouts)])
    assert "8 rollouts of 4 tasks" in repr(again) and len(again.groups()) == 8  # a training run draws a task again


def test_rollouts_that_all_failed_have_their_failures(services: RunningServices, folder: Path) -> None:
    output = folder / "failed.jsonl"
    call: dict[str, Any] = {"head": services, "agent": "counter_agent", "progress": False}
    bad = [{"responses_create_params": {"input": "x"}, "target": None}]
    for rollouts in (
        ngym.collect_rollouts(input=bad, **call),
        ngym.collect_rollouts(input=bad, output=output, **call),
        ngym.load_rollouts(output),
    ):
        assert len(rollouts) == 0 and rollouts.mean_reward is None and "0 rollouts" in repr(rollouts)
        assert len(rollouts.failures) == 1 and "target" in rollouts.failures[0]["failure"]["message"]
    assert not output.exists()


def test_metrics_are_those_of_the_aggregate_file(rollouts: ngym.Rollouts, folder: Path) -> None:
    [aggregate] = json.loads((folder / "out_aggregate_metrics.json").read_text())
    [metrics] = json.loads(orjson.dumps(rollouts.metrics()))
    assert metrics["agent_metrics"] == aggregate["agent_metrics"] and metrics["key_metrics"] == aggregate["key_metrics"]
    assert metrics["group_level_metrics"] == aggregate["group_level_metrics"]
    assert rollouts.metrics(by="level")[0]["key_metrics"]["idle/mean/reward"] == 0.0


def test_a_file_is_read_row_by_row_and_a_torn_last_line_is_left_out(rollouts: ngym.Rollouts, folder: Path) -> None:
    torn = folder / "torn.jsonl"
    torn.write_bytes((folder / "out.jsonl").read_bytes() + b'{"responses_create_params": {"inp')
    loaded = ngym.load_rollouts(torn)
    assert len(loaded) == 8 and list(loaded) == list(rollouts) and loaded[7] == rollouts[7]
    both = ngym.load_rollouts(folder / "out.jsonl", str(folder / "to*.jsonl"))
    assert len(both) == 16 and both[15] == both[7] and both[8:].mean_reward == 0.75
    with pytest.raises(ngym.UsageError, match="no such file"):
        ngym.load_rollouts(folder / "nothing.jsonl")
    with pytest.raises(ngym.UsageError, match="its first row has no response and reward"):
        ngym.load_rollouts(folder / "tasks.jsonl")
    packed = folder / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((folder / "out.jsonl").read_bytes()))
    loaded_gz = ngym.load_rollouts(packed)
    assert list(loaded_gz) == list(rollouts) and loaded_gz[7] == rollouts[7] and loaded_gz.mean_reward == 0.75
    torn.write_bytes(b"[]\n" * 8)
    with pytest.raises(ngym.UsageError, match="not a JSON object but list"):
        loaded[0]


def test_a_last_line_of_blanks_and_a_byte_order_mark_cost_no_row(tmp_path: Path) -> None:
    row = orjson.dumps(_rollout(1.0))
    blank, marked, torn = (tmp_path / f"{name}.jsonl" for name in ("blank", "marked", "torn"))
    blank.write_bytes(row + b"\n" + row + b"\n  ")
    marked.write_bytes(b"\xef\xbb\xbf" + row)
    torn.write_bytes(b"\xef\xbb\xbf" + row[:-1])
    for path, count in ((blank, 2), (marked, 1), (torn, 0)):
        rows = FileRows([path])
        assert len(rows) == count and len(list(rows)) == count and all(each["reward"] == 1.0 for each in rows[:])


def test_rows_of_other_makes_will_do() -> None:
    bare = {"response": {"output": []}, "reward": 0.5, "_ng_task_index": 0}
    rollouts = ngym.Rollouts([bare, _rollout(None), {**bare, "response": {"status": "incomplete", "output": []}}])
    assert rollouts.rewards == [0.5, None, 0.5] and rollouts.mean_reward == 0.5 and rollouts.interval is None
    assert [entry["ng"]["statuses"] for entry in rollouts.metrics()] == [{"ok": 1, "truncated": 1}, {"unscored": 1}]
    assert rollouts.to_polars()["agent"].to_list() == [None, "agent", None]
    assert ngym.Rollouts([]).mean_reward is None and repr(ngym.Rollouts([])) == "<0 rollouts of 0 tasks, no reward>"


def test_rows_that_name_no_task_are_not_taken_for_one_task() -> None:
    bare = [{"response": {"output": []}, "reward": reward} for reward in (0.0, 1.0)]
    rollouts = ngym.Rollouts(bare)
    assert repr(rollouts) == "<2 rollouts, mean reward 0.500>" and "2 rollouts, mean" in rollouts._repr_html_()
    for compared in (rollouts.groups, rollouts.metrics, lambda: rollouts.pass_at(2), lambda: rollouts.interval):
        with pytest.raises(ngym.UsageError, match=r"rows name no task.*give each row its `_ng_task_index`"):
            compared()
    by_id = ngym.Rollouts([{**row, "ng": {"task_id": name}} for row, name in zip(bare, "ab", strict=True)])
    assert [group.rewards for group in by_id.groups()] == [[0.0], [1.0]] and by_id.interval is not None


def test_what_a_model_says_is_only_text(rollouts: ngym.Rollouts) -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": HOSTILE}]}
    row = _rollout(1.0, HOSTILE, expected_answer=HOSTILE)
    row["response"]["output"].insert(0, reasoning)
    hostile = ngym.Rollouts([row])
    for html in (hostile._repr_html_(), hostile.show(0)._repr_html_()):
        assert "<script" not in html and "&lt;script&gt;alert(1)" in html
        assert "\x1b" not in html and "\u202e" not in html and "\\x1b[2J" in html
    assert "<details" in hostile.show(0)._repr_html_() and "\x1b" not in repr(hostile.show(0))
    assert "-&gt; add(" in rollouts.show(0)._repr_html_() or "-&gt; add(" in rollouts.best(1).show()._repr_html_()


def test_tables_have_typed_columns(rollouts: ngym.Rollouts) -> None:
    pandas, polars = rollouts.to_pandas(), rollouts.to_polars()
    kinds = {"reward": "float64", "turns": "Int64", "asked": "string", "target": "Int64", "total_s": "float64"}
    assert {name: str(pandas[name].dtype) for name in kinds} == kinds
    assert pandas["reward"].mean() == 0.75 and polars["reward"].mean() == 0.75
    assert pandas.columns.tolist() == polars.columns and polars.schema["tool_calls"] == library("polars").Int64
    assert set(pandas[pandas["reward"] == 1.0]["answered"]) == {f'It is {{"total":{n}}}.' for n in (3, 14, 15)}
    dataset = rollouts.to_dataset()
    assert dataset.column_names == polars.columns and dataset.features["reward"].dtype == "float64"
    empty = ngym.Rollouts([]).to_pandas()
    assert "reward" in empty.columns and str(empty["turns"].dtype) == "Int64"


def test_full_tables_have_everything(rollouts: ngym.Rollouts) -> None:
    pandas, dataset = rollouts.to_pandas(full=True), rollouts.to_dataset(full=True)
    assert pandas["ng"][0] == rollouts[0]["ng"] and json.loads(dataset[0]["ng"]) == rollouts[0]["ng"]
    assert json.loads(rollouts.to_polars(full=True)["response"][7]) == rollouts[7]["response"]


def test_a_list_of_a_rows_own_does_not_take_the_place_of_a_column() -> None:
    rows = ngym.Rollouts([_rollout(1.0, turns=[1, 2], asked={"by": "me"}, notes=["x"])])
    frame, typed = rows.to_pandas(full=True), rows.to_polars(full=True)
    assert (frame["row.turns"][0], frame["row.asked"][0], frame["notes"][0]) == ([1, 2], {"by": "me"}, ["x"])
    assert frame["asked"][0] == "2 + 2?" and str(frame["turns"].dtype) == "Int64" and typed["row.turns"][0] == "[1,2]"


def test_columns_of_mixed_values_are_text_and_a_fields_name_is_kept() -> None:
    rows = [
        _rollout(1.0, level=3, asked="mine", flag=True),
        _rollout(0.0, level="hard", flag=None),
        _rollout(None, big=2**63),
    ]
    frame = ngym.Rollouts(rows).to_pandas()
    assert frame["level"].tolist()[:2] == ["3", "hard"] and str(frame["flag"].dtype) == "boolean"
    assert frame["asked"][0] == "2 + 2?" and frame["row.asked"][0] == "mine" and frame["big"][2] == str(2**63)


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(
        ngym.UsageError, match="the package no_such_frames is not installed; `pip install no_such_frames`"
    ):
        library("no_such_frames")


def test_a_data_frame_is_an_input_and_its_missing_values_are_not_fields(services: RunningServices) -> None:
    pandas = library("pandas")
    rows = [{**TASKS[0], "note": None, "weight": 0.5}, TASKS[1]]
    for tasks in (pandas.DataFrame(rows), library("polars").DataFrame(rows, strict=False), iter(rows)):
        found = ngym.collect_rollouts(input=tasks, agent="counter_agent", head=services, progress=False)
        by_target = {row["target"]: row for row in found}
        assert (
            by_target[3]["weight"] == 0.5
            and by_target[14].keys() & {"weight", "note"} == set()
            and found.mean_reward == 1.0
        )


def test_what_is_wrong_with_a_call_is_one_line(services: RunningServices, folder: Path) -> None:
    def expect_error(text: str, **call: Any) -> None:
        with pytest.raises(ngym.UsageError, match=text) as error:
            ngym.collect_rollouts(**{"input": TASKS, "head": services, "progress": False, **call})
        assert "\n" not in str(error.value)

    named = {"agent_ref": {"name": "counter_agent"}}
    expect_error(r"^agent: no agent named 'conter_agent' \(did you mean 'counter_agent'\?\)", agent="conter_agent")
    expect_error("repeats must be at least 1, not 0", agent="counter_agent", repeats=0)
    expect_error("repeats must be a whole number, not 1.5", agent="counter_agent", repeats=1.5)
    expect_error("^timeout_s must be a number above 0, not -1$", timeout_s=-1)
    expect_error("^seed must be a whole number, not '7'$", seed="7")
    expect_error(r"^token_format: 'nem' is unknown \(did you mean 'nemo'\?\)$", token_format="nem")
    expect_error("^map_agent: no agent named 'b'", map_agent={"a": "b"})
    expect_error(
        "^row 0 of input: no agent named 'a' .*; agent='NAME' runs all rows with another agent, map_agent={'a': 'NAME'} only",
        input=[{**TASKS[0], "agent_ref": {"name": "a"}}],
    )
    expect_error("give one of the two", config=folder / "global_config.yaml")
    expect_error("name it with output=", agent="counter_agent", resume=True)
    expect_error(r"row 0 must be an object such as .*, not 'a'", input=["a"])
    expect_error("already holds rollouts", agent="counter_agent", output=folder / "tasks.jsonl", input=TASKS[:1])
    expect_error(
        "^row 1 of input: this row names no agent; .* name one with agent=$", input=[{**TASKS[0], **named}, TASKS[1]]
    )
    existing = {"agent": "counter_agent", "input": TASKS[:1], "output": folder / "tasks.jsonl"}
    expect_error("add resume=True to continue that run, or overwrite=True to replace it", **existing)
    with pytest.raises(ngym.ConfigError, match="no such file; name one with config=, or"):
        ngym.run(folder / "no.yaml", progress=False)
    with pytest.raises(ngym.UsageError, match="run takes config files and key=value overrides, not 5"):
        ngym.run(5, progress=False)  # type: ignore[arg-type]
    for options, text in (({"format": "nope"}, "^format: 'nope' is unknown"), ({"best": -1}, "^best must be a whole")):
        with pytest.raises(ngym.UsageError, match=text):
            ngym.export_rollouts(folder / "tasks.jsonl", **{"format": "rollouts", **options})


def test_rows_of_another_agent_run_with_the_mapped_one(
    services: RunningServices, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "agent_ref": {"name": name}} for row, name in zip(TASKS[:2], ("old", "older"), strict=True)]
    call: dict[str, Any] = {"head": services, "input": rows, "output": tmp_path / "out.jsonl"}
    found = ngym.collect_rollouts(agent="counter_agent", **call)
    assert [row["agent_ref"]["name"] for row in found] == ["counter_agent"] * 2
    note = "note: agent='counter_agent' also runs rows that name another agent: 1 name 'old', 1 name 'older'"
    assert f"{note} (map_agent={{'NAME': 'NAME'}} keeps one)" in capfd.readouterr().err
    mapped = ngym.collect_rollouts(map_agent=dict.fromkeys(("old", "older"), "counter_agent"), **call, overwrite=True)
    assert mapped.mean_reward == 1.0 and "note:" not in capfd.readouterr().err


def test_a_service_that_does_not_start_is_reported_with_its_log(folder: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ngym.NgymError, match=r"(?s)service 'broken' died.*RuntimeError: no such weights"):
        ngym.run(folder / "global_config.yaml", only=["broken"], progress=False)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_services_for_one_call_end_with_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    call: dict[str, Any] = {"config": folder / "global_config.yaml", "agent": "counter_agent", "limit": 1}
    found = ngym.collect_rollouts(input=folder / "tasks.jsonl", overrides=["policy.model=echo"], **call)
    assert found.mean_reward == 1.0 and set(psutil.Process().children(recursive=True)) <= before
    [path] = found.paths
    assert path.exists()
    del found
    gc.collect()
    assert not path.parent.exists(), "what nobody has any more is removed"


async def test_a_coroutines_loop_continues_meanwhile_and_a_blocking_call_works_in_it_too(
    services: RunningServices,
) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    beating = asyncio.create_task(beat())
    call: dict[str, Any] = {"head": services, "agent": "counter_agent", "progress": False}
    assert (await ngym.collect_rollouts_async(input=TASKS[:1], **call)).mean_reward == 1.0
    assert beats > 5
    beating.cancel()
    assert ngym.collect_rollouts(input=TASKS[:1], **call).mean_reward == 1.0
    [verdict] = await ngym.verify_async([_rollout(1.0, target=4)], server="counter", head=services, progress=False)
    assert verdict.reward == 0.0


def test_an_interrupt_stops_the_call_and_shows_where_the_rest_is(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C, or a kernel's interrupt: a SIGINT while one rollout is on its way."""
    stub, urls = Background("a head"), list[str]()

    async def answer(row: Json) -> Json:
        if row["n"] == 4:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(PATIENCE_S)
        return scored_row(row)

    async def serve() -> None:
        async with head(answer) as url:
            urls.append(url)
            await asyncio.Event().wait()

    try:
        stub.begin(serve())
        wait_until(lambda: urls)
        with pytest.raises(KeyboardInterrupt):
            ngym.collect_rollouts(input=map(task, range(5)), agent="agent", head=urls[0], concurrency=1)
    finally:
        stub.close()
    stderr = capfd.readouterr().err
    assert "stopped; 4 rollouts are done: ngym.load_rollouts('" in stderr
    assert len(ngym.load_rollouts(stderr.split("'")[1])) == 4


async def test_a_cancelled_task_stops_its_call() -> None:
    arrived = asyncio.Event()

    async def answer(row: Json) -> Json:
        arrived.set()
        await asyncio.sleep(PATIENCE_S)
        return scored_row(row)

    async with head(answer) as url:
        call = asyncio.create_task(
            ngym.collect_rollouts_async(input=[task(0)], agent="agent", head=url, progress=False)
        )
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: not [thread for thread in threading.enumerate() if thread.name == "ngym"])


def test_services_that_no_one_has_any_more_end(folder: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    held = ngym.run(folder / "global_config.yaml", only="longest", progress=False)
    started = set(psutil.Process().children(recursive=True)) - before
    assert started and "1 of 1 services ready" in repr(held) and "longest" in held._repr_html_()
    del held
    gc.collect()
    wait_until(lambda: not running(started))


async def test_a_verification_without_room_is_refused_before_anything_starts(folder: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    call: dict[str, Any] = {"server": "counter", "config": folder / "global_config.yaml", "progress": False}
    for number in (-1, 0):
        with pytest.raises(ngym.UsageError, match=f"concurrency must be at least 1, not {number}"):
            ngym.verify(_rollout(1.0), concurrency=number, **call)
        with pytest.raises(ngym.UsageError, match=f"concurrency must be at least 1, not {number}"):
            await ngym.verify_async([_rollout(1.0)], concurrency=number, **call)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_verdicts_have_components_and_failures_say_why(
    services: RunningServices, rollouts: ngym.Rollouts, folder: Path
) -> None:
    assert [verdict.reward for verdict in ngym.verify(rollouts.worst(3), head=services, progress=False)] == [
        0.0,
        0.0,
        1.0,
    ]
    verdict = ngym.verify({**TASKS[3], "target": 0}, answer="Done.", server="counter", head=services, progress=False)
    assert (verdict.reward, verdict.failure, verdict.details["target"]) == (1.0, None, 0)
    wrong = ngym.verify(
        {"responses_create_params": {"input": "x"}}, answer="y", server="counter", head=services, progress=False
    )
    assert wrong.reward is None and "target" in str(wrong.failure)
    with pytest.raises(ngym.UsageError, match=r"row 1: its ng.schema_version is 2, and this ngym reads 1; update ngym"):
        ngym.verify([_rollout(1.0), _rollout(1.0) | {"ng": {"schema_version": 2}}], server="counter", head=services)
    with pytest.raises(ngym.UsageError, match="row 0 has no response"):
        ngym.verify(TASKS, server="counter", head=services, progress=False)
    for source, text in (
        (folder / "out.jsonl", r"out\.jsonl: verify takes rows; load them with ngym\.load_rollouts"),
        ("out.jsonl", "ngym.load_rollouts"),
        ([rollouts[0], 1], "row 1 must be a rollout's row or a task, not 1"),
    ):
        with pytest.raises(ngym.UsageError, match=text):
            ngym.verify(source, server="counter", head=services, progress=False)
    with pytest.raises(ngym.UsageError, match=r"no such gym server \(did you mean 'counter'\?\)"):
        ngym.verify(_rollout(1.0), server="conter", head=services, progress=False)
    for other in ("policy", "ngym"):
        with pytest.raises(ngym.UsageError, match=rf"server='{other}': no such gym server \(known: counter.*\)$"):
            ngym.verify(_rollout(1.0), server=other, head=services, progress=False)


@pytest.mark.parametrize("table", ["to_pandas", "to_polars", "to_dataset"])
def test_a_row_of_a_full_table_is_the_rollouts(table: str) -> None:
    own = {"status": "hot", "turns": 5, "level": 3, "none": None, "flag": True, "note": "[1]", "parts": {"a": [1]}}
    rows = [_rollout(1.0, **own), _rollout(None, level="3", note=[1]), _rollout(0.5, parts=[], flag="true")]
    frame = getattr(ngym.Rollouts(rows), table)(full=True)
    assert list(rows_of(frame, "a row")) == rows


@pytest.mark.parametrize("table", ["to_pandas", "to_polars", "to_dataset"])
def test_rollouts_are_collected_again_from_a_full_table(
    services: RunningServices, rollouts: ngym.Rollouts, table: str
) -> None:
    frame = getattr(rollouts, table)(full=True)
    again = ngym.collect_rollouts(input=frame, head=services, progress=False)
    scores = [{(row["_ng_task_index"], row["target"], row["reward"]) for row in each} for each in (rollouts, again)]
    assert len(again) == len(rollouts) and scores[0] == scores[1]


@pytest.mark.parametrize("table", ["to_pandas", "to_polars", "to_dataset"])
def test_rollouts_are_verified_from_a_full_table(
    services: RunningServices, rollouts: ngym.Rollouts, table: str
) -> None:
    worst = rollouts.worst(3)
    verdicts = ngym.verify(getattr(worst, table)(full=True), head=services, progress=False)
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 1.0]
    rows = [_rollout(None, text, 0, turns=[1], note="[1]") for text in ("short", "longer")]
    frame = getattr(ngym.Rollouts(rows), table)(full=True)
    verdicts = ngym.verify(frame, server="longest", head=services, progress=False)
    assert [(each.reward, each.details["turns"], each.details["note"]) for each in verdicts] == [
        (0.0, [1], "[1]"),
        (1.0, [1], "[1]"),
    ]


def test_rewards_by_comparison_are_given_to_a_group(services: RunningServices) -> None:
    rows = [_rollout(None, text, index) for text, index in (("short", 0), ("longer", 0), ("alone", 1))]
    verdicts = ngym.verify(rows, server="longest", head=services, progress=False)
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 1.0]
    for row in rows:
        del row["_ng_task_index"]
    [alone] = ngym.verify(rows[:1], server="longest", head=services, progress=False)
    assert alone.reward == 1.0
    with pytest.raises(ngym.UsageError, match="rows name no task"):
        ngym.verify(rows, server="longest", head=services, progress=False)


def test_exports_are_rows_a_file_and_a_dataset(rollouts: ngym.Rollouts, folder: Path) -> None:
    every = ngym.export_rollouts(folder / "out.jsonl", "demonstrations")
    assert (
        len(every) == 6
        and every[0]["messages"][0]["role"] == "user"
        and every.dropped == {"low": 2}
        and repr(every) == "<6 demonstrations of 8 rollouts; left out: 2 reward under min_reward=>"
    )
    some = ngym.export_rollouts(rollouts.worst(3), "kto", folder / "kto.jsonl")
    assert [row["label"] for row in some].count(False) == 2 and (folder / "kto.jsonl").exists()
    assert set(some.to_dataset().column_names) == {"prompt", "completion", "label", "tools"}
    with pytest.raises(ngym.UsageError, match="best has no effect with format='kto'"):
        ngym.export_rollouts(rollouts, "kto", best=1)
    with pytest.raises(ngym.UsageError, match="no rollout is left to export"):
        ngym.export_rollouts(rollouts, "preferences").to_dataset()


def test_rows_and_full_tables_are_exported_as_the_rollouts_are() -> None:
    rollouts = ngym.Rollouts([_rollout(1.0, "a", level=3), _rollout(0.0, "b", tags=["x"])])
    tables = [rollouts.to_pandas(full=True), rollouts.to_polars(full=True), rollouts.to_dataset(full=True)]
    for source in (list(rollouts), *tables):
        assert list(ngym.export_rollouts(source, "rollouts")) == list(rollouts)
    for source, text in (
        ([], "^source is empty"),
        (5, "^source must be rows, a path or a data frame, not int$"),
        ([rollouts[0], 5], "^row 1 must be a rollout's row, not 5$"),
        ([rollouts[0], {}], "^row 1 of source: no rollout: 'responses_create_params' is missing"),
    ):
        with pytest.raises(ngym.UsageError, match=text):
            ngym.export_rollouts(source, "kto")


def test_a_folder_and_a_row_without_a_reward_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ngym.UsageError, match=r"is a folder; name a file, or a pattern such as .*\*\.jsonl$"):
        ngym.load_rollouts(tmp_path)
    failed = ngym.Rollouts([_rollout(1.0), {"_ng_task_index": 7, "failure": {"class": "connect"}}])
    for table in (failed.to_pandas, lambda: failed.to_polars(full=True), failed._repr_html_):
        with pytest.raises(ngym.UsageError, match=r"^task 7: a row without a reward is not a rollout$"):
            table()


def test_a_dataset_has_the_exact_calls_and_tools_of_each_row() -> None:
    rows = []
    for index, (name, arguments) in enumerate([("add", '{"x":0.12345678901}'), ("find", '{"city":"3"}')]):
        row = _rollout(1.0, task_index=index)
        call = {"type": "function_call", "name": name, "arguments": arguments, "call_id": "c"}
        result = {"type": "function_call_output", "call_id": "c", "output": "3"}
        row["response"]["output"] = [call, result, *row["response"]["output"]]
        tools = [{"type": "function", "name": name, "parameters": {"type": "object", "properties": {name: {}}}}]
        row["responses_create_params"] = {"input": "3", "tools": tools}
        rows.append(row)
    rows.insert(0, _rollout(1.0, task_index=2))  # without tools
    for format in ("demonstrations", "kto"):
        exported = ngym.export_rollouts(ngym.Rollouts(rows), format)
        dataset = [{key: value for key, value in row.items() if value is not None} for row in exported.to_dataset()]
        assert json.dumps(dataset) == json.dumps(list(exported))
    mixed = ngym.export_rollouts(ngym.Rollouts([_rollout(1.0, level=3), _rollout(1.0, level="hard")]), "kto")
    assert len(mixed.to_dataset()) == 2


def test_metrics_of_a_rows_own_fields_do_not_mix_with_those_of_rollouts() -> None:
    rows = [_rollout(1.0, task_index=index, turns=100, seconds="long", level=3) for index in range(2)]
    for row in rows:
        row["ng"] = {"turns": 2}
    [of_agent] = ngym.Rollouts(rows).metrics()
    metrics = of_agent["agent_metrics"]
    assert (metrics["mean/turns"], metrics["mean/row.turns"], metrics["mean/level"]) == (2, 100, 3)
    assert of_agent["ng"]["means"]["turns"] == 2 and "mean/row.seconds" not in metrics


def test_metrics_of_huge_numbers_are_finite() -> None:
    rows = [_rollout(1.0, big=big, level=level) for big, level in ((1.7e308, 1), (1.7e308, 10**400), (-1.7e308, 3))]
    [of_agent] = ngym.Rollouts(rows).metrics()
    metrics = of_agent["agent_metrics"]
    assert metrics["mean/big"] == of_agent["ng"]["means"]["big"] == pytest.approx(1.7e308 / 3)
    assert (metrics["median/big"], metrics["min/big"], metrics["mean/level"]) == (1.7e308, -1.7e308, 2)
    assert "std/big" not in metrics and metrics["std/level"] == pytest.approx(2**0.5)


def test_numbers_that_only_python_has_are_exact_or_refused_in_one_line() -> None:
    numpy = library("numpy")
    rows = ngym.Rollouts([_rollout(1.0, big=10**30, mixed=0.5), _rollout(0.0, big={"in": 10**30}, mixed=10**400)])
    for table in (rows.to_pandas(full=True), rows.to_polars(full=True), rows.to_dataset(full=True)):
        assert [str(value) for value in table["big"]] == [f"{10**30}", f'{{"in":{10**30}}}']
        assert list(table["mixed"]) == ["0.5", f"{10**400}"]
    with pytest.raises(
        ngym.UsageError, match=r"^row 0: 'big' cannot be written as JSON: Integer exceeds 64-bit range$"
    ):
        ngym.export_rollouts(rows, "kto")
    with pytest.raises(ngym.UsageError, match=r"^row 0: 'big' cannot be written as JSON"):
        ngym.verify(rows, server="counter", progress=False)
    scored = ngym.Rollouts([_rollout(numpy.float64(1.0), level=numpy.int64(3), share=numpy.float32(0.5))])
    [exported] = ngym.export_rollouts(scored, "rollouts")
    assert (exported["reward"], exported["level"], exported["share"]) == (1.0, 3, 0.5)
    assert scored.to_polars()[["level", "share"]].rows() == [(3, 0.5)]
    with pytest.raises(ngym.UsageError, match=r"^pass_at\(1\.5\): k must be a whole number$"):
        rows.pass_at(1.5)  # type: ignore[arg-type]


def test_rollouts_that_name_no_task_are_not_exported() -> None:
    rows = [_rollout(reward, text) for reward, text in ((1.0, "a"), (0.0, "b"))]
    for row in rows:
        del row["_ng_task_index"]
    with pytest.raises(ngym.UsageError, match=r"^row 0 of source: '_ng_task_index' must be a whole number, not None"):
        ngym.export_rollouts(ngym.Rollouts(rows), "preferences")


def test_a_filtered_copy_needs_no_output() -> None:
    rows = ngym.Rollouts([_rollout(reward) for reward in (1.0, 0.0)])
    exported = ngym.export_rollouts(rows, "rollouts", min_reward=0.5)
    assert list(exported) == [rows[0]] and len(rows) == 2


def test_a_file_that_several_patterns_match_is_loaded_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(orjson.dumps(_rollout(1.0, name)) + b"\n")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "b.jsonl")
    loaded = ngym.load_rollouts(tmp_path / "b.jsonl", f"{tmp_path}/*.jsonl", tmp_path / "a.jsonl")
    assert len(loaded) == 2 and [path.name for path in loaded.paths] == ["b.jsonl", "a.jsonl"]


def test_training_metrics_have_a_row_for_each_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}, {"step": 2, "eval/x/avg@4": 1.0}]
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows) + b'{"step": 3, "lo')
    metrics = ngym.training_metrics(tmp_path)
    assert list(metrics) == [rows[0], {**rows[1], "eval/x/avg@4": 1.0}] and metrics.curve("loss") == (
        [1, 2],
        [0.5, 0.25],
    )
    frame = metrics.to_pandas()
    assert frame.index.tolist() == [1, 2] and frame["eval/x/avg@4"].count() == 1 and "loss" in metrics._repr_html_()
    with file.open("ab") as more:  # resumed from a checkpoint: what was logged after it is void
        more.write(b'ss": 0.1}\n' + orjson.dumps({"step": 2, "loss": 0.3}) + b"\n")
    assert ngym.training_metrics(file).curve("loss") == ([1, 2], [0.5, 0.3])
    with pytest.raises(ngym.UsageError, match=r"no metric 'los' \(did you mean 'loss'\?\)"):
        metrics.curve("los")
    with pytest.raises(ngym.UsageError, match="name the output folder of an ng_train"):
        ngym.training_metrics(tmp_path / "nothing")


def test_a_cells_output_is_replaced_and_escaped() -> None:
    bundles: list[dict[str, str]] = []

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            bundles.append(bundle)

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        bundles.append(bundle)
        return Handle()

    from rich.text import Text

    cell = NotebookDisplay(display)
    cell.draw(lambda size: [Text("1/2")], lambda: "1/2")
    cell.draw(lambda size: [Text("1/2")], lambda: "1/2")
    cell.say(HOSTILE)
    cell.close()
    assert [bundle["text/plain"] for bundle in bundles] == ["1/2", r"<script>alert(1)</script>\x1b[2J\u202e"]
    assert "<script" not in bundles[-1]["text/html"] and "&lt;script" in bundles[-1]["text/html"]
