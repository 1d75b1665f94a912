"""A replica of models/vllm on two nodes, which are two processes of this machine: tensor_parallel_size 2 on the CPU."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from waiting import PATIENCE_S, running, until

from ngym.config.service_config import load_config
from ngym.errors import ConfigError
from ngym.supervise.supervisor import Supervisor

has_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
ENGINE = {"tensor_parallel_size": 2, "max_model_len": 1024}
PROMPT = [1, 40, 41, 42, 2, 1, 77, 90, 50, 60, 61, 62, 63]


def config(folder: Path, **policy: Any) -> Any:
    stanza = {"kind": "model", "app": "models/vllm", "nodes": 2, **policy}
    file = folder / "global_config.yaml"
    file.write_text(yaml.safe_dump({"ngym": {"head": {"port": 0}}, "policy": stanza}))
    return load_config([file])


@pytest.fixture
def network(tmp_path: Path) -> Any:
    """The checkpoint in the folder `policy`, in transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm_service import write_checkpoint

    write_checkpoint(tmp_path / "policy")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)


@pytest.fixture
async def stack(tmp_path: Path, network: Any) -> AsyncIterator[Supervisor]:
    async with Supervisor(config(tmp_path, model=str(tmp_path / "policy"), engine=ENGINE)) as stack:
        yield stack
        ours = of_replica(stack)
    await until(lambda: not running(ours))


def of_replica(stack: Supervisor) -> list[psutil.Process]:
    """The processes of both nodes: servers, engine and workers."""
    server = psutil.Process(stack.states[0].pid)
    zygote = server.parent()
    assert zygote is not None
    return zygote.children(recursive=True)


def find_process(stack: Supervisor, name: str) -> psutil.Process:
    (found,) = [each for each in of_replica(stack) if name in (each.name(), *each.cmdline()[:1])]
    return found


def difference(network: Any, ids: list[int], logprobs: list[float]) -> float:
    """The largest error of the logprobs of the last ids."""
    import torch

    with torch.no_grad():
        logits_TV = network(torch.tensor([ids])).logits[0, -len(logprobs) - 1 : -1]
    ours = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[-len(logprobs) :])[:, None])[:, 0]
    return float((ours - torch.tensor(logprobs)).abs().max())


async def sampling_difference(stack: Supervisor, network: Any) -> float:
    from vllm_service import tokens_of

    body = {"input": "hello world", "max_output_tokens": 24, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        reply = await client.post(f"{stack.states[0].url}/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    prompt, answer, logprobs = tokens_of(reply.json())
    assert len(answer) == 24
    return difference(network, prompt + answer, logprobs)


@has_vllm
async def test_both_nodes_compute_one_model_take_a_push_and_start_again_together(
    stack: Supervisor, network: Any
) -> None:
    import torch

    from ngym.trainer.weights import push, replica

    assert await sampling_difference(stack, network) < 1e-4
    [state] = stack.states

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        logits_TV = network(torch.tensor([PROMPT])).logits[0, :-1]
    proof = logits_TV.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    pusher = push.Pusher([state.url], stack.admin_token, patience_s=PATIENCE_S)
    await asyncio.to_thread(pusher.prepare)
    await asyncio.to_thread(pusher.push, 1, dict(network.state_dict()), replica.LogprobProof(PROMPT, proof))
    assert await sampling_difference(stack, network) < 1e-4  # on the new weights, of both nodes

    await _starts_again_after(stack, "ng:policy.1")


@has_vllm
@pytest.mark.soak
@pytest.mark.parametrize("name", ["VLLM::Worker_TP1", "VLLM::Worker_TP0", "ng:policy"])
async def test_the_replica_starts_again_as_a_whole_whichever_process_ends(stack: Supervisor, name: str) -> None:
    await _starts_again_after(stack, name)


async def _starts_again_after(stack: Supervisor, name: str) -> None:
    """Kill this process; all others end, too, and new ones serve."""
    before, restarts = of_replica(stack), stack.states[0].restarts
    find_process(stack, name).send_signal(signal.SIGKILL)
    await until(lambda: stack.states[0].restarts > restarts)
    await until(lambda: stack.states[0].status == "ready")  # a start whose port was taken meanwhile is repeated
    assert not running(before)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"app": "models/scripted"}, "nodes: only models/vllm runs one replica on several machines"),
        ({"replicas": "per_node"}, "nodes: a replica on 2 machines cannot be one per_node"),
        ({"url": "http://127.0.0.1:1"}, "nodes: 'policy' runs elsewhere; remove this key"),
        ({"nodes": 0}, "nodes: Input should be greater than or equal to 1"),
    ],
)
def test_what_cannot_run_on_several_nodes_is_one_line(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **keys)
    assert message in str(caught.value) and "\n" not in str(caught.value)
