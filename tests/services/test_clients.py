"""The official clients of OpenAI and Anthropic against a model server, for each API of its back end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anthropic
import chat_policy
import openai
import orjson
import pytest
from anthropic import AsyncAnthropic
from local_services import local_services
from openai import AsyncOpenAI
from pydantic import BaseModel
from waiting import PATIENCE_S

REPLIES: list[dict[str, Any]] = [
    {
        "contains": "weather",
        "turn": 1,
        "reasoning": "Two cities, two calls.",
        "tool_calls": [
            {"name": "weather", "arguments": {"city": "Oslo"}},
            {"name": "weather", "arguments": {"city": "Rome"}},
        ],
    },
    {"contains": "weather", "turn": 2, "text": "The last one says {tool_output}."},
    {"contains": "city", "text": '{"city": "Oslo", "people": 700000}'},
    {"contains": "poem", "reasoning": "Short.", "text": "Roses are red,\n\nviolets  are blue."},
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


class City(BaseModel):
    city: str
    people: int


@pytest.fixture(params=["responses", "chat"])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A model server whose back end has this API."""
    app = chat_policy.SCRIPTED.app if request.param == "responses" else chat_policy.app
    async with local_services({"policy": {"replies": REPLIES, "tokens": True}}, policy=app) as peers:
        yield peers.urls["policy"][0]


@asynccontextmanager
async def openais(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@asynccontextmanager
async def anthropics(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


async def test_responses_create_in_a_tool_loop_with_parallel_calls(url: str):
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    items: list[Any] = [{"role": "user", "content": "weather?"}]
    async with openais(url) as client:
        first = await client.responses.create(model="m", input=items, tools=tools, instructions="Be brief.")
        calls = [item for item in first.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        for call, output in zip(calls, ("snow", "sun"), strict=True):
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        second = await client.responses.create(model="m", input=items, tools=tools, instructions="Be brief.")
    assert [item.type for item in first.output] == ["reasoning", "function_call", "function_call"]
    assert [orjson.loads(call.arguments) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert second.output_text == "The last one says sun."
    assert (second.status, second.instructions) == ("completed", "Be brief.")
    assert second.usage is not None
    assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens


async def test_responses_stream_says_each_word_as_it_comes(url: str):
    async with openais(url) as client, client.responses.stream(model="m", input="poem") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    words = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(words) > 3
    assert "".join(words) == final.output_text == "Roses are red,\n\nviolets  are blue."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[-1].model_extra is not None
    assert final.output[-1].model_extra["generation_token_ids"]


async def test_responses_create_with_stream_shows_each_call(url: str):
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    async with openais(url) as client:
        stream = await client.responses.create(model="m", input="weather?", tools=tools, stream=True)
        events = [event async for event in stream]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [orjson.loads(event.arguments) for event in done] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert [event.name for event in done] == ["weather", "weather"]


async def test_responses_parse_gives_a_record(url: str):
    async with openais(url) as client:
        response = await client.responses.parse(model="m", input="which city?", text_format=City)
    assert response.output_parsed == City(city="Oslo", people=700_000)


async def test_a_conversation_continues_from_the_id_of_a_response(url: str):
    async with openais(url) as client:
        first = await client.responses.create(model="m", input="which city?")
        async with client.responses.stream(model="m", input="again", previous_response_id=first.id) as stream:
            second = await stream.get_final_response()
        third = await client.responses.create(
            model="m", input=[{"role": "user", "content": "once more"}], previous_response_id=second.id, store=False
        )
        stored = await client.responses.retrieve(second.id)
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        with pytest.raises(openai.BadRequestError, match="no background responses"):
            await client.responses.cancel(second.id)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="no stored response") as caught:
            await client.responses.create(model="m", input="x", previous_response_id=second.id)
        with pytest.raises(openai.NotFoundError, match="store: false"):
            await client.responses.retrieve(third.id)
    assert (stored.id, stored.output_text, stored.previous_response_id, stored.store) == (
        second.id,
        "again",
        first.id,
        True,
    )
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
    assert caught.value.param == "previous_response_id"
    assert third.store is False
    ids = [response.output[-1].model_extra for response in (first, second, third)]
    for before, after in pairwise(ids):
        assert before is not None
        assert after is not None
        all_ids = before["prompt_token_ids"] + before["generation_token_ids"]
        assert after["prompt_token_ids"][: len(all_ids)] == all_ids


async def test_chat_completions_in_a_tool_loop(url: str):
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "weather?"}]
    async with openais(url) as client:
        first = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0]
        assert first.message.tool_calls is not None
        messages.append(first.message.model_dump(exclude_none=True))
        for call, output in zip(first.message.tool_calls, ("snow", "sun"), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        second = await client.chat.completions.create(model="m", messages=messages, tools=tools)
    assert first.finish_reason == "tool_calls"
    assert second.choices[0].message.content == "The last one says sun."
    assert second.choices[0].finish_reason == "stop"


async def test_chat_completions_stream_with_and_without_usage(url: str):
    messages: list[Any] = [{"role": "user", "content": "poem"}]
    async with openais(url) as client:
        plain = await client.chat.completions.create(model="m", messages=messages, stream=True)
        without = [chunk async for chunk in plain]
        counted = await client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in counted]
        async with client.chat.completions.stream(model="m", messages=messages) as helper:
            completion = await helper.get_final_completion()
    assert all(chunk.choices and chunk.usage is None for chunk in without)
    words = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(words) > 3
    assert "".join(words) == completion.choices[0].message.content == "Roses are red,\n\nviolets  are blue."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert [chunk.choices[0].finish_reason for chunk in without][-1] == "stop"


