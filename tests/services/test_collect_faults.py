"""ng_collect_rollouts with a full disk, no permission, a broken disk, signals, clock jumps and invalid rows."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from stub_agents import head, scored_row, task, text_item
from waiting import PATIENCE_S, until

from ngym.files.jsonl import read
from ngym.schema import Json

COLLECT = [sys.executable, "-m", "ngym", "collect_rollouts"]
SIGNALS = [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM, signal.SIGTERM], [signal.SIGHUP, signal.SIGINT]]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks.jsonl", 20)


def write_tasks(path: Path, count: int) -> Path:
    path.write_bytes(b"".join(orjson.dumps(task(n)) + b"\n" for n in range(count)))
    return path


async def start(command: list[Any], cwd: Path, **environment: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    words = list(map(str, command))
    return await asyncio.create_subprocess_exec(
        *words, cwd=cwd, stdout=pipe, stderr=pipe, env={**os.environ, **environment}
    )


async def wait_for_end(process: asyncio.subprocess.Process, patience_s: float = PATIENCE_S) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), patience_s)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def numbers(path: Path) -> list[int]:
    """Of a file in which every line is whole."""
    assert path.read_bytes().endswith(b"}\n")
    return sorted(line.row["_ng_task_index"] for line in read(path))


def one_line(err: str) -> str:
    assert err.count("\n") == 1 and "Traceback" not in err, err
    return err


# The disk


@pytest.fixture
def mounting() -> list[str]:
    """The beginning of a command that may mount what only it sees."""
    command = ["unshare", "--mount", "--map-root-user"]
    probe = [*command, "mount", "-t", "tmpfs", "none", "/tmp"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not mount a file system of its own")
    return [*command, "sh", "-c"]


class Full:
    """A collector whose disk of 2 MB has no room for its rows. disk: as this process sees it, also when that one has gone."""

    def __init__(self) -> None:
        self.answer_count = 0

    def answer(self, row: Json) -> Json:
        self.answer_count += 1
        return scored_row(row, 1.0, text_item("x" * 40_000))

    async def begin(self, mounting: list[str], tasks: Path, url: str) -> None:
        disk = tasks.parent / "disk"
        disk.mkdir()
        script = f'mount -t tmpfs -o size=2m none {disk} && head -c 1500000 /dev/zero >{disk}/filler && exec "$@"'
        run = [*COLLECT, "--head", url, "--agent", "agent", "--input", tasks, "--output", disk / "out.jsonl"]
        self.process = await start([*mounting, script, "sh", *run], tasks.parent)
        await until(lambda: self.answer_count == 20 or self.process.returncode is not None)
        self._held = os.open(f"/proc/{self.process.pid}/root{disk}", os.O_RDONLY)
        self.disk = Path(f"/proc/self/fd/{self._held}")
        assert self.process.stdout is not None
        line = b""
        while b"No space left on device" not in line:  # as the user sees it
            line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)
            assert line, "it ended"

    def close(self) -> None:
        os.close(self._held)


async def test_a_full_disk_is_waited_out_and_nothing_is_lost(mounting: list[str], tasks: Path) -> None:
    full = Full()
    async with head(full.answer) as url:
        await full.begin(mounting, tasks, url)
        assert len((full.disk / "out.jsonl").read_bytes()) < 600_000, "all the room there was"
        (full.disk / "filler").unlink()
        code, out, err = await wait_for_end(full.process)
    assert (code, err) == (0, ""), out
    assert numbers(full.disk / "out.jsonl") == list(range(20))
    full.close()


@pytest.mark.soak
async def test_a_disk_that_stays_full_ends_the_run_with_75(mounting: list[str], tasks: Path) -> None:
    """It is tried for ten minutes."""
    full = Full()
    async with head(full.answer) as url:
        await full.begin(mounting, tasks, url)
        code, _, err = await wait_for_end(full.process, 800)
    assert code == 75 and "No space left on device for 600 s; make room, then run again with --resume" in err
    assert "Traceback" not in err
    left = full.disk / "out.jsonl"  # not there if not one row went into it: they may all have come at once
    assert not left.exists() or left.read_bytes().endswith(b"}\n")
    full.close()


async def test_a_read_only_disk_is_one_line(mounting: list[str], tasks: Path) -> None:
    disk = tasks.parent / "disk"
    disk.mkdir()
    async with head() as url:
        run = [*COLLECT, "--head", url, "--agent", "agent", "--input", tasks, "--output", disk / "out.jsonl"]
        script = f'mount -t tmpfs -o ro none {disk} && exec "$@"'
        code, _, err = await wait_for_end(await start([*mounting, script, "sh", *run], tasks.parent))
    assert code == 2 and "disk cannot be written to: it is read-only" in one_line(err)


BROKEN_DISK = """
import errno, os

