"""The share of a saturated vLLM's speed that is left when rollouts are collected through agent, gym server and /verify.

The same single-turn requests, sent to vLLM's own server (the stock one), with and without asking for log-probabilities,
and collected as rollouts, which carry the id and the log-probability of every token. Both servers run all the time and
take turns, so that what else the machine does meets both; what counts is the ratio within a round. CPU seconds are those of
all processes of a side, with the one that asks. Needs a policy: `make quickstart` makes one.

    python benchmarks/serving.py [--model runs/quickstart/sft/policy] [--in-flight 64 128 256] [--tokens 64] [--rounds 9]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import psutil

from ngym.collect import CollectionLimits, CollectionPlan, Rollout, collect
from ngym.config.service_config import load_config
from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.supervise.service import listen
from ngym.supervise.supervisor import Supervisor

CONFIG = """
policy: {{kind: model, app: models/vllm, model: {model}, bundle_tokens: true}}
env: {{kind: gym_server, app: gym_servers/env}}
env_agent: {{kind: agent, app: agents/simple, gym: env, model: policy}}
ngym: {{head: {{port: 0}}}}
"""
ENV = '''"""env: reward 1 when the model said anything."""
from ngym import VerifyRequest, gym_server


async def verify(task: VerifyRequest) -> float:
    return float(bool(task.text))


app = gym_server(verify=verify)
'''
STOCK = [
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    "67108864",
    "--no-enable-chunked-prefill",
    "--dtype",
    "float32",
    "--generation-config",
    "vllm",
    "--disable-log-stats",
]
STOCK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
}


LOGPROBS = {"include": ["message.output_text.logprobs"]}


@dataclass
class Side:
    """One way to have the requests answered. ask: (rollouts, in flight) -> sampled tokens; pids: its processes."""

    name: str
    ask: Callable[[int, int], Awaitable[int]]
    pids: list[int]


class Round(NamedTuple):
    """tokens a second, and CPU milliseconds per 1,000 tokens: of the model server, of its engine, and of all processes."""

    rate: float
    server: float
    engine: float
    cpu: float


def tasks(count: int, tokens: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        question = f"Tom has {i % 90 + 10} coins and buys {i * 7 % 90 + 10} more. How many coins does Tom have?"
        params = {"input": question, "max_output_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        yield {"responses_create_params": params}


@contextmanager
def stock_server(model: Path) -> Iterator[tuple[str, int]]:
    """vLLM's own server, ready; its URL and its pid."""
    sock = listen("127.0.0.1", 0, "stock vLLM", "")
    port = sock.getsockname()[1]
    sock.close()
    module = "vllm.entrypoints.launchers.api_server.entry"
    command = [sys.executable, "-m", module, "--model", str(model), "--served-model-name", "policy"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), *STOCK],
        env={**os.environ, **STOCK_ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            time.sleep(0.5)
            if server.poll() is not None:
                raise SystemExit(f"stock vLLM ended with exit code {server.returncode}")
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                continue
        yield url, server.pid
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@asynccontextmanager
async def stack(model: Path) -> AsyncIterator[Supervisor]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "gym_servers").mkdir()
        (root / "gym_servers" / "env.py").write_text(ENV)
        (root / "global_config.yaml").write_text(CONFIG.format(model=model))
        async with Supervisor(load_config([root / "global_config.yaml"])) as running:
            yield running


async def direct(peers: Peers, rollouts: int, in_flight: int, tokens: int, more: dict[str, Any]) -> int:
    """Sampled tokens of the same requests, sent to a vLLM server by our own client."""
    gate = asyncio.Semaphore(in_flight)

    async def one(task: dict[str, Any]) -> int:
        async with gate:
            body = {**task["responses_create_params"], "model": "policy", **more}
            response = await peers["stock"].post("/v1/responses", body)
            return int(response["usage"]["output_tokens"])

    return sum(await asyncio.gather(*(one(task) for task in tasks(rollouts, tokens))))


