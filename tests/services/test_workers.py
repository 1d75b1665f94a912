"""The worker pool with real processes: deadlines, crashes, recovery, and cleanup."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import running, until, wait_until

from ngym.errors import NotReady, Overloaded, ServiceError
from ngym.workers import WorkerPool
from ngym.workers import pool as processes

FUNCTION = """
import os, signal, sys, time
from .sibling import TWO

WARMED = []

def warm():
    WARMED.append(os.getpid())

def work(what, n=0):
    if what == "double": return n * TWO
    if what == "spin":
        while True: pass
    if what == "power": return 9**9**9
    if what == "sleep": time.sleep(n)
    if what == "open":  # begin, and end when the file n is there
        with open(n + ".calls", "a") as calls: calls.write("x")
        while not os.path.exists(n): time.sleep(0.01)
        return "done"
    if what == "raise": raise ValueError("no such thing \\ud800")
    if what == "exit": sys.exit(3)
    if what == "die": os._exit(3)
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "memory": return len(bytearray(8 << 30))
    if what == "big": return "x" * (5 << 20)
    if what == "object": return object()
    if what == "pids": return [os.getpid(), os.getppid(), WARMED]
    if what == "burn":
        end = time.process_time() + n
        while time.process_time() < end: pass
        return "done"
"""


@pytest.fixture
def function_file(tmp_path: Path) -> Path:
    (tmp_path / "sibling.py").write_text("TWO = 2\n")
    file = tmp_path / "function.py"
    file.write_text(FUNCTION)
    return file


@pytest.fixture
async def pool(function_file: Path):
    pool = WorkerPool(function_file, "work", warm="warm", workers=2, deadline_s=60)
    yield pool
    await pool.aclose()


async def test_a_call_gets_its_value(pool):
    outcome = await pool.run("double", 21)
    assert (outcome.kind, outcome.value) == ("ok", 42)


async def test_the_function_is_warmed_once_before_the_workers_are_forked(pool):
    first, second = await asyncio.gather(pool.run("pids"), pool.run("pids"))
    (worker, zygote, warmed), (other, *_) = first.value, second.value
    assert worker != other
    assert warmed == [zygote]


@pytest.mark.parametrize("what", ["spin", "power"])
async def test_a_call_that_does_not_end_is_cut_at_its_deadline_and_the_next_one_served(pool, what):
    outcome = await pool.run(what, deadline_s=0.5)
    assert outcome.kind == "timeout"
    # The latter on a very busy machine.
    assert outcome.detail.startswith(("used 0.5 s of CPU time", "no answer within 4 s"))
    assert (await pool.run("double", 2)).value == 4


async def test_a_call_that_sleeps_meets_the_wall_clock(pool):
    outcome = await pool.run("sleep", 3600, deadline_s=0.1)
    assert outcome.kind == "timeout" and outcome.detail.startswith(
        "no answer within 0.8 s, of which it computed for 0."
    )
    assert outcome.infra


async def test_a_call_that_computed_until_the_wall_clock_is_its_own_doing_on_a_busy_machine_too(
    pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([5.0, 5.03])
    monkeypatch.setattr(processes, "_cpu_s", lambda pid: next(used))
    outcome = await pool.run("sleep", 3600, deadline_s=0.1)
    assert (outcome.kind, outcome.infra) == ("timeout", False)
    assert outcome.failure()["reward"] == 0.0


async def test_the_deadline_counts_cpu_time_so_a_busy_machine_cuts_nothing_short(function_file):
    cores = os.sched_getaffinity(0)
    crowded = WorkerPool(function_file, "work", workers=12, deadline_s=3)
    os.sched_setaffinity(0, {min(cores)})  # the workers inherit it: together they need 3.6 s, whatever the machine
    try:
        await crowded.start()
        began = time.monotonic()
        outcomes = await asyncio.gather(*(crowded.run("burn", 0.3) for _ in range(12)))
        assert time.monotonic() - began > 3
    finally:
        os.sched_setaffinity(0, cores)
        await crowded.aclose()
    assert [outcome.kind for outcome in outcomes] == ["ok"] * len(outcomes)


@pytest.mark.parametrize(
    ("what", "kind", "detail"),
    [
        ("raise", "crash", "ValueError: no such thing"),
        ("exit", "crash", "SystemExit: 3"),
        ("die", "crash", "exited with code 3"),
        ("segfault", "crash", "SIGSEGV"),
        ("memory", "memory", "out of memory"),
        ("big", "crash", "larger than 4 MiB"),
        ("object", "crash", "not JSON serializable"),
    ],
)
async def test_every_way_to_fail_is_reported_and_survived(pool, what, kind, detail):
    outcome = await pool.run(what)
    assert outcome.kind == kind
    assert detail in outcome.detail
    assert (await pool.run("double", 3)).value == 6


async def test_good_calls_among_bombs_all_get_their_values(pool):
    calls = [("spin",) if i % 20 == 7 else ("die",) if i % 20 == 13 else ("double", i) for i in range(100)]
    outcomes = await asyncio.gather(*(pool.run(*call, deadline_s=0.2 if call[0] == "spin" else 30) for call in calls))
    for call, outcome in zip(calls, outcomes, strict=True):
        assert outcome.kind == {"spin": "timeout", "die": "crash", "double": "ok"}[call[0]]
        assert outcome.value == (call[1] * 2 if call[0] == "double" else None)


async def test_the_event_loop_is_never_blocked(pool):
    longest = 0.0

    async def watch():
        nonlocal longest
        while True:
            before = time.thread_time()
            started = time.monotonic()
            await asyncio.sleep(0.002)
            # What the loop's own thread did in this time; waiting for a core on a busy machine is not blocking.
            longest = max(longest, min(time.monotonic() - started, time.thread_time() - before))

    gc.freeze()  # a collection of all that a test run has imported takes as long as a bomb
    watcher = asyncio.create_task(watch())
    await asyncio.gather(
        *(pool.run(what, deadline_s=0.5) for what in ["spin", "power", "memory", "big", "die"] * 2),
        pool.run("double", 1),
    )
    watcher.cancel()
    gc.unfreeze()
    assert longest < 0.25, "a bomb in the loop itself would have held it for 0.5 s"


class Gate:
    """For calls that continue until the gate is opened."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder / "gate")

    async def reached(self, times: int = 1) -> None:
        """So many calls have begun."""
        calls = Path(self.name + ".calls")
        await until(lambda: calls.exists() and len(calls.read_text()) >= times)

    def open(self) -> None:
        Path(self.name).touch()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


