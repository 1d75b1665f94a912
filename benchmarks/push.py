"""The time of a weight push by model size: to a running vLLM over HTTP, committed and proven.

In float32 and bfloat16 every tensor, and with the transport `delta` the values in bfloat16 that changed. Before each push
every weight moves by up to 1e-6, as by a step of AdamW at that rate; nothing is generated meanwhile. And the start of the
model server, from the command to ready.

    python benchmarks/push.py [--quick] [--json FILE]
    python benchmarks/push.py --line 100mbit [--quick]

With --line, the trainer pushes in bfloat16 to another machine over a line of this rate, as tc writes it; first the seconds of
a plain copy of the checkpoint's bytes. The machines are Linux namespaces (tests/support/machines.py), which need root.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from parts import play
from torch import Tensor
from torch.func import functional_call
from training import MIDDLE, TINY
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from machines import Machine, kill, machines

from ngym.config.service_config import load_config
from ngym.runtime import event_loop
from ngym.schema import Json
from ngym.supervise.supervisor import Supervisor
from ngym.trainer.weights.push import Pusher
from ngym.trainer.weights.push_files import checkpoint
from ngym.trainer.weights.replica import LogprobProof
from trainer import SMALL, new_model

CONFIG = """
policy: {kind: model, app: models/vllm, model: model}
ngym: {head: {port: 0}}
"""
WAYS = [(torch.float32, "http"), (torch.bfloat16, "http"), (torch.bfloat16, "delta")]
PORT = 8000
TOKENS = {"NGYM_TOKEN": "the-token-of-this-run", "NGYM_ADMIN_TOKEN": "the-token-of-its-admin"}
RECEIVE = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
print("listens", flush=True)
connection = listener.accept()[0]
while connection.recv(1 << 20):
    pass
"""  # its socket closes when all has been received
SEND = """
import socket, sys, time
content = bytes(int(sys.argv[3]))
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
began = time.perf_counter()
connection.sendall(content)
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.perf_counter() - began)
"""
LEARNING_RATE = 1e-6
PROMPT = [1, 40, 41, 42, 2, 1, 77, 90, 50, 60, 61, 62, 63]


def measure(quick: bool) -> Iterator[Json]:
    if importlib.util.find_spec("vllm") is None:
        return
    for shape in [TINY] if quick else [TINY, MIDDLE, SMALL]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            new_model(root / "model", shape)
            (root / "global_config.yaml").write_text(CONFIG)
            yield from event_loop.run(measure_pushes(root, 3 if quick else 7))


async def measure_pushes(root: Path, pushes: int) -> list[Json]:
    began = time.perf_counter()
    async with Supervisor(load_config([root / "global_config.yaml"])) as stack:
        ready = {"vllm_ready_s": time.perf_counter() - began}
        network = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        url = stack.urls["policy"][0]
        return [await asyncio.to_thread(push, network, url, stack.admin_token, *way, pushes) | ready for way in WAYS]


def push(network: Any, url: str, token: str, dtype: torch.dtype, transport: str, pushes: int) -> Json:
    """The time of several pushes to this server."""
    pusher = Pusher([url], token, transport=transport)
    first = pusher.prepare() + 1
    done = []
    for version in range(first, first + pushes):
        weights = step(network, dtype)
        proof = LogprobProof(PROMPT, logprobs(network, weights), str(dtype).removeprefix("torch."))
        done.append(pusher.push(version, weights, proof))
    pusher.finish()
    seconds = [one.seconds for one in done[1:]]  # the first delta is the whole checkpoint
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "transport": transport,
        "mb": median(one.bytes for one in done[1:]) / 1e6,
        "push_s": median(seconds),
        "push_most_s": max(seconds),
    }


def measure_line(line: str, quick: bool) -> Iterator[Json]:
    """A plain copy over the line, and pushes."""
    with tempfile.TemporaryDirectory() as folder, machines(2, shared=[Path(folder)], rate=line) as (server, trainer):
        root = Path(folder)
        new_model(root / "model", TINY if quick else SMALL)
        (root / "global_config.yaml").write_text(CONFIG)
        size = sum(file.stat().st_size for file in (root / "model").glob("*.safetensors")) // 2  # float32 on the disk
        yield {"line": line, "transport": "plain copy", "mb": size / 1e6, "push_s": copy_s(server, trainer, root, size)}
        serve = [str(Path(sys.executable).with_name("ng_serve")), "policy", "--host", server.address]
        with (root / "server.log").open("w") as log:
            words = [*serve, "--port", str(PORT)]
            serving = server.popen(*words, cwd=root, env=TOKENS, stdout=log, stderr=subprocess.STDOUT)
        try:
            to = ["--to", f"http://{server.name}:{PORT}", *["--quick"] * quick]
            done = trainer.run(sys.executable, __file__, *to, cwd=root, env=TOKENS)
        finally:
            kill(serving)
        if done.returncode:
            raise SystemExit(f"{done.stderr}\n{(root / 'server.log').read_text()}")
        for row in json.loads(done.stdout.splitlines()[-1]):
            yield {"line": line} | row


def copy_s(server: Machine, trainer: Machine, root: Path, size: int) -> float:
    """Seconds until so many bytes of the trainer's machine have arrived on the server's."""
    receiving = server.popen(sys.executable, "-c", RECEIVE, str(PORT), cwd=root, stdout=subprocess.PIPE)
    assert receiving.stdout is not None
    receiving.stdout.readline()
    try:
        return float(trainer.run(sys.executable, "-c", SEND, server.name, str(PORT), str(size), cwd=root).stdout)
    finally:
        kill(receiving)


def push_to(url: str, pushes: int) -> None:
    """Push from this machine to the server of `measure_line`, and print the rows."""
    network = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    ways = [way for way in WAYS if way[0] is torch.bfloat16]
    print(json.dumps([push(network, url, os.environ["NGYM_ADMIN_TOKEN"], *way, pushes) for way in ways]))


@torch.no_grad()
def step(network: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Move each float32 weight by up to LEARNING_RATE; returns the weights in this dtype."""
    for parameter in network.parameters():
        parameter.add_(torch.randn_like(parameter).tanh(), alpha=LEARNING_RATE)
    return {name: tensor.to(dtype) for name, tensor in checkpoint(network.state_dict()).items()}


@torch.no_grad()
def logprobs(network: Any, weights: dict[str, Tensor]) -> list[float]:
    rounded = {name: tensor.float() for name, tensor in weights.items()}
    logits_TV = functional_call(network, rounded, (torch.tensor([PROMPT]),), tie_weights=True).logits[0, :-1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--line", metavar="RATE")
    parser.add_argument("--to", metavar="URL")  # of `measure_line`, for its trainer
    options, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    if options.to:
        push_to(options.to, 3 if "--quick" in rest else 5)
    else:
        play(__doc__, partial(measure_line, options.line) if options.line else measure)