async def test_chat_completions_parse_gives_a_record(url: str):
    async with openais(url) as client:
        completion = await client.chat.completions.parse(
            model="m", messages=[{"role": "user", "content": "which city?"}], response_format=City
        )
    assert completion.choices[0].message.parsed == City(city="Oslo", people=700_000)


async def test_anthropic_messages_in_a_tool_loop(url: str):
    tools: list[Any] = [{"name": "weather", "input_schema": CITY}]
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    async with anthropics(url) as client:
        first = await client.messages.create(
            model="m", max_tokens=900, messages=messages, tools=tools, system="Be brief."
        )
        uses = [block for block in first.content if block.type == "tool_use"]
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": output}
            for use, output in zip(uses, ("snow", "sun"), strict=True)
        ]
        messages.append({"role": "user", "content": results})
        second = await client.messages.create(
            model="m", max_tokens=900, messages=messages, tools=tools, system="Be brief."
        )
    assert (first.stop_reason, [use.input for use in uses]) == ("tool_use", [{"city": "Oslo"}, {"city": "Rome"}])
    assert second.content[-1].type == "text"
    assert second.content[-1].text == "The last one says sun."
    assert (second.stop_reason, second.role) == ("end_turn", "assistant")
    assert second.usage.output_tokens > 0


async def test_anthropic_stream_says_each_word_as_it_comes(url: str):
    async with anthropics(url) as client:
        async with client.messages.stream(
            model="m", max_tokens=900, messages=[{"role": "user", "content": "poem"}]
        ) as stream:
            words = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        async with client.messages.stream(
            model="m",
            max_tokens=900,
            messages=[{"role": "user", "content": "weather?"}],
            tools=[{"name": "weather", "input_schema": CITY}],
        ) as stream:
            called = await stream.get_final_message()
    assert len(words) > 3
    assert "".join(words) == "Roses are red,\n\nviolets  are blue."
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.usage.output_tokens > 0
    assert [block.input for block in called.content if block.type == "tool_use"] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert called.stop_reason == "tool_use"


async def test_anthropic_max_tokens_cut_an_answer_off(url: str):
    async with anthropics(url) as client:
        cut = await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "a b c d e"}])
    assert (cut.stop_reason, cut.content[0].type) == ("max_tokens", "text")


async def test_each_client_raises_its_own_error_with_our_words(url: str):
    async with openais(url) as client:
        with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as chat:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], extra_body={"temperatur": 1}
            )
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].role"):
            await client.responses.create(model="m", input=[{"role": "usr", "content": "x"}], stream=True)  # type: ignore[list-item,misc]
    async with anthropics(url) as client:
        with pytest.raises(anthropic.BadRequestError, match="did you mean 'temperature'") as messages:
            await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}], extra_body={"temperatur": 1}
            )
    assert chat.value.param == "temperatur"
    assert isinstance(messages.value.body, dict)
    assert messages.value.body["type"] == "error"
    assert messages.value.body["error"]["type"] == "invalid_request_error"
