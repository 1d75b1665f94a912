"""A finished answer as the stream that a client expects: every event of the specification, numbered, a delta a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from ngym.schema import Json

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
    for name in ("reasoning_content", "content", "refusal"):
        if message.get(name):
            more = {"logprobs": choice["logprobs"]} if name == "content" else {}
            yield chunk({name: message[name]}, **more)
    for index, call in enumerate(message.get("tool_calls") or ()):
        start = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
        yield chunk({"tool_calls": [start]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]})
    spoken = ("role", "content", "refusal", "reasoning_content", "tool_calls")
    extra = {name: value for name, value in message.items() if name not in spoken}  # token data
    yield chunk(extra, choice["finish_reason"])
    if include_usage:
        yield {**head, "choices": [], "usage": completion["usage"]}


def _response_events(response: Json) -> Iterator[tuple[str, Json]]:
    started = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    started |= {"incomplete_details": None, "error": None}
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(response["output"]):
        place = {"item_id": item.get("id"), "output_index": index}
        yield "response.output_item.added", {"output_index": index, "item": _begun(item)}
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


def _begun(item: Json) -> Json:
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
        empty: Json = {**part, field: ""} | ({"logprobs": []} if "logprobs" in part else {})
        logprobs = {"logprobs": part.get("logprobs") or []} if part["type"] == "output_text" else {}
        yield "response.content_part.added", {**at, "part": empty}
        if part[field]:
            yield f"{name}.delta", {**at, "delta": part[field], **logprobs}
        yield f"{name}.done", {**at, field: part[field], **logprobs}
        yield "response.content_part.done", {**at, "part": part}


def _summary_events(parts: list[Json], place: Json) -> Iterator[tuple[str, Json]]:
    for index, part in enumerate(parts):
        at = {**place, "summary_index": index}
        yield "response.reasoning_summary_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**at, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**at, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**at, "part": part}
