"""Races: calls that end at the same moment, hanging peers, calls that begin together, and files that are replaced."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from local_services import local_services
from pydantic import BaseModel
from waiting import PATIENCE_S, descendants, running, until

from ngym import Session, VerifyRequest, gym_server
from ngym.cli.shell import walkthrough
from ngym.collect.rollout_rows import CaptureClient
from ngym.collect.rollout_scheduler import Gate, Outages
from ngym.errors import Overloaded, Unreachable, UsageError
from ngym.export.exporter import export
from ngym.export.options import Options
from ngym.files import row_log
from ngym.files.row_log import RowLog
from ngym.peers import Peers
from ngym.remote.rate_limiter import ConcurrencyLimiter
from ngym.sandbox import LocalSandbox, confinement
from ngym.schema import IDEMPOTENCY_HEADER
from ngym.supervise.service_log import ServiceLog
from ngym.workers import WorkerPool

CAPTURED = {
    "segments": [{"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [-0.1], "policy_version": [[1, 2, 0]]}],
    "spans": [],
    "finish_reasons": [],
}


class Head:
    """A head and a model server in one. silent_requests: how many of its next connections it says nothing to. restarts: of each service."""

    def __init__(self) -> None:
        self.url = ""
        self.silent_requests = 0
        self.restarts = 0
        self.answers_deletes = True

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                while await reader.readline() != b"\r\n":
                    pass
                if (self.silent_requests and b"/servers" in line) or (
                    line.startswith(b"DELETE") and not self.answers_deletes
                ):
                    self.silent_requests -= 1
                    return
                content = json.dumps(self.answer_to(line.split()[1].decode())).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content))
        finally:
            writer.close()

    def answer_to(self, path: str) -> Any:
        if path == "/servers":
            services = {"policy": "model", "gym": "gym_server", "agent": "agent"}
            return [
                {"name": name, "kind": kind, "url": self.url, "restarts": self.restarts}
                for name, kind in services.items()
            ]
        return {} if path in ("/config", "/ready") else CAPTURED


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[Head, Peers]]:
    head = Head()
    server = await asyncio.start_server(head.talk, "127.0.0.1", 0)
    head.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    peers = Peers({name: [head.url] for name in ("policy", "gym", "agent")}, head.url)
    yield head, peers
    await peers.close()
    server.close()


async def test_a_call_that_is_cancelled_as_it_ends_does_not_end_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def same(value):\n    return value\n")
    pool = WorkerPool(tmp_path / "work.py", "same", workers=1)
    try:
        await pool.run("warm")
        for turns in range(4):
            first, second = (asyncio.create_task(pool.run(name)) for name in ("first", "second"))
            assert pool._slots is not None
            cancel_at_end(first, pool._slots._free, turns)
            await asyncio.wait([first, second])
            assert second.result().value == "second", f"{turns} turns of the loop later"
    finally:
        await pool.aclose()


@pytest.mark.skipif(not confinement.seccomp_supported(), reason="no filter for this machine's processor")
async def test_a_program_that_is_cancelled_as_it_ends_does_not_end_the_next_one() -> None:
    sandbox = LocalSandbox(slots=1)
    try:
        await sandbox.run("print(0)")
        for turns in range(4):
            first, second = (asyncio.create_task(sandbox.run(f"print({number})")) for number in (1, 2))
            cancel_at_end(first, sandbox._free, turns)
            await asyncio.wait([first, second])
            assert second.result().stdout == "2\n", f"{turns} turns of the loop later"
    finally:
        await sandbox.aclose()


def cancel_at_end(task: asyncio.Task[Any], free: asyncio.Queue[Any], turns: int) -> None:
    """So many turns of the loop after what it used is free again, which is before its caller continues."""
    put = free.put_nowait

    async def cancel() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()

    def put_then_cancel(used: Any) -> None:
        free.put_nowait = put  # type: ignore[method-assign]
        put(used)
        cancelling.append(asyncio.create_task(cancel()))

    cancelling: list[asyncio.Task[None]] = []
    free.put_nowait = put_then_cancel  # type: ignore[method-assign]


async def test_a_head_that_is_silent_once_costs_no_rollout_its_tokens() -> None:
    async with talking() as (head, peers):
        pickup = CaptureClient(peers, None)
        head.silent_requests = 2
        await pickup.begin()
        with pytest.raises(Unreachable, match="does not say which services are models"):
            await pickup.complete("agent", "r0", {"response": {"output": []}}, 0.0)
        answer: dict[str, Any] = {"response": {"output": []}}
        await pickup.complete("agent", "r1", answer, 0.0)
        assert answer["ng"]["segments"] == CAPTURED["segments"]


async def test_tokens_that_a_model_server_has_sent_are_kept_though_it_does_not_hear_that_it_may_forget_them() -> None:
    async with talking() as (head, peers):
        pickup = CaptureClient(peers, None)
        await pickup.begin()
        head.answers_deletes = False
        answer: dict[str, Any] = {"response": {"output": []}}
        await pickup.complete("agent", "r1", answer, 0.0)
        assert answer["ng"]["segments"] == CAPTURED["segments"]


@pytest.mark.parametrize("wrong", [None, 3])
async def test_an_answer_whose_ng_is_not_an_object_gets_no_captured_tokens(wrong: Any) -> None:
    """It is refused later, as a failure of this rollout alone."""
    async with talking() as (_, peers):
        pickup = CaptureClient(peers, None)
        await pickup.begin()
        answer: dict[str, Any] = {"response": {"output": []}, "ng": wrong}
        await pickup.complete("agent", "r1", answer, 0.0)
        assert answer["ng"] == wrong


async def test_two_services_that_start_again_together_are_two_outages() -> None:
    async with talking() as (head, peers):
        outages = Outages(peers, Gate(), poll_s=0.1, give_up_s=5)
        await outages.begin()
        began = asyncio.get_running_loop().time()
        head.restarts = 1
        for service in ("gym", "policy"):
            failure: Any = {
                "class": "connect",
                "service": service,
                "http_status": None,
                "message": "",
                "retryable": True,
            }
            assert await outages.explain(failure, began), service
        await outages.close()


@contextmanager
def standing_still(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that syncs nothing until it is let go, and then says that it could not."""
    goes_on, sync = threading.Event(), row_log._sync

    def stall_log(fd: int) -> None:
        monkeypatch.setattr(row_log, "_sync", sync)
        goes_on.wait()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(row_log, "_sync", stall_log)
    yield goes_on
    goes_on.set()


