"""Services that are killed or restarted one after another during a run, and the memory of a long run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import yaml
from counting import TASK, config
from waiting import until

from ngym.collect import CollectionLimits, CollectionPlan, FailedAttempt, Rollout, collect
from ngym.config.service_config import load_config
from ngym.peers import Peers
from ngym.supervise.supervisor import Supervisor

SERVICES = ("policy", "counter", "counter_agent")
PATIENCE_S = 3000.0
TYPED = {"connect", "model_error", "tool_error", "agent_error", "verify_error", "config"}


class Stack(NamedTuple):
    supervisor: Supervisor
    peers: Peers

    def pid(self, name: str) -> int:
        """Of a service that is ready; 0 while it is not: who dies often without having been ready is given up."""
        (state,) = (state for state in self.supervisor.states if state.name == name)
        return state.pid or 0 if state.status == "ready" else 0


@asynccontextmanager
async def running(folder: Path, latency_s: float = 0.0) -> AsyncIterator[Stack]:
    file = folder / "global_config.yaml"
    file.write_text(yaml.safe_dump({**config(latency_s), "ngym": {"head": {"port": 0}}}))
    async with Supervisor(load_config([file])) as supervisor:
        peers = Peers(supervisor.urls, supervisor.head_url)
        try:
            yield Stack(supervisor, peers)
        finally:
            await peers.close()


class Done:
    """The results of a run so far."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.failed: list[FailedAttempt] = []

    async def collect(self, stack: Stack, count: int, concurrency: int = 32) -> None:
        limits = CollectionLimits(
            concurrency=concurrency, timeout_s=600, max_attempts=5, retry_s=(0.1, 1.0), poll_s=0.1
        )
        tasks = ({**TASK, "number": number} for number in range(count))
        async for outcome in collect(
            tasks, peers=stack.peers, recipe=CollectionPlan(agent="counter_agent"), limits=limits
        ):
            (self.rollouts if isinstance(outcome, Rollout) else self.failed).append(outcome)  # type: ignore[arg-type]

    def check(self, count: int) -> None:
        assert not [one.failure for one in self.failed if one.final]
        assert len({one.key for one in self.rollouts}) == len(self.rollouts) == count
        assert {one.row["reward"] for one in self.rollouts} == {1.0}, "a failure became a reward, or a tool ran twice"
        assert {one.failure["class"] for one in self.failed} <= TYPED


async def end(stack: Stack, name: str, run: asyncio.Task[None], done: Done, how: signal.Signals, more: int) -> None:
    """End this service's process, wait until another runs, and until so many more rollouts are done."""
    await until(lambda: stack.pid(name))
    old = stack.pid(name)
    os.kill(old, how)
    await until(lambda: stack.pid(name) not in (0, old))
    enough = len(done.rollouts) + more
    await until(lambda: len(done.rollouts) >= enough or run.done())


@pytest.mark.parametrize(
    ("count", "kills", "between"),
    [(300, 1, 10), pytest.param(2000, 10, 30, marks=pytest.mark.soak)],
)
async def test_each_kind_of_service_may_be_killed_and_the_run_is_complete(
    tmp_path: Path, count: int, kills: int, between: int
) -> None:
    done = Done()
    async with asyncio.timeout(PATIENCE_S), running(tmp_path, latency_s=0.02) as stack:
        run = asyncio.create_task(done.collect(stack, count))
        await until(lambda: done.rollouts or run.done())
        for _ in range(kills):
            for name in SERVICES:
                assert not run.done(), (
                    "the run was over before everything had been killed: it should have more rollouts"
                )
                await end(stack, name, run, done, signal.SIGKILL, between)
        await run
    done.check(count)


@pytest.mark.soak
async def test_services_may_be_restarted_one_after_another_for_as_long_as_a_run_lasts(tmp_path: Path) -> None:
    count, done, restarts = 5000, Done(), 0
    async with asyncio.timeout(PATIENCE_S), running(tmp_path, latency_s=0.02) as stack:
        run = asyncio.create_task(done.collect(stack, count))
        await until(lambda: done.rollouts or run.done())
        while len(done.rollouts) < count - 300 and not run.done():
            await end(stack, SERVICES[restarts % len(SERVICES)], run, done, signal.SIGTERM, 100)
            restarts += 1
        await run
    assert restarts >= 6
    done.check(count)


@pytest.mark.soak
async def test_over_twenty_thousand_rollouts_neither_memory_nor_files_grow(tmp_path: Path) -> None:
    """The first rollouts fill what is bounded: kept answers, stored responses (20,000: four a rollout), the allocator's own."""
    half, allowed_bytes, spare_files = 10_000, 12 << 20, 8
    async with asyncio.timeout(PATIENCE_S), running(tmp_path) as stack:
        sizes: list[dict[str, int]] = []
        files: list[dict[str, int]] = []
        for _ in range(3):
            done = Done()
            await done.collect(stack, half)
            done.check(half)
            processes = {name: psutil.Process(stack.pid(name)) for name in SERVICES}
            sizes.append({name: process.memory_info().rss for name, process in processes.items()})
            files.append({name: process.num_fds() for name, process in processes.items()})
    for name in SERVICES:
        assert sizes[2][name] - sizes[1][name] < allowed_bytes, (name, sizes)
        assert files[2][name] <= files[1][name] + spare_files, (name, files)
