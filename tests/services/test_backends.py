"""The contract of model servers: clients see the same behavior with every back end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from local_services import local_services
from paths import ROOT
from stub_engines import Sglang, write_stub_model
from upstreams import CONTEXT, Anthropic, OpenAI, Stub
from waiting import PATIENCE_S, until

from ngym.schema import TOKEN_FIELDS
from ngym.services.base.app import load

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
MODELS = ROOT / "models"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
ANSWER = "You said: hello there. Fine ☕, isn't it?"


@dataclass(frozen=True)
class BackEnd:
    """A model server's folder, what is behind it, and its stanza.

    stub: of a checkpoint's folder; None: the back end loads that itself.
    tokens: whether it gives them. owned: and continues from those that were seen.
    """

    folder: str
    stub: Callable[[Path], Stub] | None
    options: Json = field(default_factory=dict)
    path: str = "/v1"
    tokens: bool = False
    owned: bool = False


AZURE = {"api_version": "2025-04-01-preview", "deployment": "my-gpt"}
REPLIES = [  # what `scripted_reply` of upstreams.py says
    {
        "contains": "add",
        "turn": 1,
        "reasoning": "I must add.",
        "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}],
    },
    {"contains": "add", "turn": 2, "text": "The tool says {tool_output}, naïve ☕ indeed."},
    {"text": "You said: {user}. Fine ☕, isn't it?"},
]
BACK_ENDS = {
    "openai-responses": BackEnd("openai", lambda _: OpenAI(), {"api": "responses"}),
    "openai-chat": BackEnd("openai", lambda _: OpenAI(), {"api": "chat"}),
    "openai-auto-chat": BackEnd("openai", lambda _: OpenAI(responses=False)),
    "openai-token-ids": BackEnd("openai", lambda _: OpenAI(), {"token_ids": True}, tokens=True),
    "azure-responses": BackEnd("openai", lambda _: OpenAI(), {"azure": AZURE}, path=""),
    "azure-chat": BackEnd("openai", lambda _: OpenAI(), {"azure": AZURE, "api": "chat"}, path=""),
    "anthropic": BackEnd("anthropic", lambda _: Anthropic(), path=""),
    "azure-v1": BackEnd("openai", lambda _: OpenAI(), {"azure": {}}, path=""),
    "sglang": BackEnd("sglang", Sglang, path="", tokens=True, owned=True),
    "sglang-incremental": BackEnd("sglang", partial(Sglang, incremental=True), path="", tokens=True, owned=True),
    "scripted": BackEnd("scripted", None, {"tokens": True, "replies": REPLIES}, tokens=True),
    "transformers": BackEnd("transformers", None, tokens=True, owned=True),
}
BOUNDED = [name for name in BACK_ENDS if name != "scripted"]  # those with a context that can be full
OWNED = [name for name, kind in BACK_ENDS.items() if kind.owned]
REMOTE = [name for name, kind in BACK_ENDS.items() if kind.stub]


@dataclass
class ModelService:
    """A model server with its back end, and a client of it."""

    kind: BackEnd
    stub: Stub | None
    client: httpx.AsyncClient

    async def post(self, **params: Any) -> httpx.Response:
        return await self.client.post("/v1/responses", json={"input": "hello there", "store": False} | params)

    async def answer(self, **params: Any) -> Json:
        reply = await self.post(**params)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def events(self, path: str, **body: Any) -> list[Json]:
        async with self.client.stream("POST", path, json=body | {"stream": True}) as reply:
            text = (await reply.aread()).decode()
            assert reply.status_code == 200, text
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [orjson.loads(one) for one in data if one != "[DONE]"]


@asynccontextmanager
async def serving(kind: BackEnd, folder: Path) -> AsyncIterator[ModelService]:
    app = load(MODELS / kind.folder / "app.py").app
    stub = kind.stub(folder) if kind.stub else None
    async with AsyncExitStack() as stack:
        options: Json = {"model": str(folder)} if kind.folder == "transformers" else {}
        if stub is not None:
            stub_house = await stack.enter_async_context(local_services(stub=stub.app))
            base_url = stub_house.urls["stub"][0] + kind.path
            options = {"model": "m", "base_url": base_url, "max_retries": 0, "api_key_env": None}
        peers = await stack.enter_async_context(local_services({"policy": options | kind.options}, policy=app))
        client = httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S)
        yield ModelService(kind, stub, await stack.enter_async_context(client))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stub_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(params=BACK_ENDS, scope="module", loop_scope="module")
async def service(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[ModelService]:
    async with serving(BACK_ENDS[request.param], folder) as one:
        yield one


remote = pytest.mark.parametrize("service", REMOTE, indirect=True)


def text_of(response: Json) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def essence(response: Json) -> Json:
    """A Response without what differs from call to call."""
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    names = ("status", "incomplete_details", "error", "usage", "ng")
    return {name: response.get(name) for name in names} | {"output": output}


async def test_a_plain_answer_is_given_with_its_usage(service: ModelService):
    response = await service.answer()
    assert (response["status"], text_of(response)) == ("completed", ANSWER)
    usage = response["usage"]
    assert usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("params", [{}, {"input": "add", "tools": [TOOL]}, {"max_output_tokens": 3}])
async def test_a_streamed_answer_is_the_plain_one_in_pieces(service: ModelService, params: Json):
    plain = await service.answer(**params)
    events = await service.events("/v1/responses", **{"input": "hello there", "store": False} | params)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == f"response.{plain['status']}"
    assert essence(events[-1]["response"]) == essence(plain)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(plain)
    if not params:
        assert len(deltas) > 1
    arguments = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(item.get("arguments", "") for item in plain["output"])


async def test_the_other_apis_tell_the_same(service: ModelService):
    messages = [{"role": "user", "content": "hello there"}]
    chat = (await service.client.post("/v1/chat/completions", json={"messages": messages})).json()
    assert chat["choices"][0]["message"]["content"] == ANSWER
    chunks = await service.events("/v1/chat/completions", messages=messages, stream_options={"include_usage": True})
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == ANSWER
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [chat["usage"]]
    body = {"model": "m", "max_tokens": 99, "messages": messages}
    message = (await service.client.post("/v1/messages", json=body)).json()
    assert [block["text"] for block in message["content"]] == [ANSWER]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == (
        "end_turn",
        chat["usage"]["completion_tokens"],
    )
    events = await service.events("/v1/messages", **body)
    assert (
        "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta") == ANSWER
    )


async def test_a_tool_is_called_and_its_output_is_heard(service: ModelService):
    first = await service.answer(input="add", tools=[TOOL])
    reasoning, call = first["output"]
    assert (reasoning["type"], call["type"], call["name"]) == ("reasoning", "function_call", "add")
    assert orjson.loads(call["arguments"]) == {"a": 2, "b": 3}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    items = [{"role": "user", "content": "add"}, *first["output"], output]
    second = await service.answer(input=items, tools=[TOOL])
    assert text_of(second) == "The tool says 5, naïve ☕ indeed."
    if service.kind.owned:
        prompt, sampled, _ = (call[name] for name in TOKEN_FIELDS)
        assert second["output"][-1][TOKEN_FIELDS[0]][: len(prompt) + len(sampled)] == prompt + sampled


async def test_an_answer_that_is_too_long_is_incomplete(service: ModelService):
    response = await service.answer(max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert ANSWER.startswith(text_of(response).rstrip())
    assert response["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("service", BOUNDED, indirect=True)
async def test_a_conversation_that_does_not_fit_is_incomplete_and_says_nothing(service: ModelService):
    long = "word " * (CONTEXT + 1)
    response = await service.answer(input=long)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (text_of(response), response["usage"]["output_tokens"]) == ("", 0)
    events = await service.events("/v1/responses", input=long, store=False)
    assert essence(events[-1]["response"]) == essence(response)


@remote
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "status", "upstream", "retryable"),
    [
        ("status 429", 429, 429, True),
        ("status 500", 502, 500, True),
        ("status 401", 502, 401, False),
        ("status 400", 400, 400, False),
        ("garbage", 502, 200, False),
    ],
)
async def test_what_goes_wrong_upstream_is_reported(
    service: ModelService, says: str, status: int, upstream: int, retryable: bool, stream: bool
):
    reply = await service.post(input=says, stream=stream)
    problem = reply.json()
    assert (reply.status_code, problem["upstream"]["status"], problem["retryable"]) == (status, upstream, retryable)
    assert problem["failure"] == "model_error"
    assert problem["error"]["message"] == problem["detail"]
    assert "\n" not in problem["detail"]


@remote
@pytest.mark.parametrize("stream", [False, True])
async def test_nonsense_from_upstream_is_the_upstreams_fault(service: ModelService, stream: bool):
    assert service.stub is not None
    service.stub.corruption = random.Random(0)
    try:
        for number in range(30):
            params: Json = {"input": "add", "tools": [TOOL]} if number % 2 else {}
            reply = await service.post(stream=stream, **params)
            assert reply.status_code in (200, 400, 402, 429, 502), reply.text
            assert "the model failed" not in reply.text  # that is what a bug of ours says
    finally:
        service.stub.corruption = None


@remote
async def test_a_back_end_that_does_not_answer_in_time_is_a_timeout(service: ModelService):
    headers = {"x-ng-deadline-ms": "300"}
    reply = await service.client.post("/v1/responses", json={"input": "forever"}, headers=headers)
    assert (reply.status_code, reply.json()["failure"]) == (504, "timeout")


@remote
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_the_call_upstream(service: ModelService, stream: bool):
    stub = service.stub
    assert stub is not None
    running, left = stub.running, stub.abandoned
    asking = asyncio.create_task(service.post(input="forever", stream=stream))
    await until(lambda: stub.running > running)
    asking.cancel()
    await until(lambda: stub.abandoned > left)


@remote
async def test_metrics_tell_what_was_used(service: ModelService):
    async def metrics() -> dict[str, float]:
        """Once nothing is in flight: what a client left behind is counted when it ends."""
        while True:
            lines = (await service.client.get("/metrics")).text.splitlines()
            named = (line.rsplit(" ", 1) for line in lines if line.startswith("ngym_upstream"))
            values = {name: float(value) for name, value in named}
            if values["ngym_upstream_in_flight"] == 0:
                return values

    before = await metrics()
    used = (await service.answer())["usage"]
    after = await metrics()
    for way in ("input", "output"):
        name = f'ngym_upstream_tokens_total{{way="{way}"}}'
        assert after[name] - before[name] == used[f"{way}_tokens"]
    assert after["ngym_upstream_limit"] > 0


async def test_token_data_is_on_the_last_item_where_the_back_end_has_it(service: ModelService):
    if not service.kind.tokens:
        assert TOKEN_FIELDS[0] not in (await service.answer())["output"][-1]
        return
    for params in ({}, {"input": "add", "tools": [TOOL]}):
        response = await service.answer(**params)
        prompt, sampled, logprobs = (response["output"][-1][name] for name in TOKEN_FIELDS)
        assert prompt
        assert len(sampled) == len(logprobs) == response["usage"]["output_tokens"]
        assert all(logprob <= 0 for logprob in logprobs)


@pytest.mark.parametrize("service", OWNED, indirect=True)
async def test_an_agent_that_knows_nothing_of_tokens_leaves_one_segment(service: ModelService):
    path = f"/rollouts/{service.kind.folder}-1"
    messages: list[Json] = [{"role": "user", "content": "add"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"messages": messages, "tools": [tool]}
    first = (await service.client.post(f"{path}/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    calls = first["tool_calls"]  # all that many an agent keeps of an answer
    messages += [{"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"}]
    chunks = await service.events(f"{path}/v1/chat/completions", **body)
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]) == (
        "The tool says 5, naïve ☕ indeed."
    )
    captured = (await service.client.get(f"{path}/segments")).json()
    (segment,) = captured["segments"]
    assert (captured["calls"], len(segment["mask"])) == (2, 2)
    _, end = segment["mask"][0]
    assert segment["token_ids"][:end] == first["prompt_token_ids"] + first["generation_token_ids"]
    assert len(segment["logprobs"]) == sum(end - start for start, end in segment["mask"])
    assert (await service.client.delete(f"{path}/segments")).status_code < 300
