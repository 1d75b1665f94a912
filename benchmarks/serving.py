"""How much of a saturated vLLM's speed is left when rollouts are collected through agent, gym server and /verify?

The same single-turn requests, first sent to vLLM's own server (the stock one, same flags), then collected as rollouts. Both
engines are warmed; the ratio of sampled tokens a second is what counts. Rollouts carry the log-probability of every token,
so the stock server is asked for those, too; without them it does less. Needs a policy: `make quickstart` makes one.

    python benchmarks/serving.py [--model runs/quickstart/sft/policy] [--rollouts 512] [--in-flight 64] [--tokens 64]
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from ngym.collect import Limits, Recipe, Rollout, collect
from ngym.config import load_config
from ngym.peers import Peers
from ngym.supervise.sockets import listen
from ngym.supervise.supervisor import Supervisor

CONFIG = """
policy: {{kind: model, app: models/vllm, model: {model}}}
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
    "--logprobs-mode",
    "processed_logprobs",
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


def tasks(count: int, tokens: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        question = f"Tom has {i % 90 + 10} coins and buys {i * 7 % 90 + 10} more. How many coins does Tom have?"
        params = {"input": question, "max_output_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        yield {"responses_create_params": params}


@contextmanager
def stock_server(model: Path) -> Iterator[str]:
    """vLLM's own server, ready; yields its URL."""
    sock = listen("127.0.0.1", 0, "stock vLLM", "")
    port = sock.getsockname()[1]
    sock.close()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        "--model",
        str(model),
        "--served-model-name",
        "policy",
    ]
    process = subprocess.Popen(
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
            if process.poll() is not None:
                raise SystemExit(f"stock vLLM ended with exit code {process.returncode}")
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                continue
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def direct(url: str, rollouts: int, in_flight: int, tokens: int, more: dict[str, Any]) -> float:
    """Sampled tokens per second of the same requests, sent to a vLLM server by our own client."""
    peers, gate = Peers({"policy": [url]}), asyncio.Semaphore(in_flight)
    sampled = 0

    async def one(task: dict[str, Any]) -> None:
        nonlocal sampled
        async with gate:
            body = {**task["responses_create_params"], "model": "policy", **more}
            response = await peers["policy"].post("/v1/responses", body)
            sampled += response["usage"]["output_tokens"]

    started = time.perf_counter()
    await asyncio.gather(*(one(task) for task in tasks(rollouts, tokens)))
    await peers.close()
    return sampled / (time.perf_counter() - started)


async def collected(peers: Peers, rollouts: int, in_flight: int, tokens: int) -> float:
    sampled, started = 0, time.perf_counter()
    async for outcome in collect(
        tasks(rollouts, tokens), peers=peers, recipe=Recipe(agent="env_agent"), limits=Limits(concurrency=in_flight)
    ):
        assert isinstance(outcome, Rollout), outcome
        sampled += outcome.row["response"]["usage"]["output_tokens"]
    return sampled / (time.perf_counter() - started)


async def ours(model: Path, arguments: argparse.Namespace) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "gym_servers").mkdir()
        (root / "gym_servers" / "env.py").write_text(ENV)
        (root / "global_config.yaml").write_text(CONFIG.format(model=model))
        async with Supervisor(load_config([root / "global_config.yaml"])) as stack:
            peers = Peers(stack.urls)
            await collected(peers, arguments.rollouts, arguments.in_flight, arguments.tokens)  # warm-up
            rates = [
                await collected(peers, arguments.rollouts, arguments.in_flight, arguments.tokens) for _ in range(3)
            ]
            await peers.close()
            return rates


async def stock(url: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    size = (arguments.rollouts, arguments.in_flight, arguments.tokens)
    found = {}
    for name, more in (("without logprobs", {}), ("with logprobs", {"include": ["message.output_text.logprobs"]})):
        await direct(url, *size, more)  # warm-up
        found[name] = [await direct(url, *size, more) for _ in range(3)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/sft/policy"))
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    if not arguments.model.is_dir():
        raise SystemExit(f"there is no policy at {arguments.model}; run `make quickstart`, or name one with --model")
    model = arguments.model.resolve()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {arguments.in_flight} in flight")
    with stock_server(model) as url:
        base = asyncio.run(stock(url, arguments))
    rates = asyncio.run(ours(model, arguments))
    print(f"collected as rollouts: {median(rates):.0f} tokens/s (min {min(rates):.0f}, max {max(rates):.0f})")
    for name, direct_rates in base.items():
        middle = median(direct_rates)
        print(f"vLLM's own server, {name}: {middle:.0f} tokens/s; ratio {median(rates) / middle:.2f}")


if __name__ == "__main__":
    main()