async def test_a_log_that_is_closed_while_its_disk_hangs_touches_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_log(name: str) -> RowLog:
        log = RowLog(tmp_path / name, key=lambda row: row["k"])
        assert list(log.rows()) == []
        return log

    with standing_still(monkeypatch) as goes_on:
        stalled = open_log("stalled.jsonl")
        appending = asyncio.create_task(stalled.append(b'{"k": 1}'))
        await until(lambda: (tmp_path / "stalled.jsonl").stat().st_size)
        appending.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stalled.flush()
        stalled.close()
        other = open_log("other.jsonl")
        for number in range(3):
            await other.append(b'{"k": %d}' % number)
        goes_on.set()
        await until(lambda: not (tmp_path / "stalled.jsonl").stat().st_size)  # what was not safe is cut off
        await other.append(b'{"k": 3}')
        await other.flush()
        other.close()
    assert (tmp_path / "other.jsonl").read_bytes().count(b"\n") == 4


async def test_a_waiting_caller_learns_of_a_pause_that_is_too_long() -> None:
    limiter = ConcurrencyLimiter(1)
    slot = await limiter.enter(None, 5.0)
    waiting = asyncio.create_task(limiter.enter(None, 5.0))
    patient = asyncio.create_task(limiter.enter(None, 7200.0))
    await asyncio.sleep(0)
    slot.record_refusal(3600.0)
    with pytest.raises(Overloaded, match="a pause of 3600 s"):
        await waiting
    limiter.leave()
    assert (limiter.in_flight, patient.done()) == (0, False)
    patient.cancel()


async def test_a_log_that_could_not_be_rotated_once_is_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngym.supervise.service_log.MAX_FILE_BYTES", 1000)
    log = ServiceLog(tmp_path / "one.log", lambda text: None, lambda line: line)
    (tmp_path / "one.log.new").mkdir()  # nothing can be opened there
    fd = log.open()
    os.write(fd, b"early\n" * 400)
    await until(lambda: (tmp_path / "one.log").stat().st_size >= 2400)
    os.write(fd, b"late\n")
    await until(lambda: log.tail(1) == ["late"])
    assert (tmp_path / "one.log").read_bytes().endswith(b"late\n")
    (tmp_path / "one.log.new").rmdir()
    os.write(fd, b"later\n")
    await until(lambda: log.tail(1) == ["later"])
    assert (tmp_path / "one.log").read_bytes() == b"later\n" and (tmp_path / "one.log.1").stat().st_size > 2400
    os.close(fd)
    await log.close()


