"""Whatever is posted to a model server, the answer is no 5xx: requests that are almost right, and bytes that are nothing."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import chat_policy
import httpx
import orjson
import pytest
from house import house
from machine import PATIENCE_S

from ngym.schema import Json

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
RESPONSES: Json = {
    "model": "m",
    "input": [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}], **TOKENS},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", "strict": True, **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "metadata": {"extra_body": '{"top_k": 3}'},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 9,
    "temperature": 0.5,
    "previous_response_id": None,
    "stop": ["s"],
}
CHAT: Json = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
        },
        {
            "role": "assistant",
            "content": "y",
            "reasoning_content": "t",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            **TOKENS,
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "max_completion_tokens": 9,
    "logit_bias": {"1": 2},
    "seed": 3,
    "stop": "s",
}
MESSAGES: Json = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "y"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, **TOKENS},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "4"}],
                    "is_error": True,
                },
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["s"],
    "stream": True,
    "temperature": 0.5,
}
WHOLE = {"/v1/responses": RESPONSES, "/v1/chat/completions": CHAT, "/v1/messages": MESSAGES}
JUNK: list[Any] = [None, True, 0, -1, 1.5, 2**63, "", "x", "\u0000", [], {}, [None], [[]], [{}], {"type": "text"}]
JUNK += [
    {"type": []},
    {"": 1},
    "data:",
    "{",
    [1, "a"],
    {"role": "user"},
    {"type": "function", "function": {}},
    1e308,
    -(2**70),
]


def mutated(body: Json, luck: random.Random) -> Json:
    """The body with one to three of its parts replaced, dropped, doubled or added."""
    body = copy.deepcopy(body)
    for _ in range(luck.randint(1, 3)):
        places = list(_places(body))
        holder, key = luck.choice(places)
        match luck.randrange(5):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 2 if isinstance(holder, dict):
                holder[luck.choice(["type", "role", "content", "id", "text", "zz"])] = copy.deepcopy(luck.choice(JUNK))
            case _:
                holder[key] = copy.deepcopy(luck.choice(JUNK))
        if not body:
            break
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


def garbage(luck: random.Random) -> bytes:
    whole = orjson.dumps(luck.choice(list(WHOLE.values())))
    match luck.randrange(4):
        case 0:
            return luck.randbytes(luck.randrange(200))
        case 1:
            return whole[: luck.randrange(len(whole))]
        case 2:
            at = luck.randrange(len(whole))
            return whole[:at] + luck.randbytes(3) + whole[at:]
        case _:
            return b'{"input":' + b"[" * luck.choice([10, 1000, 100_000])


async def fuzz(app: Any, cases: int, seed: int) -> dict[str, int]:
    """How often each status came; the test fails at the first 5xx and shows what brought it."""
    luck = random.Random(seed)
    statuses: dict[str, int] = {}
    async with (
        house({"policy": {"tokens": True}}, policy=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        for case in range(cases):
            path = luck.choice(list(WHOLE))
            body = garbage(luck) if case % 5 == 0 else orjson.dumps(_jsonable(mutated(WHOLE[path], luck)))
            prefix = luck.choice(["", f"/rollouts/r{luck.randrange(9)}", "/rollouts/%00"])
            answer = await client.post(prefix + path, content=body)
            assert answer.status_code < 500, (prefix + path, body[:3000], answer.text[:1000])
            assert "response.failed" not in answer.text, (path, body[:3000], answer.text[-1000:])
            statuses[str(answer.status_code)] = statuses.get(str(answer.status_code), 0) + 1
    return statuses


def _jsonable(value: Any) -> Any:
    """orjson knows no whole number beyond 64 bits."""
    if isinstance(value, dict):
        return {key: _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_jsonable(inner) for inner in value]
    return float(value) if isinstance(value, int) and abs(value) >= 2**63 else value


@pytest.mark.parametrize("native", ["responses", "chat"])
async def test_no_request_is_a_5xx(native: str):
    app = chat_policy.SCRIPTED.app if native == "responses" else chat_policy.app
    statuses = await fuzz(app, 400, seed=1)
    assert statuses["200"] > 20
    assert statuses["422"] > 20


@pytest.mark.soak
@pytest.mark.parametrize("native", ["responses", "chat"])
async def test_none_of_ten_thousand_requests_is_a_5xx(native: str):
    app = chat_policy.SCRIPTED.app if native == "responses" else chat_policy.app
    assert (await fuzz(app, 10_000, seed=2))["200"] > 500


@pytest.mark.parametrize("path", list(WHOLE))
@pytest.mark.parametrize("native", ["responses", "chat"])
async def test_the_request_that_is_mutated_is_sound(path: str, native: str):
    app = chat_policy.SCRIPTED.app if native == "responses" else chat_policy.app
    async with (
        house({"policy": {"tokens": True}}, policy=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        for body in (WHOLE[path], WHOLE[path] | {"stream": False, "stream_options": None}):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
