"""The Open Responses specification: answers and events have all fields, of the right types."""

from typing import Any

import chat_policy
import httpx
import orjson
import pytest
from local_services import local_services
from waiting import PATIENCE_S

from ngym.schema import Json

NONE = type(None)
RESPONSE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "object", "status", "model", "service_tier", "truncation"), (str,)),
    **dict.fromkeys(("created_at", "top_logprobs"), (int,)),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, NONE)),
    **dict.fromkeys(("previous_response_id", "instructions", "safety_identifier", "prompt_cache_key"), (str, NONE)),
    **dict.fromkeys(("incomplete_details", "error", "reasoning", "usage"), (dict, NONE)),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), (int, float)),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), (bool,)),
    **dict.fromkeys(("output", "tools"), (list,)),
    "tool_choice": (str, dict),
    "text": (dict,),
    "metadata": (dict,),
}
TOOL: dict[str, tuple[type, ...]] = {
    "type": (str,),
    "name": (str,),
    "description": (str, NONE),
    "parameters": (dict, NONE),
    "strict": (bool, NONE),
}
ITEMS: dict[str, dict[str, tuple[type, ...]]] = {
    "message": {"id": (str,), "status": (str,), "role": (str,), "content": (list,)},
    "function_call": {"id": (str,), "status": (str,), "call_id": (str,), "name": (str,), "arguments": (str,)},
    "reasoning": {"id": (str,), "summary": (list,)},
}
PARTS: dict[str, dict[str, tuple[type, ...]]] = {
    "output_text": {"text": (str,), "annotations": (list,), "logprobs": (list,)},
    "refusal": {"refusal": (str,)},
    "reasoning_text": {"text": (str,)},
}
IN_ITEM: dict[str, tuple[type, ...]] = {"item_id": (str,), "output_index": (int,)}
IN_PART = IN_ITEM | {"content_index": (int,)}
EVENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "response.created": {"response": (dict,)},
    "response.in_progress": {"response": (dict,)},
    "response.completed": {"response": (dict,)},
    "response.output_item.added": {"output_index": (int,), "item": (dict,)},
    "response.output_item.done": {"output_index": (int,), "item": (dict,)},
    "response.content_part.added": IN_PART | {"part": (dict,)},
    "response.content_part.done": IN_PART | {"part": (dict,)},
    "response.output_text.delta": IN_PART | {"delta": (str,), "logprobs": (list,)},
    "response.output_text.done": IN_PART | {"text": (str,), "logprobs": (list,)},
    "response.reasoning_text.delta": IN_PART | {"delta": (str,)},
    "response.reasoning_text.done": IN_PART | {"text": (str,)},
    "response.function_call_arguments.delta": IN_ITEM | {"delta": (str,)},
    "response.function_call_arguments.done": IN_ITEM | {"arguments": (str,)},
}
WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a place",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


def input_message(role: str, content: Any) -> Json:
    return {"type": "message", "role": role, "content": content}


CASES: dict[str, Json] = {
    "text": {"input": [input_message("user", "Say hello.")]},
    "a system prompt": {"input": [input_message("system", "Speak as a pirate."), input_message("user", "Say hello.")]},
    "a tool": {"input": [input_message("user", "What is the weather like in Oslo?")], "tools": [WEATHER]},
    "an image": {
        "input": [
            input_message(
                "user", [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PIXEL}]
            )
        ]
    },
    "reasoning": {"input": [input_message("user", "Think of a number.")]},
    "several turns": {
        "input": [
            input_message("user", "I am Alice."),
            input_message("assistant", "Hello."),
            input_message("user", "Who am I?"),
        ]
    },
    "every option": {
        "input": "x",
        "instructions": "i",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "metadata": {"a": "b"},
        "max_output_tokens": 1000,
        "service_tier": "default",
        "tool_choice": "none",
        "tools": [WEATHER],
        "store": False,
        "truncation": "disabled",
    },
}
REPLIES = [
    {"contains": "weather", "tool_calls": [{"name": "get_weather", "arguments": {"location": "Oslo"}}]},
    {"contains": "number", "reasoning": "One to ten.", "text": "Seven."},
]


def has(value: Json, fields: dict[str, tuple[type, ...]], where: str) -> None:
    for name, kinds in fields.items():
        assert name in value, f"{where} lacks {name}"
        right = isinstance(value[name], kinds) and not (isinstance(value[name], bool) and bool not in kinds)
        assert right, f"{where}.{name} is {value[name]!r}"


def check_item(item: Json, where: str) -> None:
    has(item, ITEMS[item["type"]], where)
    for part in item.get("content") or ():
        has(part, PARTS[part["type"]], f"{where}.content")


def check_response(response: Json, status: str) -> None:
    has(response, RESPONSE, "response")
    assert (response["object"], response["status"]) == ("response", status)
    for tool in response["tools"]:
        has(tool, TOOL, "tool")
    assert response["text"]["format"]["type"] in ("text", "json_schema")
    if response["reasoning"]:
        has(response["reasoning"], {"effort": (str, NONE), "summary": (str, NONE)}, "reasoning")
    for index, item in enumerate(response["output"]):
        check_item(item, f"output[{index}]")
    if status == "completed":
        assert response["output"]
        counts = {"input_tokens": (int,), "output_tokens": (int,), "total_tokens": (int,)}
        has(response["usage"], counts, "usage")
        has(response["usage"]["input_tokens_details"], {"cached_tokens": (int,)}, "usage")
        has(response["usage"]["output_tokens_details"], {"reasoning_tokens": (int,)}, "usage")


def events_of(text: str) -> list[Json]:
    *blocks, last, end = text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("native", ["responses", "chat"])
async def test_an_answer_and_its_stream_are_as_the_specification_has_them(native: str, case: str):
    app = chat_policy.SCRIPTED.app if native == "responses" else chat_policy.app
    async with (
        local_services({"policy": {"replies": REPLIES}}, policy=app) as peers,
        httpx.AsyncClient(base_url=f"{peers.urls['policy'][0]}/v1", timeout=PATIENCE_S) as client,
    ):
        response = await client.post("/responses", json={"model": "m", "stream": False, **CASES[case]})
        streamed = await client.post("/responses", json={"model": "m", "stream": True, **CASES[case]})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    check_response(response.json(), "completed")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    for event in events:
        has(event, EVENTS[event["type"]], event["type"])
        if "response" in event:
            check_response(event["response"], "in_progress" if event is not events[-1] else "completed")
        if "item" in event:
            check_item(event["item"], event["type"])
        if "part" in event:
            has(event["part"], PARTS[event["part"]["type"]], event["type"])
    if case == "a tool":
        assert [item["type"] for item in response.json()["output"]] == ["function_call"]
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= set(kinds)
    text = "".join(event["delta"] for event in events if "delta" in event and "reasoning" not in event["type"])
    if case == "reasoning":
        assert [item["type"] for item in response.json()["output"]] == ["reasoning", "message"]
        assert "response.reasoning_text.delta" in kinds
    final = events[-1]["response"]["output"][-1]
    assert text == (final["arguments"] if case == "a tool" else final["content"][0]["text"])
