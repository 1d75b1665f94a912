"""The trainer gets the ids that the engine used: in every client API, with templates that rewrite history, after
retries.

The policy has learnt to think and to call a tool, so that old reasoning is there to be left out and calls to be written
otherwise. The judge is the trainer's own forward pass: had one id come from tokenising text again, its log-probabilities
would be others than the sampler's.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from vllm_service import Server, Servers, user, write_checkpoint
from waiting import PATIENCE_S

from ngym.rollout import ModelCall, extend
from ngym.schema import TOKEN_FIELDS
from ngym.services.models.request_handler import WholeCompletion

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

Json = dict[str, Any]
TURNS = 6
IN_FLIGHT = 32
REWRITING = r"""{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages -%}
<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% elif m.role == 'assistant' %}
{%- if loop.index0 > ns.last and m.reasoning %}<think>
{{ m.reasoning.strip() }}
</think>

{% endif %}{{ (m.content or '').strip() }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{% if calls == 'reformatted' %}{"arguments": {{ call.function.arguments | tojson(indent=2) }},
 "name": "{{ call.function.name }}"}{% else %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endif %}
</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THOUGHTS = ("first", "then", "add", "both", "é", "ok", "so", "the sum")


def exercise(draw: random.Random) -> str:
    """A conversation as the policy is to say it: with thoughts, and with calls in more than one spelling."""
    a, b = draw.randrange(10), draw.randrange(10)
    thought = " ".join(draw.choices(THOUGHTS, k=draw.randrange(1, 4)))
    arguments = draw.choice(['{"a": %d, "b": %d}', '{"b": %d, "a": %d}', '{"a":%d,"b":%d}', '{ "a": %d, "b" : %d}'])
    call = f'{{"name": "add", "arguments": {arguments % (a, b)}}}'
    answer = draw.choice([f"{a + b}", f"It is {a + b}.", f" {a + b} ", ""])
    turns = [
        ("user", f"add {a} and {b}"),
        ("assistant", f"<think>\n{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"),
        ("user", f'<tool_response>\n{{"sum": {a + b}}}\n</tool_response>'),
        ("assistant", f"<think>\n{thought}\n</think>\n\n{answer}"),
        ("user", "again"),
    ]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def learn(folder: Path, steps: int = 400) -> None:
    """Teach it the exercise, half-way: what it says is still random."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    draw = random.Random(0)
    for _ in range(steps):
        texts = tokenizer([exercise(draw) for _ in range(12)], padding=True, return_tensors="pt")
        labels = texts["input_ids"].masked_fill(texts["attention_mask"] == 0, -100)
        loss = model(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.chat_template = REWRITING
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("policy"))
    learn(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Server]:
    options = {"model": str(checkpoint), "reasoning_parser": "qwen3", "engine": {"max_model_len": 4096}}
    with Servers(tmp_path_factory.mktemp("services"), root, {"policy": {"options": options}}) as servers:
        yield servers["policy"]


# Clients that know nothing of token ids, or send them back


class Api(NamedTuple):
    """The fields of one API.

    history: the field with what was said. ask: the fields of each request. carrier: (answer) -> what carries the token
    fields. kept: (answer) -> what this client sends back of it. calls: (what it sends back) -> ids of tool calls.
    """

    path: str
    history: str
    ask: Json
    carrier: Callable[[Json], Json]
    history_items: Callable[[Json], list[Json]]
    calls: Callable[[list[Json]], list[str]]
    result: Callable[[str, str], Json]


ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
LIMIT = 90
CHAT = Api(
    "/v1/chat/completions",
    "messages",
    {"tools": [{"type": "function", "function": {"name": "add", "parameters": ADD}}], "max_tokens": LIMIT},
    lambda answer: answer["choices"][0]["message"],
    lambda answer: [{k: v for k, v in answer["choices"][0]["message"].items() if k != "reasoning_content"}],
    lambda items: [call["id"] for call in items[0].get("tool_calls") or ()],
    lambda call_id, text: {"role": "tool", "tool_call_id": call_id, "content": text},
)
RESPONSES = Api(
    "/v1/responses",
    "input",
    {"tools": [{"type": "function", "name": "add", "parameters": ADD}], "max_output_tokens": LIMIT},
    lambda answer: answer["output"][-1],
    lambda answer: answer["output"],
    lambda items: [item["call_id"] for item in items if item["type"] == "function_call"],
    lambda call_id, text: {"type": "function_call_output", "call_id": call_id, "output": text},
)
MESSAGES = Api(
    "/v1/messages",
    "messages",
    {"tools": [{"name": "add", "input_schema": ADD}], "max_tokens": LIMIT, "model": "policy"},
    lambda answer: answer["content"][-1],
    lambda answer: [
        {"role": "assistant", "content": [block for block in answer["content"] if block["type"] != "thinking"]}
    ],
    lambda items: [block["id"] for block in items[0]["content"] if block["type"] == "tool_use"],
    lambda call_id, text: user([{"type": "tool_result", "tool_use_id": call_id, "content": text}]),
)


class Client(NamedTuple):
    """captured: under /rollouts/{id}, and without token ids. repeats: it asks each time twice, as an SDK whose first
    attempt timed out."""

    api: Api
    captured: bool
    stream: bool = False
    repeats: bool = False


CLIENTS = [
    Client(CHAT, captured=True),
    Client(CHAT, captured=True, stream=True),
    Client(CHAT, captured=True, repeats=True),
    Client(CHAT, captured=False),
    Client(RESPONSES, captured=True),
    Client(RESPONSES, captured=False),
    Client(RESPONSES, captured=False, stream=True),
    Client(MESSAGES, captured=True),
]


class Rollout(NamedTuple):
    """calls: the tokens of each answer that the client went on from, as the engine told them. request: the last body."""

    client: Client
    name: str
    calls: list[ModelCall]
    request: Json


async def answer_of(http: httpx.AsyncClient, path: str, body: Json, again: bool) -> Json:
    headers = {"x-stainless-retry-count": "1"} if again else {}
    reply = await http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        return reply.json()
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    if "response" in events[-1]:
        return events[-1]["response"]
    completion = WholeCompletion()
    for event in events:
        completion.take(event)
    assert completion.answer is not None
    return completion.answer


async def roll_out(http: httpx.AsyncClient, index: int) -> Rollout:
    draw = random.Random(index)
    client = CLIENTS[index % len(CLIENTS)]
    api, name = client.api, f"r{index}"
    path = f"/rollouts/{name}{api.path}" if client.captured else api.path
    calls: list[ModelCall] = []
    history = [user(f"add {draw.randrange(10)} and {draw.randrange(10)}")]
    spelling = {"chat_template_kwargs": {"calls": draw.choice(["reformatted", "plain"])}}
    body = api.ask | spelling | {"temperature": 1.0, "stream": client.stream, api.history: history}
    for _ in range(TURNS):
        answer = await answer_of(http, path, body, again=False)
        if client.repeats:
            answer = await answer_of(http, path, body, again=True)
        carrier = api.carrier(answer)
        prompt, sampled, logprobs = (carrier[name] for name in TOKEN_FIELDS)
        calls.append(ModelCall(prompt, sampled, logprobs, answer["ng"]["policy_version"]))
        if client.captured:
            for field in TOKEN_FIELDS:
                del carrier[field]
        items = api.history_items(answer)
        history += items
        history += [api.result(call_id, json.dumps({"sum": draw.randrange(99)})) for call_id in api.calls(items)]
        if history[-1] is items[-1]:
            history.append(user(draw.choice(["again", "é \t?\n", *(f"add {n} and 2" for n in range(4))])))
    return Rollout(client, name, calls, body)


async def roll_out_all(url: str, count: int) -> list[Rollout]:
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(http: httpx.AsyncClient, index: int) -> Rollout:
        async with gate:
            return await roll_out(http, index)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        return await asyncio.gather(*(one(http, index) for index in range(count)))


# The proof


def largest_difference(checkpoint: Path, segments: list[Any]) -> float:
    """Between the sampler's log-probabilities in these segments, and the trainer's of the same tokens."""
    import torch

    from ngym.trainer.data import samples
    from ngym.trainer.engine import distributed
    from ngym.trainer.model import packing
    from ngym.trainer.model import policy as model
    from ngym.trainer.recipe import recipe as config

    options = config.ModelOptions(path=str(checkpoint))
    batch = [samples.Sample((samples.Segment(one["token_ids"], [tuple(s) for s in one["mask"]]),)) for one in segments]
    samplers = {id(sample.segments[0]): one["logprobs"] for sample, one in zip(batch, segments, strict=True)}
    worst = 0.0
    with distributed.join_process_group(config.Launch(rank=0, local_rank=0, ranks=1)), torch.no_grad():
        policy = model.load_policy(options, model.load_tokenizer(options), 0)
        for micro_batch in packing.plan(batch, 8192):
            packed = packing.pack(micro_batch, torch.device("cpu"))
            expected = [logprob for segment in packed.segments for logprob in samplers[id(segment)]]
            worst = max(worst, float((policy.logprobs(packed) - torch.tensor(expected)).abs().max()))
    return worst


def render_conversation(checkpoint: Path, rollout: Rollout) -> list[int]:
    """The conversation of a Chat client, as its template tokenises it."""
    from transformers import AutoTokenizer

    messages = copy.deepcopy(rollout.request["messages"])
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        with suppress(json.JSONDecodeError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return tokenizer.apply_chat_template(messages, **rollout.request["chat_template_kwargs"])["input_ids"]


@pytest.mark.parametrize("count", [48, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_the_trainer_computes_the_samplers_logprobs_of_what_every_client_brought_about(
    server: Server, checkpoint: Path, count: int
) -> None:
    rollouts = asyncio.run(roll_out_all(server.url, count))
    segments = []
    for rollout in rollouts:
        expected: list[Any] = []
        for call in rollout.calls:
            extend(expected, call)
        if rollout.client.captured:
            captured = server.get(f"/rollouts/{rollout.name}/segments").json()
            assert (captured["calls"], captured["segments"]) == (TURNS, expected)
        assert len(expected) == 1, f"{rollout.name} broke"
        [segment] = expected
        sampled = [segment["token_ids"][start:end] for start, end in segment["mask"]]
        assert sampled == [call.generation_token_ids for call in rollout.calls]
        segments.append(segment)

    of_chat = [
        (rollout, segment) for rollout, segment in zip(rollouts, segments, strict=True) if rollout.client.api is CHAT
    ]
    rewritten = sum(
        render_conversation(checkpoint, rollout)[: len(segment["token_ids"])] != segment["token_ids"]
        for rollout, segment in of_chat
    )
    called = sum("tool_calls" in message for rollout, _ in of_chat for message in rollout.request["messages"])
    assert rewritten > len(of_chat) / 2 and called, "else this test shows nothing"
    difference = largest_difference(checkpoint, segments)
    sampled_tokens = sum(len(segment["logprobs"]) for segment in segments)
    print(f"{count} rollouts, {sampled_tokens} sampled tokens, {called} calls: largest difference {difference:.2e}")
    assert difference < 1e-4
