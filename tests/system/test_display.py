"""The displays of a run, a collection and a training, read from the screens of pseudo-terminals."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import ItemsView, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import IO

import orjson
import psutil
import pytest
from rich.text import Text
from stub_agents import head, scored_row, task
from terminals import Terminal, terminal
from waiting import descendants, until

from ngym.collect.aggregate import Aggregates
from ngym.collect.collection_files import Progress
from ngym.collect.progress_display import ProgressMeter, ProgressSnapshot, display
from ngym.runtime.live_region import Screen, Size, capture_output, is_live, sparkline
from ngym.schema import Json
from ngym.supervise.metrics_scraper import ServiceTraffic
from ngym.supervise.service import ReplicaState, ServiceLog
from ngym.supervise.status_display import Board

ESCAPE = "\x1b"
HOSTILE = "\x1b[2J\x1b]0;title\x07gone\rover"
SIZES = [Size(199, 50), Size(79, 23), Size(39, 7), Size(20, 3), Size(3, 1), Size(1, 1)]
YES = """
from ngym import VerifyRequest, gym_server

def verify(task: VerifyRequest) -> float:
    return 1.0

app = gym_server(verify=verify)
"""
TRAINING = """
import os, sys, time
from pathlib import Path
from ngym.trainer.reporting import metrics as reporting

with reporting.Metrics(Path(sys.argv[1]), 9, True) as metrics:
    for step in range(1, 7):
        values = {"reward/mean": step / 10, "lag": 1.0, "tokens_per_s": 1234.0, "time/generation": 3.0, "time/train": 1.0}
        metrics.log(step, values)
        os.write(1, f"a library of C, {step}\\n".encode())
        print(f"a warning, {step}", file=sys.stderr)
    os.write(1, b"caf\\xc3")
    time.sleep(0.2)
    os.write(1, b"\\xa9\\n")
    metrics.note(6, {"eval/sums/avg@4": 0.5}, "held-out after 6 steps: \\x1b[2Jsums 0.5")
    sys.stdin.readline()
    raise KeyboardInterrupt
"""
MAKING = """
import subprocess, sys

print("the script speaks")
subprocess.run([sys.executable, "{script}", "demonstrations", "--count", "100", "--seed", "0", *sys.argv[1:]], check=True)
"""
DYING = """
import os, sys
from pathlib import Path
from ngym.trainer.reporting import metrics as reporting

with reporting.Metrics(Path(sys.argv[1]), 9, True) as metrics:
    metrics.log(1, {"loss": 0.5})
    os.write(2, b"out of memory\\n")
    os.abort()