async def test_a_log_on_a_full_disk_says_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The limit of the size of files stands for the disk: a write fails after a part of it was written."""
    path = tmp_path / "one.log"
    log = ServiceLog(path, lambda text: None, lambda line: line)
    fd = log.open()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        for number in range(3):
            os.write(fd, b"line %d\n" % number)
            await until(lambda number=number: log.tail(1) == [f"line {number}"])  # type: ignore[misc]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"line 0\nlin"
    assert caplog.messages == [f"{path}: output is lost (File too large); the service continues"]
    os.write(fd, b"line 3\n")
    await until(lambda: log.tail(1) == ["line 3"])
    note = b"11 bytes of output are missing here: this file could not be written"
    assert path.read_bytes() == b"line 0\nlin\n" + note + b"\nline 3\n"
    os.close(fd)
    await log.close()


async def test_a_push_to_a_server_that_hangs_ends_with_its_pusher() -> None:
    arrived = asyncio.Event()

    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(stand_still, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    from ngym.trainer.weights import push

    pusher = push.Pusher([f"http://{host}:{port}"], "a token for this test", patience_s=2 * PATIENCE_S)
    preparing = asyncio.create_task(asyncio.to_thread(pusher.prepare))
    await arrived.wait()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(pusher.finish)
    with pytest.raises(Exception, match=r"/weights|after shutdown"):
        await preparing
    server.close()


class Nothing(BaseModel):
    """No arguments."""


slow_sessions: list[Session] = []


async def slow(arguments: Nothing, session: Session) -> str:
    session["work"] = session.spawn(asyncio.sleep(2 * PATIENCE_S))
    slow_sessions.append(session)
    await asyncio.shield(session["work"])
    return "done"


async def worthless(request: VerifyRequest) -> float:
    return 0.0


@pytest.mark.parametrize("headers", [{}, {IDEMPOTENCY_HEADER: "a key"}])
async def test_a_call_whose_session_ends_meanwhile_gets_that_error(headers: dict[str, str]) -> None:
    slow_sessions.clear()
    async with (
        local_services(gym=gym_server(verify=worthless, tools=[slow])) as peers,
        httpx.AsyncClient(base_url=peers.urls["gym"][0], timeout=PATIENCE_S) as client,
    ):
        await client.post("/seed_session", json={"responses_create_params": {"input": "?"}})
        calling = asyncio.create_task(client.post("/slow", json={}, headers=headers))
        await until(lambda: slow_sessions)
        slow_sessions[0].over()
        problem = (await calling).json()
        assert (problem["status"], problem["detail"]) == (409, "this call was stopped: its session has ended")


class Terminated(BaseException):
    """By a signal, as KeyboardInterrupt is."""


@pytest.fixture
def terminated_at_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM raises Terminated; it comes just after the next process has been started."""

    def terminate(*_: object) -> None:
        raise Terminated

    begin = subprocess.Popen.__init__

    def begin_and_tell(process: subprocess.Popen[bytes], *args: Any, **options: Any) -> None:
        begin(process, *args, **options)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminate)
    monkeypatch.setattr(subprocess.Popen, "__init__", begin_and_tell)
    yield
    signal.signal(signal.SIGTERM, before)


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def sleeping() -> list[psutil.Process]:
    return descendants(psutil.Process(), lambda process: "time.sleep(600)" in process.cmdline()[-1])


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])  # ignored behind a script's `&`
def test_a_signal_as_a_run_of_a_sweep_starts_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminated_at_start: None, ctrl_c: Any
) -> None:
    from ngym.trainer import sweep as child

    monkeypatch.setattr(child, "SHUTDOWN_S", PATIENCE_S)
    before = signal.signal(signal.SIGINT, ctrl_c)
    began = time.monotonic()
    try:
        with pytest.raises(Terminated):
            child.run_command(SLEEP, tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not running(sleeping()) and time.monotonic() - began < PATIENCE_S


def test_a_signal_as_a_step_of_a_walk_starts_ends_the_step(terminated_at_start: None) -> None:
    with pytest.raises(SystemExit):
        walkthrough.Walkthrough(1).python(*SLEEP[1:])
    assert not running(sleeping())


def written_rollouts(path: Path, words: str) -> Path:
    """Two scored rollouts. words: the last user message of each."""
    rows = [
        {"responses_create_params": {"input": f"{words} {n}"}, "response": {"output": []}, "reward": 1.0, "ng": {}}
        | {"_ng_task_index": n, "_ng_rollout_index": 0}
        for n in range(2)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("words", ["longer than before", "s"])
def test_a_file_that_is_replaced_while_it_is_exported_is_not_copied_in_pieces(words: str, tmp_path: Path) -> None:
    source, output = written_rollouts(tmp_path / "rollouts.jsonl", "before"), tmp_path / "exported.jsonl"
    options = Options(format="rollouts", inputs=(source,), output=output)

    def replace_after_the_last(lines: int) -> None:
        if lines == 2:
            written_rollouts(tmp_path / "new", words).rename(source)

    with pytest.raises(UsageError, match="changed while it was read"):
        export(options, lambda line: None, tick=replace_after_the_last)
    assert not output.exists()
