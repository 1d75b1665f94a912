"""Rollouts a second through agent, model server, tools and /verify, and the CPU cost of each hop.

The model answers at once. A rollout of 0, 1 or 10 tool turns is 3, 5 or 23 requests: /run, the model's and the tools',
/verify. They are collected by `ngym.collect` without files (collector.py has those). The baseline, beside it, is the same
requests by the same client between bare uvicorn applications (bare.py); both alternate. All rollouts have the same row, which
both seed once.

    python benchmarks/rollouts.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from types import MappingProxyType

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
    "_ng_task_index": 0,  # without it, each row would be a task of its own, which is seeded
}
FIGURES = ("rollouts_s", "p50_s", "p99_s", "cpu_us_a_hop")
ROUND_S = 1.0
CASES = [Case(0, False), Case(1, False), Case(10, False), Case(1, True), Case(10, True)]


def measure(quick: bool) -> Iterator[Json]:
    levels, cases = ([1, 64, 512], [CASES[1], CASES[-1]]) if quick else ([1, 64, 512, 4096], CASES)
    for case in cases:
        yield from event_loop.run(of_case(case, levels, 1 if quick else 3))


async def of_case(case: Case, levels: list[int], rounds: int) -> list[Json]:
    """The figures at each level. Both sides run all the time, and alternate."""
    async with bare(case, ROW) as base, ours(case) as own:
        for side in (base, own):
            await side.run(0.5, 64)  # warm-up
        return [await at_level(own, base, case, level, rounds) for level in levels]


async def at_level(own: Side, base: Side, case: Case, level: int, rounds: int) -> Json:
    """The median of each figure over the rounds; of a ratio also the least and the most."""
    played: list[tuple[Json, Json]] = []
    for index in range(rounds):
        sides = [own, base] if index % 2 else [base, own]
        found = [await one_round(side, case, level) for side in sides]
        played.append((found[sides.index(own)], found[sides.index(base)]))
    ratios = [ours["rollouts_s"] / bare["rollouts_s"] for ours, bare in played]
    cpu_ratios = [ours["cpu_us_a_hop"] / bare["cpu_us_a_hop"] for ours, bare in played]
    figures = {name: median([ours[name] for ours, _ in played]) for name in FIGURES}
    bare_figures = {f"bare_{name}": median([bare[name] for _, bare in played]) for name in FIGURES}
    used = {name: median([ours["cpu_ms_a_rollout"][name] for ours, _ in played]) for name in ("collector", *own.pids)}
    return {
        "tool_turns": case.tools,
        "token_ids": case.tokens,
        "in_flight": level,
        **figures,
        "cpu_ms_a_rollout": used,
        **bare_figures,
        "rate_of_bare": median(ratios),
        "rate_of_bare_least": min(ratios),
        "rate_of_bare_most": max(ratios),
        "cpu_of_bare": median(cpu_ratios),
    }


async def one_round(side: Side, case: Case, in_flight: int) -> Json:
    pids = {"collector": os.getpid(), **side.pids}
    before = {name: own_cpu_s(pid) for name, pid in pids.items()}
    began = time.perf_counter()
    latencies = sorted(await side.run(ROUND_S, in_flight))
    rate = len(latencies) / (time.perf_counter() - began)
    used = {name: (own_cpu_s(pid) - before[name]) / len(latencies) * 1e3 for name, pid in pids.items()}
    return {
        "rollouts_s": rate,
        "p50_s": latencies[len(latencies) // 2],
        "p99_s": latencies[int(0.99 * len(latencies))],
        "cpu_us_a_hop": 1e3 * sum(used.values()) / case.requests,
        "cpu_ms_a_rollout": used,
    }


def own_cpu_s(pid: int) -> float:
    """Of this process it is its own alone: the services may be its children."""
    return time.process_time() if pid == os.getpid() else cpu_s(pid)


def scripted_config(case: Case, **options: object) -> str:
    """The config of a model that calls the tool so many times, and then answers."""
    call = {"tool_calls": [{"name": "look", "arguments": {"place": "{turn}"}}]}
    replies = [{"turn": case.tools + 1, "text": "4"}, call]
    options_of_stanza = {"replies": replies, "tokens": case.tokens, **options}
    return CONFIG % json.dumps(options_of_stanza)[1:-1]


@asynccontextmanager
async def services(config: str, files: Mapping[str, str] = MappingProxyType({})) -> AsyncIterator[Supervisor]:
    """files: beside the config, by name."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in files.items():
            (root / name).write_text(text)
        (root / "gym_servers").mkdir()
        (root / "gym_servers" / "env.py").write_text(ENV)
        (root / "global_config.yaml").write_text(config)
        async with Supervisor(load_config([root / "global_config.yaml"])) as stack:
            yield stack


@asynccontextmanager
async def ours(case: Case) -> AsyncIterator[Side]:
    async with services(scripted_config(case)) as stack:
        peers = Peers(stack.urls)

        async def run(seconds: float, in_flight: int) -> list[float]:
            return await time_rollouts(peers, case, seconds, in_flight)

        try:
            yield Side(run, {state.name: state.pid for state in stack.states if state.pid})
        finally:
            await peers.close()


async def time_rollouts(peers: Peers, case: Case, seconds: float, in_flight: int) -> list[float]:
    """The seconds that each rollout took."""
    latencies, seeded = [], 0
    ends = time.perf_counter() + seconds

    def rows() -> Iterator[Json]:
        started = 0
        while started < in_flight or time.perf_counter() < ends:
            started += 1
            yield ROW

    async for outcome in collect(
        rows(), peers=peers, recipe=CollectionPlan(agent="env_agent"), limits=CollectionLimits(concurrency=in_flight)
    ):
        assert isinstance(outcome, Rollout) and outcome.row["reward"] == 1.0, outcome
        record = outcome.row["ng"]
        assert record["tool_calls"] == case.tools and bool(record["segments"]) == case.tokens, record
        seeded += any(name == "seed" for name, *_ in record["spans"])
        latencies.append(record["timings"]["queue_s"] + record["timings"]["total_s"])
    assert seeded <= in_flight, f"{seeded} of {len(latencies)} rollouts called /seed_session"
    return latencies


if __name__ == "__main__":
    play(__doc__, measure)
