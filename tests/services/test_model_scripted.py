"""models/scripted with the official client: the scripted answers in every API, with token data."""

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from anthropic import AsyncAnthropic
from local_services import local_services
from openai import AsyncOpenAI
from paths import ROOT
from pydantic import ValidationError
from waiting import PATIENCE_S

from ngym.errors import UsageError
from ngym.rollout import extend, tokens_of
from ngym.schema import Segment
from ngym.services.base.app import load

SCRIPTED = load(ROOT / "models" / "scripted" / "app.py")
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}

SUM_RULES = [
    {
        "turn": 1,
        "match": r"(\d+) \+ (?P<right>\d+)",
        "tool_calls": [{"name": "add", "arguments": '{"a": {1}, "b": {right}}'}],
    },
    {"turn": 2, "match": r"\+", "text": "It is {tool_output}."},
]


@asynccontextmanager
async def serve_scripted(**options: Any):
    async with local_services({"policy": options}, policy=SCRIPTED.app) as peers:
        yield peers.urls["policy"][0]


@asynccontextmanager
async def official(**options: Any):
    async with (
        serve_scripted(**options) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_without_rules_it_echoes():
    async with official() as client:
        response = await client.responses.create(model="any", input="hello {there}")
    assert response.output_text == "hello {there}"
    assert (response.status, response.model) == ("completed", "scripted")
    assert response.usage.output_tokens == len("hello {there}") + 1


async def test_placeholders_also_name_the_tool():
    reply = {"match": r"use (\w+) on (\d+)", "tool_calls": [{"name": "{1}", "arguments": '{"a": {2}}'}]}
    async with official(replies=[reply]) as client:
        response = await client.responses.create(model="m", input="use add on 12", tools=[ADD])
    (call,) = response.output
    assert (call.name, orjson.loads(call.arguments)) == ("add", {"a": 12})


async def test_a_tool_loop_through_the_official_client():
    async with official(replies=SUM_RULES) as client:
        items: list[Any] = [{"role": "user", "content": "what is 12 + 30?"}]
        response = await client.responses.create(model="m", input=items, tools=[ADD])
        (call,) = response.output
        assert (call.type, call.name, orjson.loads(call.arguments)) == ("function_call", "add", {"a": 12, "b": 30})
        items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        response = await client.responses.create(model="m", input=items, tools=[ADD])
    assert response.output_text == "It is 42."


async def test_a_stream_through_the_official_client():
    replies = [{"reasoning": "easy", "text": "here", "tool_calls": [{"name": "add", "arguments": {"a": "{user}"}}]}]
    async with official(replies=replies) as client:
        kinds = []
        async with client.responses.stream(model="m", input="12", tools=[ADD]) as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_response()
    assert final.output_text == "here"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert orjson.loads(final.output[2].arguments) == {"a": "12"}
    assert kinds[0] == "response.created"
    assert "response.reasoning_text.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    assert kinds[-1] == "response.completed"


async def test_chat_completions_through_the_official_client():
    messages: list[Any] = [{"role": "user", "content": "what is 1 + 2?"}]
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with official(replies=SUM_RULES) as client:
        completion = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        choice = completion.choices[0]
        assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == (
            "tool_calls",
            '{"a": 1, "b": 2}',
        )
        messages += [choice.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}]
        completion = await client.chat.completions.create(model="m", messages=messages, tools=tools)
    assert completion.choices[0].message.content == "It is 3."
    assert completion.choices[0].finish_reason == "stop"


async def test_a_chat_stream_through_the_official_client():
    async with official(replies=[{"text": "hi", "tool_calls": [{"name": "f", "arguments": "no json"}]}]) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        async with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}]) as helper:
            completion = await helper.get_final_completion()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hi"
    assert chunks[-1].usage.total_tokens > 0
    assert completion.choices[0].message.tool_calls[0].function.arguments == "no json"


async def test_tokens_are_counted_through_the_official_client_as_in_the_usage():
    async with serve_scripted() as url, AsyncAnthropic(base_url=url, api_key="none") as client:
        request: Any = {"model": "any", "system": "Be kind.", "messages": [{"role": "user", "content": "Say hello."}]}
        counted = (await client.messages.count_tokens(**request)).input_tokens
        message = await client.messages.create(**request, max_tokens=100)
        assert counted == message.usage.input_tokens > 0


async def test_rules_are_tried_in_order_and_all_conditions_must_hold():
    replies = [
        {"contains": "red", "turn": 2, "text": "never"},
        {"contains": "red", "text": "stop"},
        {"match": "(?i)GREEN", "text": "{0}: go"},
    ]
    async with official(replies=replies) as client:
        texts = [
            (await client.responses.create(model="m", input=text)).output_text for text in ("red", "is Green", "blue")
        ]
    assert texts == ["stop", "Green: go", "blue"]