whole, calls = os.fdatasync, 0

def fdatasync(fd):
    global calls
    calls += 1
    if calls > 1:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    whole(fd)

os.fdatasync = fdatasync
"""


def python_environment(folder: Path, script: str) -> dict[str, str]:
    """The environment in which every Python process runs this code first."""
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(script)
    return {"PYTHONPATH": str(folder / "first")}


async def test_a_disk_that_breaks_ends_the_run_in_one_line_and_keeps_whole_rows(tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    async def answer(row: Json) -> Json:
        if row["n"] >= 5:
            await until(lambda: out.read_bytes())
        return scored_row(row)

    async with head(answer) as url:
        run = [*COLLECT, "--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl"]
        code, _, err = await wait_for_end(await start(run, tmp_path, **python_environment(tmp_path, BROKEN_DISK)))
        assert code == 1 and "out.jsonl: cannot be written: Input/output error" in one_line(err)
        assert set(numbers(out)) <= {0, 1, 2, 3, 4}
        code, _, err = await wait_for_end(await start([*run, "--resume"], tmp_path))
    assert (code, err) == (0, "") and numbers(tmp_path / "out.jsonl") == list(range(20))


@pytest.mark.parametrize("output", ["none/out.jsonl", "/proc/out.jsonl", "folder"])
async def test_a_place_where_nothing_can_be_written_is_one_line(tasks: Path, tmp_path: Path, output: str) -> None:
    (tmp_path / "folder").mkdir()
    requests: list[Json] = []
    async with head(lambda row: requests.append(row)) as url:
        run = [*COLLECT, "--head", url, "--agent", "agent", "--input", tasks, "--output", output]
        code, _, err = await wait_for_end(await start(run, tmp_path))
    assert code != 0 and output in one_line(err) and not requests


# Signals and the clock


async def interrupt_collection(
    folder: Path, tasks: Path, numbers_sent: list[signal.Signals], pause: float = 0, **more: Any
) -> None:
    async def answer(row: Json) -> Json:
        if row["n"] >= 5:
            await asyncio.sleep(3600)
        return scored_row(row)

    out = folder / "out.jsonl"
    async with head(answer) as url:
        run = [*COLLECT, "--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl"]
        process = await start(run, folder, **more)
        await until(lambda: out.exists() and out.read_bytes().count(b"\n") == 5)
        for number in numbers_sent:
            with suppress(ProcessLookupError):  # it has ended; send_signal would reap it before asyncio does
                os.kill(process.pid, number)
            await asyncio.sleep(pause)
        code, _, err = await wait_for_end(process)
    assert code == 130 and "Traceback" not in err
    assert numbers(out) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sent", SIGNALS, ids=str)
async def test_a_second_interrupt_loses_no_row_either(tasks: Path, tmp_path: Path, sent: list[signal.Signals]) -> None:
    await interrupt_collection(tmp_path, tasks, sent)


SIGNAL_AT_EXIT = """
import atexit, os, signal

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    atexit.register(os.kill, os.getpid(), number)
"""


async def test_signals_during_the_exit_of_an_interrupted_command_do_not_change_its_code(
    tasks: Path, tmp_path: Path
) -> None:
    await interrupt_collection(tmp_path, tasks, [signal.SIGTERM], **python_environment(tmp_path, SIGNAL_AT_EXIT))


INTERRUPTED = """
import os, signal
from ngym.runtime.event_loop import signals_as_keyboard_interrupt

try:
    with signals_as_keyboard_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached")
