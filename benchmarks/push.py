"""The time of a weight push by model size: every tensor to a running vLLM over HTTP, committed and proven.

Each time other weights, while nothing is generated; and the start of the model server, from the command to ready.

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

import torch
from parts import play
from training import MIDDLE, TINY
from transformers import AutoModelForCausalLM

from ngym.config.service_config import load_config
from ngym.runtime import event_loop
from ngym.schema import Json
from ngym.supervise.supervisor import Supervisor
from ngym.trainer.weights.push import LogprobProof, Pusher
from trainer import SMALL, new_model

CONFIG = """
policy: {kind: model, app: models/vllm, model: model}
ngym: {head: {port: 0}}
"""
PROMPT = [1, 40, 41, 42, 2, 1, 77, 90, 50, 60, 61, 62, 63]


def measure(quick: bool) -> Iterator[Json]:
    if importlib.util.find_spec("vllm") is None:
        return
    for shape in [TINY] if quick else [TINY, MIDDLE, SMALL]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            new_model(root / "model", shape)
            (root / "global_config.yaml").write_text(CONFIG)
            yield event_loop.run(measure_push(root, 3 if quick else 7))


async def measure_push(root: Path, pushes: int) -> Json:
    began = time.perf_counter()
    async with Supervisor(load_config([root / "global_config.yaml"])) as stack:
        ready_s = time.perf_counter() - began
        network = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        pusher = Pusher(stack.urls["policy"], stack.admin_token)
        first = await asyncio.to_thread(pusher.prepare) + 1
        done = []
        for version in range(first, first + pushes):
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.mul_(1.01)
                logits_TV = network(torch.tensor([PROMPT])).logits[0, :-1]
                logprobs = logits_TV.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
            weights = dict(network.state_dict())
            done.append(await asyncio.to_thread(pusher.push, version, weights, LogprobProof(PROMPT, logprobs)))
        pusher.finish()
    seconds = [one.seconds for one in done[1:]]
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "mb": done[0].bytes / 1e6,
        "push_s": median(seconds),
        "push_most_s": max(seconds),
        "mb_s": done[0].bytes / 1e6 / median(seconds),
        "vllm_ready_s": ready_s,
    }


if __name__ == "__main__":
    play(__doc__, measure)
