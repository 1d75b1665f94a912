"""How many single-turn rollouts a second go through agent, model server and /verify, and what does each hop cost?

Each rollout is four requests: /run, /seed_session, /v1/responses, /verify; the model answers at once. They are collected by
`ngym.collect` without files (benchmarks/collector.py has those). The baseline, in turn with it, is the same four requests between bare
uvicorn applications, with a bare aiohttp client in the agent: no framework, no checks, no records.

    python benchmarks/rollouts.py [--rollouts 4000] [--in-flight 64 512 4096] [--rounds 1]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import psutil
import uvicorn
import uvloop

from ngym import process
from ngym.collect import Limits, Recipe, Rollout, collect
from ngym.config import load_config
from ngym.peers import Peers
from ngym.supervise.supervisor import Supervisor

CONFIG = """
policy: {kind: model, app: models/scripted}
env: {kind: gym_server, app: gym_servers/env}
env_agent: {kind: agent, app: agents/simple, gym: env, model: policy}
ngym: {head: {port: 0}}
"""
ENV = '''"""env: reward 1 when the model said anything."""
from ngym import VerifyRequest, gym_server


class Task(VerifyRequest):
    expected_answer: str


async def verify(task: Task) -> float:
    return float(bool(task.text))


app = gym_server(verify=verify)
'''
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 2 + 2? " * 20}]},
    "expected_answer": "4",
}
RESPONSE = {
    "id": "resp_0",
    "object": "response",
    "status": "completed",
    "output": [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4", "annotations": []}]}
    ],
    "usage": {"input_tokens": 100, "output_tokens": 1, "total_tokens": 101},
}


class Load(NamedTuple):
    """One way to run `rollouts` at most `in_flight` at a time; returns the seconds that each took."""

    name: str
    run: Callable[[int, int], Awaitable[list[float]]]
    pids: dict[str, int]


def cpu_seconds(pids: dict[str, int]) -> dict[str, float]:
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


async def measure(load: Load, rollouts: int, levels: list[int]) -> dict[int, float]:
    """Rollouts a second at each level."""
    print(load.name)
    await load.run(500, 64)  # warm-up
    rates = {}
    pids = {"collector": os.getpid(), **load.pids}
    for in_flight in levels:
        n = max(rollouts, 4 * in_flight)  # so that opening the connections is not what is measured
        before, started = cpu_seconds(pids), time.perf_counter()
        seconds = sorted(await load.run(n, in_flight))
        rates[in_flight] = n / (time.perf_counter() - started)
        used = {name: (after - before[name]) / n * 1e3 for name, after in cpu_seconds(pids).items()}
        each = ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in used.items())
        print(
            f"  {in_flight:>5} in flight: {rates[in_flight]:7.0f} rollouts/s, p99 {seconds[int(0.99 * n)]:.2f} s; "
            f"CPU ms a rollout: {sum(used.values()):.2f} ({each})",
            flush=True,
        )
    return rates


async def ours(rollouts: int, levels: list[int]) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "gym_servers").mkdir()
        (root / "gym_servers" / "env.py").write_text(ENV)
        (root / "global_config.yaml").write_text(CONFIG)
        async with Supervisor(load_config([root / "global_config.yaml"])) as stack:
            peers = Peers(stack.urls)

            async def run(rollouts: int, in_flight: int) -> list[float]:
                seconds = []
                limits = Limits(concurrency=in_flight)
                tasks = (ROW for _ in range(rollouts))
                async for outcome in collect(tasks, peers=peers, recipe=Recipe(agent="env_agent"), limits=limits):
                    assert isinstance(outcome, Rollout) and outcome.row["reward"] == 1.0, outcome
                    timings = outcome.row["ng"]["timings"]
                    seconds.append(timings["queue_s"] + timings["total_s"])
                assert len(seconds) == rollouts
                return seconds

            pids = {state.name: state.pid for state in stack.states if state.pid}
            try:
                return await measure(
                    Load("ngym (services: agent, model server, gym server)", run, pids), rollouts, levels
                )
            finally:
                await peers.close()


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def reply(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


def bare(kind: str, listener: socket.socket, urls: dict[str, str]) -> None:
    """One bare service: parses and dumps the same JSON, does nothing else."""
    client: list[aiohttp.ClientSession] = []

    async def call(url: str, body: Any) -> Any:
        async with client[0].post(url, data=orjson.dumps(body)) as response:
            return orjson.loads(await response.read())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = orjson.loads(await read(receive))
        if kind == "agent":
            if not client:
                client.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            await call(urls["gym"] + "/seed_session", body)
            response = await call(urls["model"] + "/v1/responses", body["responses_create_params"])
            body = await call(urls["gym"] + "/verify", {**body, "response": response})
        elif kind == "model":
            body = RESPONSE
        else:
            body["reward"] = 1.0
        await reply(send, orjson.dumps(body))

    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        http="httptools",
        loop="none",
        timeout_keep_alive=75,  # above what a client keeps a connection for
        backlog=4096,
    )
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


async def baseline(rollouts: int, levels: list[int]) -> dict[int, float]:
    listeners = {}
    for name in ("agent", "model", "gym"):
        listeners[name] = socket.create_server(("127.0.0.1", 0), backlog=4096)
    urls = {name: f"http://127.0.0.1:{listener.getsockname()[1]}" for name, listener in listeners.items()}
    context = multiprocessing.get_context("fork")
    services = {
        name: context.Process(target=bare, args=(name, listener, urls), daemon=True)
        for name, listener in listeners.items()
    }
    for service in services.values():
        service.start()
    peers = Peers({"agent": [urls["agent"]]})

    async def run(rollouts: int, in_flight: int) -> list[float]:
        gate, seconds = asyncio.Semaphore(in_flight), []

        async def one() -> None:
            async with gate:
                started = time.perf_counter()
                row = await peers["agent"].post("/run", ROW)
                seconds.append(time.perf_counter() - started)
                assert row["reward"] == 1.0, row

        await asyncio.gather(*(one() for _ in range(rollouts)))
        return seconds

    pids = {name: service.pid or 0 for name, service in services.items()}
    try:
        return await measure(Load("bare uvicorn + aiohttp, the same four requests", run, pids), rollouts, levels)
    finally:
        await peers.close()
        for service in services.values():
            service.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for _ in range(arguments.rounds):
        base = uvloop.run(baseline(arguments.rollouts, arguments.in_flight))
        rates = process.run(ours(arguments.rollouts, arguments.in_flight))
        for in_flight, rate in rates.items():
            print(f"{in_flight:>5} in flight: {rate:.0f}/s = {rate / base[in_flight]:.2f} of bare uvicorn + aiohttp")


if __name__ == "__main__":
    main()
