"""A finished answer as the stream that a client expects: every event of the specification, numbered, a delta a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from ngym.convert.reasoning.signed_reasoning import BETWEEN
from ngym.schema import TOKEN_FIELDS, Json

SSE_DONE = b"data: [DONE]\n\n"


def sse(event: Json) -> bytes:
    """One server-sent event; Responses events carry their type as the event's name, Chat chunks have none."""
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + orjson.dumps(event) + b"\n\n"


def response_events(response: Json) -> Iterator[Json]:
    """A finished Response -> its events, `sequence_number` from 0 on."""
    for number, (kind, event) in enumerate(_response_events(response)):
        yield {"type": kind, "sequence_number": number, **event}


def chat_chunks(completion: Json, *, include_usage: bool = False) -> Iterator[Json]:
    """A finished Chat Completion -> its chunks; usage, if asked for, in a last one without choices."""
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = completion["choices"][0]
    message = choice["message"]

    def chunk(delta: Json, finish: str | None = None, **more: Any) -> Json:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None, **more}]}

    yield chunk({"role": "assistant", "content": ""})
    for delta in _reasoning_deltas(message):
        yield chunk(delta)
    for name in ("content", "refusal"):
        if message.get(name):
            more = {"logprobs": choice.get("logprobs")} if name == "content" else {}
            yield chunk({name: message[name]}, **more)
    for index, call in enumerate(message.get("tool_calls") or ()):
        start = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
        yield chunk({"tool_calls": [start]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]})
    beside = {name: message[name] for name in TOKEN_FIELDS if name in message}
    if "stop_reason" in choice:  # vLLM's: the stop string that was met
        beside["stop_reason"] = choice["stop_reason"]
    yield chunk({}, choice["finish_reason"], **beside) | ({"ng": completion["ng"]} if "ng" in completion else {})
    if include_usage:
        yield {**head, "choices": [], "usage": completion.get("usage")}


def _reasoning_deltas(message: Json) -> Iterator[Json]:
    """Reasoning in one piece; signed reasoning block by block, each with its signature after it."""
    blocks = message.get("thinking_blocks") or ()
    if not blocks and message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    between = ""
    for block in blocks:
        if block.get("thinking"):
            yield {"reasoning_content": between + block["thinking"]}
            between = BETWEEN
        yield {"thinking_blocks": [block]}


def _response_events(response: Json) -> Iterator[tuple[str, Json]]:
    started = begun_response(response)
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(response["output"]):
        place = {"item_id": item.get("id"), "output_index": index}
        yield "response.output_item.added", {"output_index": index, "item": begun_item(item)}
        match item["type"]:
            case "message":
                yield from _content_events(item["content"], place)
            case "function_call":
                arguments = item["arguments"]
                if arguments:
                    yield "response.function_call_arguments.delta", {**place, "delta": arguments}
                yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}
            case "reasoning":
                yield from _summary_events(item["summary"], place)
                yield from _content_events(item.get("content") or [], place)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def begun_response(response: Json) -> Json:
    """A Response as it was before anything was said in it."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    return begun | {"incomplete_details": None, "error": None}


def begun_item(item: Json) -> Json:
    """An item as it was before anything was said in it."""
    begun = {name: [] if name in ("content", "summary") else value for name, value in item.items()}
    if "arguments" in begun:
        begun["arguments"] = ""
    if "status" in begun:
        begun["status"] = "in_progress"
    return begun


def _content_events(parts: list[Json], place: Json) -> Iterator[tuple[str, Json]]:
    for index, part in enumerate(parts):
        at = {**place, "content_index": index}
        field = "refusal" if part["type"] == "refusal" else "text"
        name = "response." + part["type"]  # output_text, refusal, reasoning_text
        logprobs = {"logprobs": part.get("logprobs") or []} if part["type"] == "output_text" else {}
        yield "response.content_part.added", {**at, "part": empty_part(part)}
        if part[field]:
            yield f"{name}.delta", {**at, "delta": part[field], **logprobs}
        yield f"{name}.done", {**at, field: part[field], **logprobs}
        yield "response.content_part.done", {**at, "part": part}


def empty_part(part: Json) -> Json:
    """A part as it was before anything was said in it."""
    field = "refusal" if part["type"] == "refusal" else "text"
    return {**part, field: ""} | ({"logprobs": []} if "logprobs" in part else {})


def _summary_events(parts: list[Json], place: Json) -> Iterator[tuple[str, Json]]:
    for index, part in enumerate(parts):
        at = {**place, "summary_index": index}
        yield "response.reasoning_summary_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**at, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**at, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**at, "part": part}
