"""How many single-turn rollouts a second go through agent, model server and /verify, and what does each hop cost?

Each rollout is four requests: /run, /seed_session, /v1/responses, /verify; the model answers at once. The baseline, in the same
run, is the same four requests between bare uvicorn applications and a bare aiohttp client: no framework, no checks, no records.

    python benchmarks/rollouts.py [--rollouts 4000] [--in-flight 64 512 4096]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import psutil
import uvloop

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


async def load(peers: Peers, agent: str, rollouts: int, in_flight: int) -> tuple[float, float, float]:
    """Rollouts per second, this process's CPU ms per rollout, p99 seconds."""
    gate = asyncio.Semaphore(in_flight)
    seconds: list[float] = []

    async def one() -> None:
        async with gate:
            started = time.perf_counter()
            row = await peers[agent].post("/run", ROW)
            seconds.append(time.perf_counter() - started)
            assert row["reward"] == 1.0, row

    cpu, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(rollouts)))
    wall = time.perf_counter() - started
    seconds.sort()
    return rollouts / wall, (time.process_time() - cpu) / rollouts * 1e3, seconds[int(0.99 * len(seconds))]


def cpu_seconds(pids: dict[str, int]) -> dict[str, float]:
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


async def measure(peers: Peers, agent: str, pids: dict[str, int], rollouts: int, levels: list[int]) -> dict[int, float]:
    rates = {}
    await load(peers, agent, 500, 64)  # warm-up
    for in_flight in levels:
        n = max(rollouts, 4 * in_flight)  # so that opening the connections is not what is measured
        before = cpu_seconds(pids)
        rate, own, p99 = await load(peers, agent, n, in_flight)
        after = cpu_seconds(pids)
        hops = ", ".join(f"{name} {(after[name] - before[name]) / n * 1e3:.2f}" for name in pids)
        print(
            f"  {in_flight:>5} in flight: {rate:7.0f} rollouts/s, p99 {p99:.2f} s; CPU ms a rollout: client {own:.2f}, {hops}"
        )
        rates[in_flight] = rate
    return rates


async def ours(rollouts: int, levels: list[int]) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "gym_servers").mkdir()
        (root / "gym_servers" / "env.py").write_text(ENV)
        (root / "global_config.yaml").write_text(CONFIG)
        async with Supervisor(load_config([root / "global_config.yaml"])) as stack:
            peers = Peers(stack.urls)
            pids = {state.name: state.pid for state in stack.states if state.pid}
            print("ngym (services: agent, model server, gym server)")
            try:
                return await measure(peers, "env_agent", pids, rollouts, levels)
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
    import aiohttp
    import uvicorn

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
        app, lifespan="off", ws="none", log_config=None, access_log=False, http="httptools", loop="none"
    )
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


async def baseline(rollouts: int, levels: list[int]) -> dict[int, float]:
    listeners = {}
    for name in ("agent", "model", "gym"):
        listeners[name] = socket.create_server(("127.0.0.1", 0), backlog=4096)
    urls = {name: f"http://127.0.0.1:{listener.getsockname()[1]}" for name, listener in listeners.items()}
    context = multiprocessing.get_context("fork")
    processes = {
        name: context.Process(target=bare, args=(name, listener, urls), daemon=True)
        for name, listener in listeners.items()
    }
    for process in processes.values():
        process.start()
    peers = Peers({"agent": [urls["agent"]]})
    print("bare uvicorn + aiohttp, the same four requests")
    try:
        return await measure(
            peers, "agent", {name: process.pid or 0 for name, process in processes.items()}, rollouts, levels
        )
    finally:
        await peers.close()
        for process in processes.values():
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512, 4096])
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    base = asyncio.run(baseline(arguments.rollouts, arguments.in_flight))
    rates = uvloop.run(ours(arguments.rollouts, arguments.in_flight))
    for in_flight, rate in rates.items():
        print(f"{in_flight:>5} in flight: {rate:.0f}/s = {rate / base[in_flight]:.2f} of bare uvicorn + aiohttp")


if __name__ == "__main__":
    main()
