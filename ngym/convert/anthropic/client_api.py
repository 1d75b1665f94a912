"""Anthropic's Messages API for clients: their request -> ours, a Chat Completion -> their answer.

`cache_control` has no effect (prefixes are always cached), `thinking.display` neither (thinking is always shown). A
Response that did not fit the context says `model_context_window_exceeded`.
"""

from __future__ import annotations

from typing import Any

from ngym.convert.anthropic.blocks import blocks_from_items, items_from_blocks
from ngym.convert.chat.requests import chat_request
from ngym.convert.chat.responses import response_from_chat
from ngym.convert.reasoning.think_tags import ReasoningStyle
from ngym.convert.validate.request_fields import SAMPLING
from ngym.schema import Json

_SAME = ("model", "temperature", "top_p", "stream", *SAMPLING)
_FINISH = {"length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}
_TIERS = {"standard_only": "default"}


def chat_from_messages_api(body: Json, *, style: ReasoningStyle = "field") -> Json:
    """A checked Messages request -> Chat Completions request, with token data, `thinking_blocks` and `thinking`.

    style: where the back end reads and leaves reasoning; see ReasoningStyle.

    Raises:
        BadRequest: a block or tool that has no counterpart; it is named.
    """
    return chat_request(create_params_from_messages_api(body), style=style, tokens=True)


def create_params_from_messages_api(body: Json) -> Json:
    """A checked Messages request -> Responses create params; `thinking` stays for a back end that is Anthropic's."""
    params: Json = {name: body[name] for name in _SAME if name in body}
    params["input"] = items_from_blocks(body["messages"])
    params["max_output_tokens"] = body["max_tokens"]
    if body.get("system"):
        system = body["system"]
        params["instructions"] = system if isinstance(system, str) else "\n\n".join(part["text"] for part in system)
    if body.get("stop_sequences"):
        params["stop"] = body["stop_sequences"]
    if body.get("metadata", {}).get("user_id"):
        params["user"] = body["metadata"]["user_id"]
    if "service_tier" in body:
        params["service_tier"] = _TIERS.get(body["service_tier"], body["service_tier"])
    return params | _thinking(body) | _format(body) | _tools(body)


def messages_api_from_chat(completion: Json, body: Json | None = None, *, style: ReasoningStyle = "field") -> Json:
    """A Chat Completion -> an Anthropic message; token data is on its last block, `ng` beside the content.

    body: the request; its model stands in where the completion has no name of its own. style: as above.

    Raises:
        UpstreamError: there is no choice in it, or the engine gave up half-way.
    """
    response = response_from_chat(completion, body or {}, style=style)
    choice = completion["choices"][0]
    answer = new_message(response["id"].removeprefix("resp_"), response["model"])
    answer["content"] = blocks_from_items(response["output"])
    usage = completion.get("usage")
    kinds = {block["type"] for block in answer["content"]}
    refused = any(part["type"] == "refusal" for item in response["output"] for part in item.get("content") or ())
    answer |= stop_of(choice.get("finish_reason"), choice.get("stop_reason"), usage, "tool_use" in kinds, refused)
    answer["usage"] = messages_api_usage(usage)
    return answer | ({"ng": completion["ng"]} if "ng" in completion else {})


def new_message(stem: str, model: str) -> Json:
    """An Anthropic message in which nothing has been said."""
    return {
        "id": f"msg_{stem}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": messages_api_usage(None),
    }


def stop_of(finish: str | None, met: Any, usage: Json | None, called: bool, refused: bool) -> Json:
    """Why the model stopped: `stop_reason` and `stop_sequence`.

    met: vLLM's `stop_reason`, the stop string (or token) that was met. called, refused: what the message holds.
    """
    reason = _FINISH.get(finish or "", "end_turn")
    if finish == "length" and usage and usage.get("completion_tokens") == 0:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}  # as overflow_response says it
    if reason == "end_turn" and isinstance(met, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": met}
    if reason == "end_turn" and (called or refused):
        reason = "tool_use" if called else "refusal"
    return {"stop_reason": reason, "stop_sequence": None}


def messages_api_usage(usage: Json | None) -> Json:
    """Chat usage -> Anthropic's, in which the cached part of the input is counted apart; unknown is null."""
    usage = usage or {}
    prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details") or {}
    read, written = details.get("cached_tokens"), details.get("cache_write_tokens")
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return {
        "input_tokens": None if prompt is None else prompt - (read or 0) - (written or 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": usage.get("completion_tokens"),
        "output_tokens_details": None if reasoning is None else {"thinking_tokens": reasoning},
    }


def _thinking(body: Json) -> Json:
    effort = (body.get("output_config") or {}).get("effort")
    config = body.get("thinking")
    if config is None:
        return {"reasoning": {"effort": effort}} if effort else {}
    if config["type"] == "disabled":
        return {"thinking": config, "reasoning": {"effort": "none"}}
    return {"thinking": config} | ({"reasoning": {"effort": effort}} if effort else {})


def _format(body: Json) -> Json:
    wanted = (body.get("output_config") or {}).get("format")
    if not wanted:
        return {}
    return {"text": {"format": {"type": "json_schema", "name": "answer", "schema": wanted["schema"], "strict": True}}}


def _tools(body: Json) -> Json:
    tools = body.get("tools")
    if not tools:
        return {}
    result: Json = {"tools": [_tool(tool) for tool in tools]}
    choice = body.get("tool_choice") or {"type": "auto"}
    named = {"type": "function", "name": choice.get("name")}
    result["tool_choice"] = {"any": "required", "tool": named}.get(choice["type"], choice["type"])
    if "disable_parallel_tool_use" in choice:
        result["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return result


def _tool(tool: Json) -> Json:
    described = {"description": tool["description"]} if tool.get("description") else {}
    parameters = {"parameters": tool["input_schema"], "strict": bool(tool.get("strict"))}
    return {"type": "function", "name": tool["name"], **described, **parameters}
