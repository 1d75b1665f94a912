"""Responses items as the messages of a verifiers trace, and a task's prompt as Responses items."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import ModelCall
from verifiers.v1.types import ImageUrlContentPart, ToolCall, Usage

from ngym.schema import Json


def record_prompt(trace: vf.Trace[Any, Any, Any], messages: Iterable[vf.Message]) -> None:
    """Add what the model did not say."""
    for message in messages:
        _append(trace, message, sampled=False)


def record_turn(trace: vf.Trace[Any, Any, Any], response: Json) -> list[vf.Message]:
    """Add what the model, and the tools it called, said; the last call carries the response's usage and whether it was cut off."""
    messages = messages_of(response.get("output") or [])
    for message in messages:
        sampled = isinstance(message, vf.AssistantMessage)
        _append(trace, message, sampled=sampled)
        if sampled:
            finish = "tool_calls" if message.tool_calls else "stop"
            trace.calls.append(ModelCall(node=len(trace.nodes) - 1, finish_reason=finish))
    if trace.calls:
        if response.get("status") == "incomplete":
            trace.calls[-1].finish_reason = "length"
        trace.calls[-1].usage = _usage(response.get("usage"))
    return messages


def messages_of(items: Sequence[Json]) -> list[vf.Message]:
    """Output items as messages: reasoning, text and calls up to a tool's answer or the user's next word are one."""
    messages: list[vf.Message] = []
    names = {item.get("call_id"): item.get("name") for item in items if item.get("type") == "function_call"}
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            call_id = item["call_id"]
            messages.append(
                vf.ToolMessage(tool_call_id=call_id, content=_text(item.get("output")), name=names.get(call_id))
            )
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(vf.UserMessage(content=_text(item.get("content"))))
        else:
            _say(messages, kind, item)
    return messages


def prompt_of(data: vf.TaskData) -> list[vf.Message]:
    """A task's prompt as messages."""
    system = [] if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt)]
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [*system, *prompt]


def items_of(messages: Iterable[vf.Message]) -> list[Json]:
    """A prompt's messages as input items. ValueError for one that calls tools."""
    return [{"role": message.role, "content": _content(message)} for message in messages]


def _say(messages: list[vf.Message], kind: str, item: Json) -> None:
    if not messages or not isinstance(messages[-1], vf.AssistantMessage):
        messages.append(vf.AssistantMessage())
    said = messages[-1]
    if kind == "message":
        said.content = (said.content or "") + _text(item.get("content"))
    elif kind == "reasoning":
        said.reasoning_content = (said.reasoning_content or "") + _text(item.get("content") or item.get("summary"))
    elif kind == "function_call":
        call = ToolCall(id=item["call_id"], name=item["name"], arguments=item.get("arguments") or "{}")
        said.tool_calls = [*(said.tool_calls or []), call]


def _append(trace: vf.Trace[Any, Any, Any], message: vf.Message, *, sampled: bool) -> None:
    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled, timestamp=time.time()))


def _usage(usage: Json | None) -> Usage | None:
    if not usage:
        return None
    return Usage(prompt_tokens=usage.get("input_tokens") or 0, completion_tokens=usage.get("output_tokens") or 0)


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _content(message: vf.Message) -> Any:
    if isinstance(message, vf.ToolMessage) or getattr(message, "tool_calls", None):
        raise ValueError("the prompt has calls of tools in it; such a task cannot be exported")
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return [
        {"type": "input_image", "image_url": part.image_url.url, "detail": "auto"}
        if isinstance(part, ImageUrlContentPart)
        else {"type": "input_text", "text": part.text}
        for part in content
    ]