async def test_a_dead_zygote_is_replaced_and_no_call_is_lost(pool, gate):
    zygote = (await pool.run("pids")).value[1]
    call = asyncio.create_task(pool.run("open", gate.name, deadline_s=60))
    await gate.reached()
    os.kill(zygote, signal.SIGKILL)
    await gate.reached(times=2)
    gate.open()
    assert (await call).value == "done"
    assert (await pool.run("pids")).value[1] != zygote


async def test_a_worker_that_dies_between_calls_is_replaced(function_file):
    pool = WorkerPool(function_file, "work", workers=1)
    try:
        worker = (await pool.run("pids")).value[0]
        os.kill(worker, signal.SIGKILL)
        await until(lambda: not running([psutil.Process(worker)]))
        await asyncio.sleep(0.02)  # one turn of the event loop, which then sees it
        outcome = await pool.run("pids")
    finally:
        await pool.aclose()
    assert outcome.kind == "ok"
    assert outcome.value[0] != worker


@pytest.mark.parametrize("started", [True, False])
async def test_a_cancelled_call_gives_its_worker_back(function_file, gate, started):
    pool = WorkerPool(function_file, "work", workers=1, deadline_s=3600)
    try:
        await pool.start()
        call = asyncio.create_task(pool.run("open", gate.name))
        await (gate.reached() if started else asyncio.sleep(0))  # else its worker is still to be forked
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await pool.run("double", 4)).value == 8
    finally:
        await pool.aclose()


async def test_workers_are_recycled(function_file):
    pool = WorkerPool(function_file, "work", workers=1, recycle_after=2)
    try:
        pids = [(await pool.run("pids")).value[0] for _ in range(6)]
    finally:
        await pool.aclose()
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


async def test_a_function_that_cannot_be_loaded_says_why(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module\n")
    pool = WorkerPool(file, "work")
    with pytest.raises(
        ServiceError, match=r"broken.py: .* cannot load 'work': ModuleNotFoundError: No module named 'no_such_module'"
    ):
        await pool.start()
    await pool.aclose()


async def test_the_queue_has_an_end(function_file, gate):
    pool = WorkerPool(function_file, "work", workers=1, backlog=2)
    try:
        calls = [asyncio.create_task(pool.run("open", gate.name, deadline_s=60)) for _ in range(3)]
        await gate.reached()
        with pytest.raises(Overloaded, match="2 calls of 'work' are waiting"):
            await pool.run("double", 1)
        gate.open()
        assert [outcome.kind for outcome in await asyncio.gather(*calls)] == ["ok"] * 3
    finally:
        await pool.aclose()


async def test_a_pool_that_closes_leaves_no_process_and_can_be_used_again(pool, gate):
    family = [psutil.Process(pid) for pid in (await pool.run("pids")).value[:2]]
    waiting = asyncio.create_task(pool.run("open", gate.name, deadline_s=60))
    await gate.reached()
    await pool.aclose()
    with pytest.raises(NotReady, match="closing"):
        await waiting
    assert running(family) == []
    assert (await pool.run("double", 5)).value == 10


SERVER = """
import asyncio, sys
from ngym.workers import WorkerPool

async def main():
    pool = WorkerPool(sys.argv[1], "work", workers=2, deadline_s=60)
    print(*(await pool.run("pids")).value[:2], flush=True)
    await asyncio.gather(pool.run("spin"), pool.run("sleep", 60))

asyncio.run(main())
"""


def test_nothing_outlives_a_server_that_is_killed(function_file):
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(function_file)], stdout=subprocess.PIPE, text=True, env=_environment()
    )
    assert server.stdout is not None
    pids = [int(pid) for pid in server.stdout.readline().split()]
    family = psutil.Process(server.pid).children(recursive=True)
    assert set(pids) <= {process.pid for process in family}
    server.kill()
    server.wait()
    server.stdout.close()
    wait_until(lambda: not running(family))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
