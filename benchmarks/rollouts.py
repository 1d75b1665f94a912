"""Rollouts a second through agent, model server, tools and /verify, and the CPU cost of each hop.

The model answers at once. A rollout of 0, 1 or 10 tool turns is 4, 6 or 24 requests: /run, /seed_session, the model's and the
tools', /verify. They are collected by `ngym.collect` without files (collector.py has those). The baseline, beside it, is the same
requests between bare uvicorn applications (bare.py).

    python benchmarks/rollouts.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from bare import Case, Side, bare
from parts import cpu_s, play

from ngym.collect import CollectionLimits, CollectionPlan, Rollout, collect
from ngym.config.service_config import load_config
from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.schema import Json
from ngym.supervise.supervisor import Supervisor

CONFIG = """
policy: {kind: model, app: models/scripted, %s}
env: {kind: gym_server, app: gym_servers/env}
env_agent: {kind: agent, app: agents/simple, gym: env, model: policy}
ngym: {head: {port: 0}}
"""
ENV = '''"""env: a tool that looks, and reward 1 when the model said anything."""
from pydantic import BaseModel

from ngym import VerifyRequest, gym_server


class Look(BaseModel):
    place: str


class Task(VerifyRequest):
    expected_answer: str


async def look(body: Look) -> dict[str, str]:
    """Look at a place."""
    return {"seen": f"nothing at {body.place}"}


async def verify(task: Task) -> float:
    return float(bool(task.text))


app = gym_server(verify=verify, tools=[look])
'''
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 2 + 2? " * 20}]},
    "expected_answer": "4",
}
CASES = [Case(0, False), Case(1, False), Case(10, False), Case(1, True), Case(10, True)]


def measure(quick: bool) -> Iterator[Json]:
    levels, cases = ([1, 64, 512], [CASES[1], CASES[-1]]) if quick else ([1, 64, 512, 4096], CASES)
    for case in cases:
        sides = {"bare": bare(case, ROW), "ngym": ours(case)}
        found = {name: event_loop.run(of_side(side, case, levels, quick)) for name, side in sides.items()}
        for at, level in enumerate(levels):
            own, base = found["ngym"][at], found["bare"][at]
            yield {
                "tool_turns": case.tools,
                "token_ids": case.tokens,
                "in_flight": level,
                **own,
                "bare_rollouts_s": base["rollouts_s"],
                "bare_p99_s": base["p99_s"],
                "bare_cpu_us_a_hop": base["cpu_us_a_hop"],
                "rate_of_bare": own["rollouts_s"] / base["rollouts_s"],
                "cpu_of_bare": own["cpu_us_a_hop"] / base["cpu_us_a_hop"],
            }


async def of_side(opening: AbstractAsyncContextManager[Side], case: Case, levels: list[int], quick: bool) -> list[Json]:
    """Its figures at each level."""
    async with opening as side:
        await side.run(0.5, 64)  # warm-up
        return [await at_level(side, case, level, 1.0 if quick else 3.0) for level in levels]


async def at_level(side: Side, case: Case, in_flight: int, seconds: float) -> Json:
    pids = {"collector": os.getpid(), **side.pids}
    before = {name: own_cpu_s(pid) for name, pid in pids.items()}
    began = time.perf_counter()
    taken = sorted(await side.run(seconds, in_flight))
    rate = len(taken) / (time.perf_counter() - began)
    used = {name: (own_cpu_s(pid) - before[name]) / len(taken) * 1e3 for name, pid in pids.items()}
    return {
        "rollouts_s": rate,
        "p50_s": taken[len(taken) // 2],
        "p99_s": taken[int(0.99 * len(taken))],
        "cpu_us_a_hop": 1e3 * sum(used.values()) / case.requests,
        "cpu_ms_a_rollout": used,
    }


def own_cpu_s(pid: int) -> float:
    """Of this process it is its own alone: the services may be its children."""
    return time.process_time() if pid == os.getpid() else cpu_s(pid)


def scripted(case: Case, **options: object) -> str:
    """The config of a model that calls the tool so many times, and then answers."""
    call = {"tool_calls": [{"name": "look", "arguments": {"place": "{turn}"}}]}
    replies = [{"turn": case.tools + 1, "text": "4"}, call]
    given = {"replies": replies, "tokens": case.tokens, **options}
    return CONFIG % json.dumps(given)[1:-1]


@asynccontextmanager
async def services(config: str) -> AsyncIterator[Supervisor]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "gym_servers").mkdir()
        (root / "gym_servers" / "env.py").write_text(ENV)
        (root / "global_config.yaml").write_text(config)
        async with Supervisor(load_config([root / "global_config.yaml"])) as stack:
            yield stack


@asynccontextmanager
async def ours(case: Case) -> AsyncIterator[Side]:
    async with services(scripted(case)) as stack:
        peers = Peers(stack.urls)

        async def run(seconds: float, in_flight: int) -> list[float]:
            return await collected(peers, case, seconds, in_flight)

        try:
            yield Side(run, {state.name: state.pid for state in stack.states if state.pid})
        finally:
            await peers.close()


async def collected(peers: Peers, case: Case, seconds: float, in_flight: int) -> list[float]:
    """The seconds that each rollout took."""
    taken = []
    ends = time.perf_counter() + seconds

    def rows() -> Iterator[Json]:
        begun = 0
        while begun < in_flight or time.perf_counter() < ends:
            begun += 1
            yield ROW

    async for outcome in collect(
        rows(), peers=peers, recipe=CollectionPlan(agent="env_agent"), limits=CollectionLimits(concurrency=in_flight)
    ):
        assert isinstance(outcome, Rollout) and outcome.row["reward"] == 1.0, outcome
        record = outcome.row["ng"]
        assert record["tool_calls"] == case.tools and bool(record["segments"]) == case.tokens, record
        taken.append(record["timings"]["queue_s"] + record["timings"]["total_s"])
    return taken


if __name__ == "__main__":
    play(__doc__, measure)
