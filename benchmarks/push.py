"""The time of a weight push by model size: to a running vLLM over HTTP, committed and proven.

In float32 and bfloat16 every tensor, and with the transport `delta` the values in bfloat16 that changed. Before each push
every weight moves by up to 1e-6, as by a step of AdamW at that rate; nothing is generated meanwhile. And the start of the
model server, from the command to ready.

    python benchmarks/push.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from parts import play
from torch import Tensor
from torch.func import functional_call
from training import MIDDLE, TINY
from transformers import AutoModelForCausalLM

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
        ready_s = time.perf_counter() - began
        network = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        rows = []
        for dtype, transport in WAYS:
            pusher = Pusher(stack.urls["policy"], stack.admin_token, transport=transport)
            first = await asyncio.to_thread(pusher.prepare) + 1
            done = []
            for version in range(first, first + pushes):
                weights = step(network, dtype)
                proof = LogprobProof(PROMPT, logprobs(network, weights), str(dtype).removeprefix("torch."))
                done.append(await asyncio.to_thread(pusher.push, version, weights, proof))
            pusher.finish()
            seconds = [one.seconds for one in done[1:]]  # the first delta is the whole checkpoint
            rows.append(
                {
                    "parameters": sum(parameter.numel() for parameter in network.parameters()),
                    "dtype": str(dtype).removeprefix("torch."),
                    "transport": transport,
                    "mb": median(one.bytes for one in done[1:]) / 1e6,
                    "push_s": median(seconds),
                    "push_most_s": max(seconds),
                    "vllm_ready_s": ready_s,
                }
            )
    return rows


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
    play(__doc__, measure)