"""


def picture(*lines: str):  # type: ignore[no-untyped-def]
    return lambda size: [Text(line) for line in lines]


@pytest.mark.parametrize("rewraps", [False, True])
@pytest.mark.parametrize("size", [(40, 8), (120, 24), (200, 10), (17, 5)])
def test_a_resize_leaves_nothing_behind(size: tuple[int, int], rewraps: bool) -> None:
    with terminal(120, 24, rewraps) as tty:
        screen = Screen(tty.stream)
        screen.say("a line above")
        screen.show(picture("x" * 100, "y" * 119, "z" * 30))
        assert tty.lines == ["a line above", "x" * 100, "y" * 119, "z" * 30]
        tty.resize(*size)
        screen.refresh()
        room = size[0] - 1
        cut = [line if len(line) <= room else line[: room - 1] + "…" for line in ("x" * 100, "y" * 119, "z" * 30)]
        assert tty.lines[-3:] == cut
        assert "".join(tty.lines[:-3]) in ("", "a line above")  # pyte drops lines at the top of a lower screen
        screen.close()
        assert "x" not in tty.text and "z" not in tty.text
        assert not tty.cursor_is_hidden


def test_what_is_said_goes_above_in_order_and_is_whole() -> None:
    with terminal(40, 8) as tty:
        screen = Screen(tty.stream)
        screen.show(picture("one", "two"))
        for number in range(10):
            screen.say(f"line {number} " + "w" * 40)
        assert tty.lines[-2:] == ["one", "two"]
        assert tty.lines[-4:-2] == ["line 9 " + "w" * 33, "w" * 7]
        assert tty.cursor_is_hidden


def test_nothing_that_is_said_or_drawn_commands_the_terminal() -> None:
    with terminal(80, 8) as tty:
        screen = Screen(tty.stream)
        screen.say("before")
        screen.say(f"\x1b[31mred\x1b[0m {HOSTILE}")
        assert tty.lines == ["before", r"red \x1b[2J\x1b]0;title\x07gone\rover"]


def test_a_frame_that_has_not_changed_is_not_sent_again() -> None:
    with terminal() as tty:
        screen = Screen(tty.stream)
        screen.show(picture("one"))
        tty.read()
        sent = len(tty.raw)
        screen.refresh()
        tty.read()
        assert len(tty.raw) == sent
        tty.resize(40, 8)
        screen.refresh()
        tty.read()
        assert len(tty.raw) > sent


def test_threads_do_not_tear_one_anothers_lines() -> None:
    with terminal(60, 40) as tty:
        screen = Screen(tty.stream)
        screen.show(picture("below"))

        def say(name: str) -> None:
            for number in range(6):
                screen.say(f"{name}{number}" * 10)
                screen.refresh()

        threads = [threading.Thread(target=say, args=(name,)) for name in "abcde"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        *above, last = tty.lines
        assert last == "below" and len(above) == 30
        assert all(len(set(re.findall("..", line))) == 1 for line in above)


def test_prints_of_others_go_above(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as tty:
        monkeypatch.setattr(sys, "stderr", tty.stream)
        screen = Screen(tty.stream)
        screen.show(picture("below"))
        with capture_output(screen):
            print("a warning", file=sys.stderr)
            print("10 %\r20 %", end="", file=sys.stderr)
        assert tty.lines == ["a warning", "20 %", "below"]
        assert sys.stderr is tty.stream


@pytest.mark.parametrize(("name", "value", "coloured"), [("NO_COLOR", "1", False), ("NO_COLOR", "", True)])
def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str, coloured: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(name, value)
    with terminal() as tty:
        Screen(tty.stream).show(lambda size: [Text("green", "green")])
        assert tty.lines == ["green"]
        assert bool(re.search(rb"\x1b\[[0-9;]*3[0-9]", tty.raw)) is coloured


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as tty:
        monkeypatch.setenv("TERM", "xterm")
        assert is_live(tty.stream) and not is_live(io.StringIO())
        monkeypatch.setenv("TERM", "dumb")
        assert not is_live(tty.stream)


def state(label: str, status: str = "ready", **fields: object) -> ReplicaState:
    known = ReplicaState(label, "gym_server", "gym_servers/x", label, 0, "http://127.0.0.1:40001")
    return ReplicaState(**{**known.__dict__, "status": status, **fields})


def draw_lines(lines: Sequence[Text], size: Size) -> list[str]:
    """AssertionError where a picture would change."""
    assert len(lines) <= size.height or size.height == 1
    return [line.plain for line in lines]


@pytest.mark.parametrize("size", SIZES)
def test_a_board_fits_whatever_the_terminal(size: Size) -> None:
    board = Board()
    for number in range(30):
        board.record_state(state(f"a_service_of_some_name-{number}", restarts=number % 2))
    board.record_state(state("policy", "starting", detail="loading the weights " * 9))
    board.record_traffic({f"a_service_of_some_name-{number}": ServiceTraffic(1234.5, 1) for number in range(30)})
    lines = draw_lines(board.picture(size), size)
    if size.width >= 39:
        assert all(len(line) <= size.width for line in lines)
        assert any(line.startswith(("policy", "30 of 31")) for line in lines)
    if size.height == 7:
        assert lines[-2] == "and 26 more, all ready" and lines[-3].startswith("policy")


def test_a_board_shows_state_place_traffic_and_trouble() -> None:
    board, wide, narrow = Board(), Size(100, 20), Size(39, 20)
    board.record_state(state("policy", "starting", detail="loading the weights"))
    board.record_state(state("math", restarts=2))
    board.record_traffic({"math": ServiceTraffic(12.34, 5)})
    policy, math, below = draw_lines(board.picture(wide), wide)
    assert re.fullmatch(r"policy  starting \d+ s  loading the weights", policy)
    assert re.fullmatch(r"math    ready +http://127.0.0.1:40001  12.3 req/s  2 restarts, 5 errors", math)
    assert re.fullmatch(r"1 of 2 services ready, \d+ s", below)
    line = r"1 of 2 services ready, \d+ s; waiting for policy \(loading the weights\)"
    assert re.fullmatch(line, board.line())
    board.record_state(state("policy"))
    board.record_traffic({"policy": ServiceTraffic(0.0, 0)})
    assert [line.split() for line in draw_lines(board.picture(narrow), narrow)[:2]] == [
        ["policy", "ready", ":40001", "idle"],
        ["math", "ready", ":40001", "2", "restarts"],
    ]


def test_a_board_forgets_a_replica_that_has_left_the_run() -> None:
    board = Board()
    for event in (state("policy-0"), state("policy-1"), state("policy-1", "stopped", listed=False)):
        board.record_state(event)
    assert re.fullmatch(r"1 of 1 services ready, \d+ s", board.line())


@pytest.mark.parametrize("size", SIZES)
def test_a_collection_fits_whatever_the_terminal(size: Size) -> None:
    facts = ("an_agent reward 0.512 ±0.031", "failed attempts 1.2 % (timeout 3)", "12.0 rollouts/s", "64 in flight")
    lines = ProgressSnapshot(17, 4096, 75.0, 3600.0, facts, ("paused: policy is down; it goes on by itself",)).picture(
        size
    )
    assert "17/4,096  1:15  1:00:00 to go" in lines[0].plain
    if size.width >= 39:
        assert all(len(line.plain) <= size.width for line in lines)
        assert "paused: policy is down" in lines[1].plain.replace("\n", " ")


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█" and sparkline([3.0], 9) == "▁" and sparkline([], 9) == ""


def row(index: int) -> Json:
    trace = {"status": "ok", "stop_reason": "answer", "turns": 1, "tool_calls": 0, "tool_errors": 0}
    fields = {"agent_ref": {"name": "agent"}, "_ng_task_index": index, "response": {"usage": {}}, "reward": 1.0}
    return {**fields, "ng": {**trace, "timings": {"total_s": 1.0}}}


async def test_a_log_gets_the_last_state_and_no_escape_codes() -> None:
    aggregates, log = Aggregates(), io.StringIO()
    meter = ProgressMeter(aggregates, Progress(total=3, complete=True), lambda: 0, {})
    async with display(meter, log, lost=lambda: None) as show:
        show.say(f"first timeout: {HOSTILE}")
        for index in range(3):
            aggregates.add(row(index))
    lines = log.getvalue().splitlines()
    assert lines[0] == r"first timeout: \x1b[2J\x1b]0;title\x07gone\rover"
    assert lines[1].startswith("3/3 | agent reward 1.000") and len(lines) == 2
    assert ESCAPE not in log.getvalue()


async def test_the_log_lines_of_a_service_that_failed_are_shown_harmless(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "x.log", on_status=lambda status: None, redact=lambda line: line)
    with os.fdopen(log.open(), "w") as service:
        service.write(f"Traceback\n{HOSTILE}\n")
    await log.close()
    assert log.tail(2) == ["Traceback", r"\x1b[2J\x1b]0;title\x07gone\rover"]


@contextmanager
def on_terminal(
    command: Sequence[str], folder: Path, columns: int, rows: int, stdout: IO[bytes] | None = None
) -> Iterator[tuple[Terminal, int]]:
    """A program whose terminal this is, and its pid. stdout: where its standard output goes instead."""
    with terminal(columns, rows) as tty:
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        with subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=tty.slave,
            stdout=stdout or tty.slave,
            stderr=tty.slave,
            start_new_session=True,
        ) as process:
            try:
                yield tty, process.pid
                tty.until(lambda: tty.read() or process.poll() is not None)
            finally:
                process.kill()
            assert not tty.cursor_is_hidden


def test_ng_run_shows_its_services_through_resizes_a_death_and_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "gym_servers").mkdir()
    (tmp_path / "gym_servers" / "yes.py").write_text(YES)
    (tmp_path / "global_config.yaml").write_text(
        "ngym: {head: {port: 0}}\none: {kind: gym_server, app: gym_servers/yes, replicas: 2}\n"
    )
    with on_terminal([sys.executable, "-m", "ngym", "run"], tmp_path, 120, 24) as (tty, pid):
        tty.until(lambda: "ready in" in tty.text)
        assert [line.split()[:2] for line in tty.lines[:2]] == [["one-0", "ready"], ["one-1", "ready"]]
        tty.resize(40, 8)
        tty.until(lambda: "…" not in tty.text and re.search(r"one-1 +ready +:\d+", tty.text))
        tty.until(lambda: all(len(line) < 40 for line in tty.lines) and tty.text.count("one-0") == 1)
        tty.resize(120, 24)
        [service] = descendants(psutil.Process(pid), lambda each: each.name() == "ng:one-1")
        service.kill()
        tty.until(lambda: "1 restart" in tty.text and "one-1: ready" in tty.text)
        first = next(filter(None, tty.lines))
        assert re.match(r"\d\d:\d\d:\d\d  one-1: restarting, killed by SIGKILL", first)
        tty.until(lambda: tty.text.count("ready in") == 1)
        os.kill(pid, signal.SIGINT)
        tty.until(lambda: "every service is stopped" in tty.text)
    assert tty.lines[-1] == "every service is stopped" and "ready in" not in tty.text


def test_a_training_shows_its_curve_and_keeps_what_others_print(tmp_path: Path) -> None:
    with on_terminal([sys.executable, "-c", TRAINING, str(tmp_path / "metrics.jsonl")], tmp_path, 80, 20) as (tty, _):
        wide = r"step 6/9 .*\nreward    0.6     [▁-█]{6}  from 0.1\nheld-out  0.5 .*\n.*lag 1.*\na step 4.0 s:  sampling 75 %  training 25 %$"
        tty.until(lambda: re.search(wide, tty.text))
        expected = {f"{who}, {step}" for who in ("a library of C", "a warning") for step in range(1, 7)}
        expected |= {"café", r"held-out after 6 steps: \x1b[2Jsums 0.5"}
        tty.until(lambda: expected <= set(tty.lines))
        tty.resize(40, 8)
        narrow = r"step 6/9 .{,30}\nreward    0.6     [▁-█]{6}  from 0.1\n(?:.{,39}\n){3}training 25 %$"
        tty.until(lambda: re.search(narrow, tty.text))  # above, pyte leaves what a lower screen had
        os.write(tty.master, b"\n")
    assert "KeyboardInterrupt" in tty.text and re.search(
        r"^step 6/9 in \d+:\d\d  reward 0.600$", tty.text, re.MULTILINE
    )
    assert "sampling" not in tty.text


def test_a_json_in_a_file_is_json_whatever_else_prints(root: Path, tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(MAKING.format(script=root / "data" / "calculator" / "generate.py"))
    words = ("sft.yaml", "data.made_by=[make.py]", "data.path=made.jsonl", "output=run", "--json")
    command = [sys.executable, "-m", "ngym", "train", *words]
    with (tmp_path / "out.json").open("wb") as out, on_terminal(command, tmp_path, 80, 20, out) as (tty, _):
        tty.until(lambda: "policy saved in run/policy" in tty.text)
    assert b"the script speaks" in tty.raw and b"?25l" in tty.raw and b"loss" in tty.raw
    assert json.loads((tmp_path / "out.json").read_bytes())["policy"] == "run/policy"


def test_what_a_dying_training_says_last_is_seen(tmp_path: Path) -> None:
    with terminal(80, 20) as tty:
        command = [sys.executable, "-c", DYING, str(tmp_path / "metrics.jsonl")]
        environment = {**os.environ, "TERM": "xterm-256color"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=tty.slave, stderr=tty.slave, check=False)
        assert done.returncode == -signal.SIGABRT and "out of memory" in tty.text


def test_a_training_whose_metrics_cannot_be_written_says_so_and_leaves_the_terminal_alone(tmp_path: Path) -> None:
    with on_terminal([sys.executable, "-c", DYING, str(tmp_path / "no" / "metrics.jsonl")], tmp_path, 80, 20) as (
        tty,
        _,
    ):
        tty.until(lambda: "No such file or directory" in tty.text)
    assert b"\x1b[?25l" not in tty.raw


def test_sigterm_to_a_training_from_a_file_shows_the_cursor_again(root: Path, tmp_path: Path) -> None:
    data = f"data.made_by=[{root}/data/calculator/generate.py,demonstrations,--count,400,--seed,0]"
    words = ("sft.yaml", data, "data.path=made.jsonl", "output=run", "epochs=1000")
    with on_terminal([sys.executable, "-m", "ngym", "train", *words], tmp_path, 80, 20) as (tty, pid):
        tty.until(lambda: re.search(r"^loss ", tty.text, re.MULTILINE) and tty.cursor_is_hidden)
        os.kill(pid, signal.SIGTERM)
    assert re.search(r"^step \d+/[\d,]+ in \d+:\d\d  loss", tty.text, re.MULTILINE)
    assert "WARNING" not in tty.text


def test_a_frame_reads_new_rows_only_and_a_long_curve_is_a_few_means() -> None:
    class Row(dict[str, float]):
        read = 0

        def items(self) -> ItemsView[str, float]:
            Row.read += 1
            return super().items()

    from ngym.trainer.reporting import metrics as display

    with terminal() as tty:
        history = [Row({"loss": float(step), "val/loss": 2.0}) for step in range(5000)]
        history[7]["loss"] = float("nan")
        live = display.LiveDisplay(Screen(tty.stream), 9999, history)
        live.step(5000, history[-1])
        first = Row.read
        history.append(Row({"loss": 4000.0, "eval/sums/avg@4": 0.5}))
        live.draw()
        assert (first, Row.read) == (5000, 5001)
        loss, *held_out = tty.lines[1:4]
        assert re.fullmatch(r"loss      4000    ▁[▁-█]{38}█  from 0", loss)
        assert [line.split()[0] for line in held_out] == ["held-out", "held-out"]


@pytest.mark.parametrize("count", [1, 5, 319, 320, 321, 5000])
def test_the_means_of_a_curve_are_those_of_its_values(count: int) -> None:
    from ngym.trainer.reporting import metrics as trainer_display

    curve, values = trainer_display.Curve(), [float(number * number) for number in range(count)]
    for value in values:
        curve.add(value)
    assert (curve.first, curve.last) == (values[0], values[-1])
    of = math.ceil(count / len(curve.means))
    assert len(curve.means) < 320 and of in (1, 2, 4, 8, 16, 32)
    assert curve.means == pytest.approx([fmean(values[at : at + of]) for at in range(0, count, of)])


async def test_a_pipe_gets_what_it_shall_while_a_terminal_shows_the_progress(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b"".join(orjson.dumps(task(n)) + b"\n" for n in range(5)))
    go_on = asyncio.Event()

    async def answer(row: Json) -> Json:
        if row["n"] == 4:
            await go_on.wait()
        return scored_row(row)

    with terminal(60, 10) as tty:
        async with head(answer) as url:
            words = ("--head", url, "--agent", "agent", "--input", "tasks.jsonl", "--output", "out.jsonl", "--json")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ngym", "collect_rollouts", *words),
                cwd=tmp_path,
                env={**os.environ, "TERM": "xterm"},
                stdout=asyncio.subprocess.PIPE,
                stderr=tty.slave,
            )
            await until(lambda: all(part in tty.text for part in ("4/5", "agent reward 1.000", "1 in flight")))
            assert tty.lines[0].startswith("━") and tty.cursor_is_hidden
            go_on.set()
            out, _ = await process.communicate()
        assert json.loads(out)["done"] == 5 and ESCAPE.encode() not in out
        assert tty.lines == [] and not tty.cursor_is_hidden