except KeyboardInterrupt:
    print("interrupted", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("continues to its end", flush=True)
os.kill(os.getpid(), signal.SIGHUP)
print("not reached")
"""


def test_after_an_interrupt_the_next_signal_raises_nothing_and_one_more_ends_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stderr) == (130, "")
    assert ran.stdout == "interrupted\ncontinues to its end\n"


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_hundred_ends_by_signals_lose_no_row(tasks: Path, tmp_path: Path) -> None:
    draw = random.Random(2)
    for place in range(100):
        (tmp_path / str(place)).mkdir()
        await interrupt_collection(tmp_path / str(place), tasks, draw.choice(SIGNALS), draw.uniform(0, 0.2))


JUMPING_CLOCK = """
import itertools, time

whole, jumps = time.time, itertools.cycle([0, -3600, 86400])
time.time = lambda: whole() + next(jumps)
"""


async def test_a_clock_that_jumps_by_an_hour_and_by_a_day_changes_nothing(tasks: Path, tmp_path: Path) -> None:
    """In the collector and in every service that it starts, from one look at the clock to the next."""
    (tmp_path / "global_config.yaml").write_text(
        "ngym: {head: {port: 0}}\n"
        "policy: {kind: model, app: models/scripted, model: echo}\n"
        "counter: {kind: gym_server, app: gym_servers/counter}\n"
        "agent: {kind: agent, app: agents/simple, gym: counter, model: policy}\n"
    )
    rows = [{"responses_create_params": {"input": f"count to {n}"}, "target": n, "initial": 0} for n in range(20)]
    tasks.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    run = [*COLLECT, "--config", "global_config.yaml", "--agent", "agent", "--input", tasks, "--output", "out.jsonl"]
    code, out, err = await wait_for_end(await start(run, tmp_path, **python_environment(tmp_path, JUMPING_CLOCK)))
    assert (code, err) == (0, ""), out
    assert numbers(tmp_path / "out.jsonl") == list(range(20))
    assert not (tmp_path / "out_failures.jsonl").exists()


# Invalid rows


def bad_rows() -> Iterator[tuple[bytes, str]]:
    yield b'{"responses_create_params": {"input": "\xff\xfe"}}', "not JSON"
    yield b'{"responses_create_params": {"input": "a"}, "x": NaN}', "not JSON"
    yield b'{"responses_create_params": {"input": "a"}, "x": 1e999}', "not JSON"
    yield b'{"responses_create_params": {"input": "\\ud800"}}', "not JSON"
    yield b'{"responses_create_params": {"input": "a"}', "not JSON"
    yield b"[" * 5000 + b"]" * 5000, "not JSON"
    yield (
        b'{"responses_create_params": {"input": "a"}, "x": ' + b"[" * 300 + b"]" * 300 + b"}",
        "deeper than 250 levels",
    )
    yield b'{"input": "a"}', "no responses_create_params"
    yield b'{"responses_create_params": []}', "responses_create_params"
    yield b"3", "not a JSON object but int"


async def test_rows_that_are_not_tasks_are_named_before_anything_is_sent(tmp_path: Path) -> None:
    bad = list(bad_rows())
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"responses_create_params": {"input": "a"}}\n' + b"".join(line + b"\n" for line, _ in bad))
    requests: list[Json] = []
    async with head(lambda row: requests.append(row)) as url:
        run = [*COLLECT, "--head", url, "--agent", "agent", "--input", "tasks.jsonl", "--output", "out.jsonl"]
        code, _, err = await wait_for_end(await start(run, tmp_path))
    assert code == 2 and not requests
    for number, (error_line, (_, message)) in enumerate(zip(err.splitlines(), bad, strict=True), 2):
        assert error_line.startswith(f"tasks.jsonl:{number}: ") and message in error_line
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


@pytest.mark.soak
async def test_a_row_of_fifty_megabytes_goes_through_whole(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(orjson.dumps(task(0, pad="x" * 50_000_000)) + b"\n" + orjson.dumps(task(1)) + b"\n")
    async with head(lambda row: scored_row(row, 1.0, length=len(row.get("pad", "")))) as url:
        run = [*COLLECT, "--head", url, "--agent", "agent", "--input", "tasks.jsonl", "--output", "out.jsonl"]
        code, _, err = await wait_for_end(await start(run, tmp_path))
    assert (code, err) == (0, "")
    assert sorted(line.row["length"] for line in read(tmp_path / "out.jsonl")) == [0, 50_000_000]