async def test_what_is_filled_in_is_never_read_as_a_template_again():
    async with official(replies=[{"match": "(.*)", "text": "{1}|{turn}|{unknown}|{"}]) as client:
        response = await client.responses.create(model="m", input="{turn} {user}")
    assert response.output_text == "{turn} {user}|1|{unknown}|{"


async def test_replies_from_a_file(tmp_path: Path):
    file = tmp_path / "replies.jsonl"
    file.write_text('{"contains": "a", "text": "A"}\n\n{"contains": "b", "text": "B"}\n')
    async with official(file=str(file), replies=[{"contains": "ab", "text": "first"}]) as client:
        texts = [(await client.responses.create(model="m", input=text)).output_text for text in ("a", "b", "ab")]
    assert texts == ["A", "B", "first"]


def test_a_bad_line_of_a_file_is_named(tmp_path: Path):
    file = tmp_path / "replies.jsonl"
    file.write_text('{"text": "fine"}\n{"txt": "typo"}\n{"match": "(", "text": "x"}\n')
    with pytest.raises(UsageError) as wrong:
        SCRIPTED.read_replies(file)
    assert "replies.jsonl:2: " in str(wrong.value)
    assert "replies.jsonl:3: match" in str(wrong.value)


def test_a_reply_that_says_nothing_is_refused():
    with pytest.raises(ValidationError, match="a reply needs text or tool_calls"):
        SCRIPTED.Options(replies=[{"turn": 1}])


async def test_an_answer_longer_than_max_output_tokens_is_cut_between_characters():
    async with official(tokens=True) as client:
        response = await client.responses.create(model="m", input="aéé", max_output_tokens=4)
    assert response.output_text == "aé"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 3


@pytest.mark.parametrize(
    "reply", [{"tool_calls": [{"name": "add"}]}, {"text": "é" * 9}, {"text": "Hm.", "reasoning": "x" * 99}]
)
async def test_an_answer_that_is_cut_before_its_first_part_ends_is_not_a_full_context(reply: dict[str, Any]):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    options = {"tokens": True, "replies": [reply]}
    async with serve_scripted(**options) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        message = (await client.post("/v1/messages", json=body)).json()
        response = (await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1})).json()
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 1)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == 1 and len(response["output"][-1]["generation_token_ids"]) == 1


async def test_token_data_makes_one_segment_of_a_whole_rollout():
    segments: list[Segment] = []
    async with (
        serve_scripted(replies=SUM_RULES, tokens=True) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        items: list[Any] = [{"role": "user", "content": "5 + 6"}]
        for output in ("11", None):
            body = {"input": items, "tools": [ADD], "instructions": "add"}
            response = (await client.post("/v1/responses", json=body)).json()
            tokens = tokens_of(response)
            assert tokens is not None
            assert tokens.versions == [[0, len(tokens.generation_token_ids), 0]]
            extend(segments, tokens)
            items += response["output"]
            if output:
                items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": output})
    (segment,) = segments
    sampled = [bytes(segment["token_ids"][start:end]) for start, end in segment["mask"]]
    assert sampled == [b'<tool_call>add {"a": 5, "b": 6}</tool_call>\xfe', b"It is 11.\xfe"]
    assert len(segment["logprobs"]) == sum(map(len, sampled))
    assert all(logprob < 0 for logprob in segment["logprobs"])


async def test_chat_answers_have_tokens_in_vllms_form_on_request_and_a_model_without_tokens_refuses():
    options = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body = {"messages": [{"role": "user", "content": "hey"}], "logprobs": True, "top_logprobs": 0, **options}
    async with serve_scripted(tokens=True) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
    (choice,) = answer["choices"]
    sampled = choice["message"]["generation_token_ids"]
    assert bytes(sampled) == b"hey\xfe" and choice["token_ids"] == sampled
    assert answer["prompt_token_ids"] == choice["message"]["prompt_token_ids"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in sampled]
    assert [entry["logprob"] for entry in content] == choice["message"]["generation_log_probs"]
    async with serve_scripted() as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        plain = await client.post("/v1/chat/completions", json=body)
    for response in (stream, plain):
        assert response.status_code == 400
        assert {error["field"] for error in response.json()["errors"]} == {*options}


async def test_a_conversation_sent_back_without_its_token_data_still_begins_with_the_same_ids():
    async with serve_scripted(tokens=True) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        first = (await client.post("/v1/responses", json={"input": "one"})).json()
        tokens = first["output"][-1]
        history = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "two"},
        ]
        second = (await client.post("/v1/responses", json={"input": history})).json()
        foreign = tokens | {"prompt_token_ids": [151643]}
        response = await client.post("/v1/responses", json={"input": [foreign, {"role": "user", "content": "x"}]})
    before = tokens["prompt_token_ids"] + tokens["generation_token_ids"]
    assert second["output"][-1]["prompt_token_ids"][: len(before)] == before
    assert response.status_code == 400
