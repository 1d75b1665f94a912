"""Growth of memory and files over hours: rollouts at an even rate, and callers that hang up or never return.

A rollout is ten tool turns over two replicas of `counter`, through `agents/simple` and a scripted model. Of eleven callers one
hangs up in the middle of its rollout, and one seeds a session and never comes back: that ends after an hour, so what the services
hold levels out then. A row each minute: resident set and open files of every process; the last one is the line through the second
half of the rows, in MB an hour with its standard error. Not a part of `make bench`: its arguments set the duration.

    python benchmarks/growth.py [--hours 2] [--rate 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import numpy as np
import psutil
from parts import format_figure

from ngym.config.service_config import load_config
from ngym.errors import ServiceError
from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.schema import Json
from ngym.supervise.supervisor import Supervisor

TURNS = 10
OF_CALLERS = 11
ADD = {"tool_calls": [{"name": "add", "arguments": {"amount": 1}}]}
CONFIG = {
    "policy": {
        "kind": "model",
        "app": "models/scripted",
        "replies": [{"turn": TURNS + 1, "text": "done"}, ADD],
        "latency_s": 0.05,
    },
    "counter": {"kind": "gym_server", "app": "gym_servers/counter", "replicas": 2},
    "counter_agent": {"kind": "agent", "app": "agents/simple", "gym": "counter", "model": "policy"},
    "ngym": {"head": {"port": 0}},
}


async def watch_memory(hours: float, rate: float, every_s: float) -> AsyncIterator[Json]:
    """A row each `every_s`, and the lines through them."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "global_config.yaml")
        config.write_text(json.dumps(CONFIG))
        async with Supervisor(load_config([config])) as stack:
            peers, answers = Peers(stack.urls), Counter[str]()
            pids = {"caller": os.getpid()} | {state.label: state.pid for state in stack.states if state.pid}
            calling = asyncio.create_task(call(peers, rate, answers))
            rows, ends = [], time.monotonic() + hours * 3600
            while time.monotonic() < ends and not calling.done():
                await asyncio.sleep(every_s)
                rows.append(row := sample_processes(pids) | {"answers": dict(answers)})
                yield row
            calling.cancel()
            yield {"mb_an_hour": {name: slope(rows[len(rows) // 2 :], name) for name in pids}}
            await asyncio.gather(calling, return_exceptions=True)
            await peers.close()


async def call(peers: Peers, rate: float, answers: Counter[str]) -> None:
    """Begin so many a second, whatever becomes of the earlier ones."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        number = 0
        while True:
            kind = (hang_up, abandon, *[rollout] * (OF_CALLERS - 2))[number % OF_CALLERS]
            group.create_task(count_outcome(kind(peers), kind.__name__, answers))
            number += 1
            await asyncio.sleep(began + number / rate - time.monotonic())


async def count_outcome(work: Awaitable[str], kind: str, answers: Counter[str]) -> None:
    try:
        outcome = await work
    except (ServiceError, OSError, AssertionError) as error:
        outcome = repr(error)[:200]
    answers[f"{kind}: {outcome}"] += 1


def row(target: int) -> Json:
    return {"responses_create_params": {"input": "count"}, "target": target, "nonce": secrets.token_hex(8)}


async def rollout(peers: Peers) -> str:
    result = await peers["counter_agent"].post("/run", row(TURNS))
    assert result["reward"] == 1.0, result
    return "reward 1"


async def hang_up(peers: Peers) -> str:
    try:
        async with asyncio.timeout(0.3):
            await peers["counter_agent"].post("/run", row(TURNS))
    except TimeoutError:
        return "gone"
    return "came too early"


async def abandon(peers: Peers) -> str:
    session = peers["counter"].session()
    await session.post("/seed_session", row(TURNS), idempotent=True)
    await session.post("/add", {"amount": 1})
    return "left"


def sample_processes(pids: dict[str, int]) -> Json:
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    return {
        "minutes": (time.time() - processes["caller"].create_time()) / 60,
        "rss_mb": {name: each.memory_info().rss / 1e6 for name, each in processes.items()},
        "files": {name: each.num_fds() for name, each in processes.items()},
    }


def slope(rows: list[Json], name: str) -> dict[str, float]:
    """MB an hour, and the standard error of that."""
    if len(rows) < 4:
        return {}
    hours = np.array([row["minutes"] / 60 for row in rows])
    (line, _), covariance = np.polyfit(hours, [row["rss_mb"][name] for row in rows], 1, cov=True)
    return {"grows": float(line), "error": float(covariance[0, 0] ** 0.5)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=15.0, help="callers a second  [default: 15]")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two rows  [default: 60]")
    parser.add_argument("--json", type=Path, help="where the rows go, too")
    options = parser.parse_args()
    rows = []
    async for row in watch_memory(options.hours, options.rate, options.every):
        print("  " + "  ".join(f"{name} {format_figure(value)}" for name, value in row.items()), flush=True)
        rows.append(row)
        if options.json:
            options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    event_loop.run(main())