async def count_sampled_tokens(peers: Peers, rollouts: int, in_flight: int, tokens: int) -> int:
    sampled = 0
    async for outcome in collect(
        tasks(rollouts, tokens),
        peers=peers,
        recipe=CollectionPlan(agent="env_agent"),
        limits=CollectionLimits(concurrency=in_flight),
    ):
        assert isinstance(outcome, Rollout), outcome
        assert len(outcome.row["response"]["output"]) == 1
        [segment] = outcome.row["ng"]["segments"]
        sampled += len(segment["logprobs"])
    return sampled


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    """Of these processes and their children."""
    family = [one for pid in pids for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    return {one.pid: sum(one.cpu_times()[:2]) for one in family}


async def play(side: Side, rollouts: int, in_flight: int) -> Round:
    before, own, started = cpu_seconds(side.pids), time.process_time(), time.perf_counter()
    thousands = await side.ask(rollouts, in_flight) / 1000
    seconds = time.perf_counter() - started
    used = {pid: (now - before.get(pid, 0.0)) / thousands * 1e3 for pid, now in cpu_seconds(side.pids).items()}
    own = (time.process_time() - own) / thousands * 1e3
    server = used[side.pids[0]]
    engine = max(used[child.pid] for child in psutil.Process(side.pids[0]).children())
    return Round(thousands * 1000 / seconds, server, engine, sum(used.values()) + own)


async def compare(sides: list[Side], arguments: argparse.Namespace, in_flight: int) -> None:
    rollouts = max(arguments.rollouts, 2 * in_flight)
    for side in sides:
        await play(side, rollouts, in_flight)  # warm-up
    rounds: dict[str, list[Round]] = {side.name: [] for side in sides}
    for number in range(arguments.rounds):
        for place in range(len(sides)):  # the first side of one round is the last of the next
            side = sides[(number + place) % len(sides)]
            rounds[side.name].append(await play(side, rollouts, in_flight))
    print(f"{in_flight} in flight, {arguments.rounds} rounds of {rollouts} rollouts, load {os.getloadavg()[0]:.1f}")
    ours = rounds[sides[0].name]
    for name, played in rounds.items():
        rate, server, engine, cpu = (median(column) for column in zip(*played, strict=True))
        faster = [our.rate / its.rate for our, its in zip(ours, played, strict=True)]
        cheaper = median(its.cpu / our.cpu for our, its in zip(ours, played, strict=True))
        print(
            f"  {name:26}{rate:7.0f} tokens/s; CPU ms per 1,000: all {cpu:.0f}, server {server:.0f}, engine {engine:.0f}"
        )
        if played is not ours:
            spread = f"({min(faster):.2f} to {max(faster):.2f})"
            print(
                f"{'':28}collected / this: tokens/s {median(faster):.2f} {spread}, tokens per CPU second {cheaper:.2f}"
            )


async def measure(arguments: argparse.Namespace) -> None:
    model, tokens = arguments.model.resolve(), arguments.tokens
    with stock_server(model) as (url, pid):
        async with stack(model) as running:
            stock, ours = Peers({"stock": [url]}), Peers(running.urls)
            states = sorted(running.states, key=lambda state: state.name != "policy")
            pids = [state.pid for state in states if state.pid]
            sides = [
                Side("collected as rollouts", lambda n, k: count_sampled_tokens(ours, n, k, tokens), pids),
                Side("vLLM's own, with logprobs", lambda n, k: direct(stock, n, k, tokens, LOGPROBS), [pid]),
                Side("vLLM's own, without", lambda n, k: direct(stock, n, k, tokens, {}), [pid]),
            ]
            for in_flight in arguments.in_flight:
                await compare(sides, arguments, in_flight)
            await stock.close()
            await ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/sft/policy"))
    parser.add_argument("--rollouts", type=int, default=256, help="a round, at least; and twice those in flight")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if not arguments.model.is_dir():
        raise SystemExit(f"there is no policy at {arguments.model}; run `make quickstart`, or name one with --model")
    print(f"{os.cpu_count()} cores; {arguments.tokens} tokens each")
    event_loop.run(measure(arguments))


if __name__ == "__main__":
    main()
