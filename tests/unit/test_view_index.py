"""The viewer's index: it agrees with the file, also while the file changes."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viewer_process import failure, rollout, segment, write
from waiting import wait_until

from ngym.errors import NotFound
from ngym.files.row_log import RowLog
from ngym.view import growing_index
from ngym.view.file_scanner import ScanJob, scan, without_segments
from ngym.view.growing_index import Index, Store, extent_of, row_seq
from ngym.view.rows import RunRows


def assistant(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": content}


def _with_segments(count: int) -> dict[str, Any]:
    row = rollout(said='","segments":[{"token_ids":[1],"mask":[[0,1]]')
    row["ng"]["segments"] = [segment()] * count
    return row


EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "images": st.lists(st.sampled_from(["0f" * 16, "a1" * 16]), min_size=1, max_size=3),
        "routed_experts": st.just({"shape": [2, 1, 1], "dtype": "uint8", "data": "AAE="}),
    },
)


@given(st.lists(EXTRAS, min_size=1, max_size=3))
def test_segments_are_left_out_with_their_images_and_experts(extras: list[dict[str, Any]]) -> None:
    row = _with_segments(0)
    row["ng"]["segments"] = [segment() | extra for extra in extras]
    left = orjson.loads(without_segments(orjson.dumps(row)))
    assert left["ng"].pop("segments") == [0] and row["ng"].pop("segments")
    assert left == row
    damaged = orjson.dumps(_with_segments(1)).replace(b'"policy_version":[[3', b'"policy_version":[[\0')
    assert without_segments(damaged) == damaged


LINES = st.one_of(
    st.builds(
        lambda task, index, reward, text: orjson.dumps(rollout(task, index, reward, text)),
        st.integers(0, 5),
        st.integers(0, 3),
        st.none() | st.floats(-2, 2),
        st.text(max_size=40),
    ),
    st.builds(lambda said: json.dumps(rollout(said=said), ensure_ascii=True).encode(), st.text(max_size=40)),
    st.builds(lambda task: orjson.dumps(failure(task)), st.integers(0, 5)),
    st.builds(lambda end: orjson.dumps(rollout())[:end], st.integers(0, 600)),
    st.builds(lambda count: orjson.dumps(_with_segments(count)), st.integers(0, 3)),
    st.just(orjson.dumps(rollout()).replace(b"-0.25", b"\0\0\0\0\0")),
    st.sampled_from(
        [
            b"",
            b"  ",
            b"[1]",
            b"null",
            b'{"reward": 1}',
            b'{"response": {}, "ng": 5}',
            b"\0\0\0",
            b'{"response": NaN}',
            b"\xff{",
        ]
    ),
    st.binary(max_size=20).filter(lambda line: b"\n" not in line),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ngym" / "view"


@contextmanager
def open_index(output: Path) -> Iterator[Index]:
    """The index of what is there now."""
    index = Index(output, output.with_name(f"{output.stem}_failures.jsonl"))
    index.catch_up()
    try:
        yield index
    finally:
        index.close()


def rows_of(index: Index, q: str = "", sort: str = "") -> list[dict[str, Any]]:
    return RunRows(index).page(q, sort, 0, 1000).rows


def plainly_read(content: bytes) -> tuple[dict[str, float | None], int]:
    """Row -> reward, and how many lines are none, of a file that is read without any skill."""
    found: dict[str, float | None] = {}
    bad = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        row = _row(line)
        if row is not None:
            found[str(number)] = row.get("reward")
        elif number < len(lines) - 1:
            bad += 1
    return found, bad


def _row(line: bytes) -> dict[str, Any] | None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        row = json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    known = isinstance(row, dict) and ("response" in row or "failure" in row) and isinstance(row.get("ng", {}), dict)
    return row if known else None


@settings(max_examples=40)
@given(lines=st.lists(LINES, max_size=8), ended=st.booleans(), cuts=st.lists(st.integers(0, 4000), max_size=4))
def test_the_index_of_a_file_that_grows_in_any_steps_is_what_a_plain_reading_finds(
    lines: list[bytes], ended: bool, cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    path = tmp_path_factory.mktemp("file") / "out.jsonl"
    path.touch()
    with open_index(path) as index:
        start = 0
        for end in [*sorted(min(cut, len(content)) for cut in cuts), len(content)]:
            with path.open("ab") as file:
                file.write(content[start:end])
            start = end
            index.catch_up()
            expected, bad = plainly_read(content[:end])
            assert {row["row"]: row["reward"] for row in rows_of(index)} == expected
            assert index.extent().bad == bad
        for row in expected:
            assert index.line(row_seq(row)) == content.split(b"\n")[int(row)].strip()


@given(lines=st.lists(LINES, min_size=1, max_size=6), cuts=st.lists(st.integers(1, 3000), max_size=5))
def test_blocks_of_any_size_hold_each_line_once(
    lines: list[bytes], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = b"\n".join(lines) + b"\n"
    path = tmp_path_factory.mktemp("file") / "out.jsonl"
    path.write_bytes(content)
    full = scan(ScanJob(str(path), 0, len(content), len(content)))
    ends = sorted({min(cut, len(content)) for cut in cuts} | {len(content)})
    blocks = [scan(ScanJob(str(path), start, end, len(content))) for start, end in zip([0, *ends], ends, strict=False)]
    assert [row[1:] for block in blocks for row in block.rows] == [row[1:] for row in full.rows]
    assert sum(block.lines for block in blocks) == full.lines == len(lines)
    assert sum(block.bad_lines for block in blocks) == full.bad_lines
    assert max(block.end for block in blocks) == full.end == len(content)


def test_a_row_says_what_the_rollout_was(tmp_path: Path) -> None:
    row = rollout(3, 1, 0.5, level="hard", long="x" * 500, _ng_train={"task": "a/1", "oldest": 7})
    row["responses_create_params"]["input"] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "  What is it?" + "!" * 300}]},
    ]
    with open_index(write(tmp_path / "out.jsonl", [row, rollout(3, 2, 1.0)])) as index:
        (found, _) = rows_of(index)
    assert found == {
        "row": "0", "task": 3, "rollout": 1, "task_id": "0000000000000003", "rollout_id": "r-3-1", "agent": "math_agent",
        "reward": 0.5, "status": "ok", "stop_reason": "answer", "turns": 2, "tool_calls": 1, "tool_errors": 0,
        "input_tokens": 20, "output_tokens": 6, "seconds": 1.5, "attempt": 0, "policy_version": 4, "learned": 7,
        "group_mean": 0.75, "group_size": 2, "advantage": -0.25, "failure": None,
        "prompt": "What is it?" + "!" * 149, "answer": "It is 4.", "components": {"right": 0.5}, "fields": {"level": "hard"},
    }  # fmt: skip


def test_a_row_of_nemo_gym_which_has_no_ng_is_shown_with_what_it_says(tmp_path: Path) -> None:
    row = {name: value for name, value in rollout(2, 0, 0.25).items() if name != "ng"}
    with open_index(write(tmp_path / "out.jsonl", [row])) as index:
        (found,) = rows_of(index)
    assert (found["status"], found["reward"], found["tool_calls"], found["turns"]) == ("ok", 0.25, 0, None)


def test_failed_attempts_are_in_the_same_table_and_count_in_their_group(tmp_path: Path) -> None:
    write(tmp_path / "out_failures.jsonl", [failure(0, 1), failure(7, 0, "tool_error", 2)])
    with open_index(write(tmp_path / "out.jsonl", [rollout(0, 0, 0.5)])) as index:
        found = {row["row"]: row for row in rows_of(index)}
        tasks = {task["task"]: task for task in RunRows(index).tasks("", "", 0, 10).rows}
    assert list(found) == ["0", "f0", "f1"]
    assert (found["f1"]["status"], found["f1"]["failure"], found["f1"]["attempt"]) == ("failed", "tool_error", 2)
    assert found["f0"]["group_mean"] == 0.5
    assert (found["f0"]["answer"], found["f0"]["reward"]) == ("it took too long", None)
    assert {task: (each["n"], each["failures"]) for task, each in tasks.items()} == {0: (1, 1), 7: (0, 1)}


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"response": {"output": [assistant(["no part"])]}}, "the content of its last message"),
        (
            {"response": {"output": [assistant([{"type": "output_text", "text": 5}])]}},
            "the content of its last message",
        ),
        ({"response": {"output": [assistant(7)]}}, "the content of its last message"),
        ({"response": {"output": ["no item"]}}, "must be a list of objects"),
        ({"response": []}, "'response' must be an object, not list"),
        ({"ng": {"schema_version": 2}}, "its ng.schema_version is 2, and this ngym reads 1; update ngym"),
        ({"failure": "a field of the task"}, None),
        ({"response": {"output": 5, "usage": {"output_tokens": 2**60}}}, None),
        ({"_ng_task_index": 2**63, "_ng_rollout_index": -(2**63), "_ng_train": {"oldest": 2**64 - 1}}, None),
        ({"reward": 2**64 - 1, "n": 2**64 - 1}, None),
        ({"reward": True, "response": None, "reward_components": {"": {}}, 'a"b': 1}, None),
        ({"ng": {"policy_version": [2**60, "3", None], "turns": 1.5, "task_id": 5, "timings": {"total_s": "1"}}}, None),
    ],
)
def test_whatever_a_row_says_the_rows_behind_it_are_indexed(
    tmp_path: Path, own: dict[str, Any], problem: str | None
) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, **own), rollout(1)])
    with open_index(path) as index:
        assert [row["row"] for row in rows_of(index)] == (["0", "1"] if problem is None else ["1"])
        assert (index.error, index.extent().bad) == (None, problem is not None)
        if problem is not None:
            assert problem in _all(index, "SELECT problem FROM bad_lines")[0][0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_index_whose_thread_ends_says_so_and_another_viewer_continues(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    broken = Index(path, Path("no name can have a \0"))
    broken.start()
    wait_until(lambda: broken.error is not None)
    assert broken.error is not None and broken.error.startswith("the index ended: ValueError")
    with open_index(path) as index:
        assert len(rows_of(index)) == 1
    broken.close()


def test_a_torn_last_line_is_not_shown_until_it_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    line = orjson.dumps(rollout(1))
    with open_index(path) as index:
        for part, rows in ((line[:200], 1), (line[200:], 2), (b"\n", 2), (orjson.dumps(rollout(2)) + b"\n", 3)):
            with path.open("ab") as file:
                file.write(part)
            index.catch_up()
            assert [row["row"] for row in rows_of(index)] == [str(row) for row in range(rows)]
            assert index.extent().bad == 0


def test_nothing_changes_while_nothing_is_added(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    (tmp_path / "out_failures.jsonl").touch()
    with path.open("ab") as file:
        file.write(b'{"torn')
    with open_index(path) as index:
        before = index.extent()
        index.catch_up()
        assert index.extent() == before
        assert index.caught_up and not index.reading_on


async def test_rows_that_the_collector_appends_are_shown_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    log = RowLog(path, lambda row: row["_ng_task_index"])
    with open_index(path) as index:
        for task in range(5):
            await log.append(orjson.dumps(rollout(task)))
            index.catch_up()
            assert [row["task"] for row in rows_of(index)] == list(range(task + 1))
    await log.flush()
    log.close()


@pytest.mark.parametrize("how", ["cut", "replaced", "rewritten", "edited"])
def test_a_file_that_did_not_only_grow_is_read_again(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(task, said="a" * 5000) for task in range(4)])
    other = [rollout(task, said="b" * 5000) for task in range(6)]
    with open_index(path) as index:
        epoch = index.extent().epoch
        if how == "cut":
            write(path, other[:2])
        elif how == "replaced":
            write(tmp_path / "new", other).rename(path)
        elif how == "rewritten":  # in place, and longer than before
            write(path, [rollout(0, said="a" * 5000), *other[1:]])
        else:  # in place, with as many bytes
            content = path.read_bytes()
            path.write_bytes(
                content[: len(content) // 2] + content[len(content) // 2 :].replace(b"a" * 5000, b"c" * 5000)
            )
            os.utime(path, ns=(1, 1))
        index.catch_up()
        expected = [json.loads(line)["response"]["output"][0]["content"][0]["text"][-160:] for line in path.open()]
        assert [row["answer"] for row in rows_of(index)] == expected
        assert index.extent().epoch == epoch + 1


def test_what_was_indexed_is_not_read_again(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(task) for task in range(3)])
    with open_index(path) as index:
        version = index.extent().version
    with open_index(path) as index:
        assert index.extent().version == version
        assert len(rows_of(index)) == 3
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".sqlite"]


def test_an_index_that_no_one_opened_for_a_month_is_removed(tmp_path: Path, cache: Path) -> None:
    forgotten, recent = write(tmp_path / "forgotten.jsonl", [rollout(0)]), write(tmp_path / "kept.jsonl", [rollout(0)])
    with open_index(forgotten):
        pass
    for path in cache.iterdir():
        os.utime(path, (0, 0))
    with open_index(recent):
        pass
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".sqlite"]
    with open_index(forgotten) as index:
        assert len(rows_of(index)) == 1


def test_two_viewers_of_one_file_share_its_index_and_either_continues_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    first = Index(path, tmp_path / "out_failures.jsonl")
    first.catch_up()
    with open_index(path) as second:
        write(path, [rollout(0), rollout(1)])
        second.catch_up()
        assert len(rows_of(second)) == 1
        first.catch_up()
        assert len(rows_of(first)) == len(rows_of(second)) == 2
        first.close()
        write(path, [rollout(0), rollout(1), rollout(2)])
        second.catch_up()
        assert len(rows_of(second)) == 3


def test_an_index_is_begun_when_others_have_seen_that_it_is_empty(tmp_path: Path) -> None:
    store = Store(tmp_path / "index.sqlite")
    with ThreadPoolExecutor(1) as thread:
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT * FROM sqlite_master").fetchall()
            assert extent_of(store, {}).version == -1
            assert store.path is not None and not store.path.stat().st_size  # who reads changes nothing
            beginning = thread.submit(store.is_writer)
            time.sleep(0.1)  # no one else reads here: who begins keeps new readers out until the old ones have ended
            other.rollback()
        assert beginning.result()
    assert extent_of(store, {}).version >= 0
    store.close()


def test_a_viewer_has_caught_up_when_the_one_that_writes_the_index_has(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    with open_index(path) as first, open_index(path) as second:
        assert second.caught_up
    with open_index(path) as first:
        write(path, [rollout(0), rollout(1)])
        with open_index(path) as second:
            assert not second.caught_up  # and an export would wait
            first.catch_up()
            second.catch_up()
            assert second.caught_up and len(rows_of(second)) == 2
            with path.open("ab") as file:
                file.write(orjson.dumps(rollout(2)))
            second.catch_up()
            assert second.caught_up  # with what was there when it began


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("what", ["database", "folder"])
def test_an_index_that_is_deleted_is_rebuilt(tmp_path: Path, cache: Path, what: str, deleted: bool) -> None:
    with open_index(write(tmp_path / "out.jsonl", [rollout(0), rollout(1)])) as index:
        before = index.extent()
        if what == "folder":
            shutil.rmtree(cache)
        else:
            next(cache.glob("*.sqlite")).unlink()
        if deleted:
            assert index.extent().version == -1
        index.catch_up()
        after = index.extent()
        assert (len(rows_of(index)), index.error, index.note) == (2, None, None)
        assert (after.version, after.epoch) != (before.version, before.epoch)


def test_a_cache_that_cannot_be_written_makes_an_index_in_memory_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with open_index(write(tmp_path / "out.jsonl", [rollout(0), rollout(1)])) as index:
        assert len(rows_of(index)) == 2
        assert index.note is not None and "not kept" in index.note


def test_a_full_disk_makes_an_index_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(task, said=str(task) * 300) for task in range(800)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with open_index(path) as index:
            assert index.extent().rows == 800
            assert index.note is not None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_index_that_is_broken_is_rebuilt(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    with open_index(path):
        pass
    (index_file,) = cache.glob("*.sqlite")
    index_file.write_bytes(b"this is no database" * 500)
    with open_index(path) as index:
        assert len(rows_of(index)) == 1
        assert index.note is None


@pytest.mark.process
def test_helpers_read_a_large_file_in_its_order_and_no_module_that_lies_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orjson.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    rows = [rollout(task, said="x" * 40_000) for task in range(600)]
    rows[300]["ng"]["segments"] = [segment()] * 3
    lines = [orjson.dumps(row) for row in rows]
    lines[450] = lines[450][:30_000]
    with open_index(write(tmp_path / "out.jsonl", lines)) as index:
        extent = index.extent()
        tasks = [task for (task,) in _all(index, "SELECT task FROM rows ORDER BY seq")]
        assert (extent.rows, extent.bad, extent.indexed_bytes) == (599, 1, extent.bytes)
        assert tasks == [task for task in range(600) if task != 450]
        assert index.line(599) == lines[599]


def test_a_file_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    with open_index(path) as index:
        path.unlink()
        index.catch_up()
        assert index.error is not None and "no such file" in index.error
        with pytest.raises(NotFound):
            index.line(0)


def test_a_file_that_the_collector_has_locked_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    log = RowLog(path, lambda row: row["_ng_task_index"])
    with open_index(path) as index:
        assert len(rows_of(index)) == 1
    log.close()


def _all(index: Index, sql: str) -> list[Any]:
    with index.reading() as database:
        return database.execute(sql).fetchall()


def test_files_of_other_projects_are_those_that_their_page_names() -> None:
    vendor = Path(growing_index.__file__).with_name("static") / "vendor"
    named = re.findall(r"`([\w.]+)`: sha256 `(\w+)`", (vendor / "README.md").read_text())
    found = {file.name: sha256(file.read_bytes()).hexdigest() for file in vendor.iterdir() if file.suffix != ".md"}
    assert dict(named) == {name: digest for name, digest in found.items() if not name.endswith("LICENSE")}
    assert "uPlot.LICENSE" in found
