"""One checkpoint in vLLM and transformers: the same prompts, ids and log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from local_services import local_services
from paths import ROOT
from vllm_service import Server, Servers, write_checkpoint
from waiting import PATIENCE_S

from ngym.schema import TOKEN_FIELDS
from ngym.services.base.app import load

pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module")]
Json = dict[str, Any]
TRANSFORMERS = load(ROOT / "models" / "transformers" / "app.py")
CONTEXT = 1024
USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}
REASONING = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(folder: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[str]]:
    """The URLs of vLLM and of transformers."""
    stanza = {"options": {"model": str(folder), "engine": {"max_model_len": CONTEXT}}}
    options = {"policy": {"model": str(folder), "context": CONTEXT}}
    with Servers(tmp_path_factory.mktemp("services"), root, {"policy": stanza}) as servers:
        vllm: Server = servers["policy"]
        async with local_services(options, policy=TRANSFORMERS.app) as peers:
            yield [vllm.url, peers.urls["policy"][0]]


async def both(urls: list[str], **body: Any) -> list[Json]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        replies = await asyncio.gather(*(client.post(f"{url}/v1/responses", json=body) for url in urls))
    assert [reply.status_code for reply in replies] == [200, 200], [reply.text for reply in replies]
    if not body.get("stream"):
        return [reply.json() for reply in replies]
    lines = [[line for line in reply.text.splitlines() if line.startswith("data: {")] for reply in replies]
    return [orjson.loads(one[-1].removeprefix("data: "))["response"] for one in lines]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"input": "hello"},
        {"input": [USER, REASONING, CALL, OUTPUT], "tools": [TOOL]},
        {"input": [{"role": "system", "content": "Be brief."}, USER], "instructions": "In French."},
        {"input": "hello", "max_output_tokens": 900},
        {"input": "hello " * CONTEXT},
    ],
    ids=["text", "tools", "system", "long", "overflow"],
)
async def test_vllm_and_transformers_say_the_same(clients: list[str], body: Json, stream: bool):
    ours, of_transformers = await both(clients, **{"temperature": 0, "max_output_tokens": 32, "stream": stream} | body)
    names = ("status", "incomplete_details")
    assert [ours[name] for name in names] == [of_transformers[name] for name in names]
    if not ours["usage"]["output_tokens"]:
        assert of_transformers["usage"]["output_tokens"] == 0
        return
    prompts, ids, logprobs = (
        [answer["output"][-1][name] for answer in (ours, of_transformers)] for name in TOKEN_FIELDS
    )
    assert prompts[0] == prompts[1]
    assert ids[0] == ids[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert ours["usage"]["total_tokens"] == of_transformers["usage"]["total_tokens"]


async def test_both_continue_from_the_ids_that_were_seen(clients: list[str]):
    first = await both(clients, input=[USER], temperature=0, max_output_tokens=8, tools=[TOOL])
    items = [[USER, *answer["output"], {"role": "user", "content": "what?"}] for answer in first]
    second = [
        (await both([url, url], input=one, temperature=0, max_output_tokens=8, tools=[TOOL]))[0]
        for url, one in zip(clients, items, strict=True)
    ]
    prompts = [answer["output"][-1][TOKEN_FIELDS[0]] for answer in second]
    ids_so_far = [answer["output"][-1][TOKEN_FIELDS[0]] + answer["output"][-1][TOKEN_FIELDS[1]] for answer in first]
    assert [prompt[: len(ids)] for prompt, ids in zip(prompts, ids_so_far, strict=True)] == ids_so_far
    assert prompts[0] == prompts[1]
