"""Converts Responses requests to Chat Completions requests, and back.

Dropped in Chat requests, because they have no counterpart: `store`, `metadata` (except the JSON strings
`metadata.extra_body` and `metadata.chat_template_kwargs`, which are applied), `include` other than logprobs,
`max_tool_calls` (it bounds only built-in tools), keys of `reasoning` other than the effort, `truncation: disabled`,
`thinking` (Anthropic's; but see `tokens`), keys of a function tool other than name, description, parameters and strict,
an item's status and id. In Responses requests a message's `name` is dropped. Everything else is translated, passed on
under the same name (PASSED), or refused.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from ngym.convert.chat_items import items_from_messages, messages_from_items
from ngym.convert.reasoning import ReasoningStyle
from ngym.convert.request_validation import SAMPLING, VLLM_CHAT
from ngym.errors import BadRequest, Problem, refused
from ngym.schema import Json

PASSED = (
    "model",
    "temperature",
    "top_p",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    *SAMPLING,
)
"""Fields with the same name and meaning on both sides."""
LOGPROBS = "message.output_text.logprobs"
MaxTokensField = Literal["max_completion_tokens", "max_tokens"]


def chat_request(
    params: Json,
    *,
    style: ReasoningStyle = "field",
    tokens: bool = False,
    max_tokens_field: MaxTokensField = "max_completion_tokens",
) -> Json:
    """Convert checked create params to a Chat Completions request (without `stream`).

    Args:
        style, tokens: as in `messages_from_items`.
        max_tokens_field: the back end's name of `max_output_tokens`; older servers only know `max_tokens`.

    Raises:
        BadRequest: something has no Chat form (built-in tools, truncation "auto", some items and parts).
    """
    if params.get("truncation") == "auto":
        raise BadRequest("field 'truncation': 'auto' is not supported by this model's back end; shorten the input")
    passed = (*PASSED, "thinking") if tokens else PASSED
    request = {name: params[name] for name in passed if params.get(name) is not None}
    request["messages"] = messages_from_items(params["input"], params.get("instructions"), style=style, tokens=tokens)
    if params.get("max_output_tokens") is not None:
        request[max_tokens_field] = params["max_output_tokens"]
    effort = (params.get("reasoning") or {}).get("effort")
    if effort is not None:
        request["reasoning_effort"] = effort
    if wants_logprobs(params):
        request |= {"logprobs": True, "top_logprobs": params.get("top_logprobs") or 0}
    extra = extra_body(params)
    templated = {name: extra[name] for name in ("chat_template_kwargs",) if name in extra}  # merged with the request's
    return extra | request | templated | _chat_text(params.get("text") or {}) | _chat_tools(params)


def create_params(request: Json, *, style: ReasoningStyle = "field") -> Json:
    """Convert a checked Chat Completions request to create params (without `stream`).

    Raises:
        BadRequest: a field has no form in the Responses API.
    """
    unsupported = sorted(name for name in VLLM_CHAT.keys() & request.keys() if (name, request[name]) != ("n", 1))
    if unsupported:
        why = "is not supported by this model's back end (models/vllm supports it); leave it out"
        raise refused(Problem(name, why) for name in unsupported)
    params = {name: request[name] for name in (*PASSED, "thinking") if request.get(name) is not None}
    params["input"] = items_from_messages(request["messages"], style=style)
    for name in ("max_tokens", "max_completion_tokens"):
        if request.get(name) is not None:
            params["max_output_tokens"] = request[name]
    for name in ("metadata", "store", "parallel_tool_calls"):
        if request.get(name) is not None:
            params[name] = request[name]
    if request.get("reasoning_effort") is not None:
        params["reasoning"] = {"effort": request["reasoning_effort"]}
    if request.get("logprobs"):
        params |= {"include": [LOGPROBS], "top_logprobs": request.get("top_logprobs") or 0}
    text = _responses_text(request)
    if text:
        params["text"] = text
    if request.get("tools"):
        params["tools"] = [_responses_tool(tool) for tool in request["tools"]]
    choice = request.get("tool_choice")
    if choice is not None:
        params["tool_choice"] = choice if isinstance(choice, str) else _responses_choice(choice)
    return params


def without_allowed_tools(request: Json) -> Json:
    """The request with `allowed_tools` applied to its list of tools, for back ends without this choice."""
    match request.get("tool_choice"):
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*allowed]}}:
            names = {tool["function"]["name"] for tool in allowed}
            tools = [tool for tool in request["tools"] if tool["function"]["name"] in names]
            return request | {"tools": tools, "tool_choice": mode}
    return request


def wants_logprobs(params: Json) -> bool:
    """Whether the request asks for the logprobs of the text."""
    return LOGPROBS in (params.get("include") or ()) or bool(params.get("top_logprobs"))


def extra_body(params: Json) -> Json:
    """Engine parameters of a NeMo Gym row in `metadata` (JSON strings); the request's own fields take precedence.

    Raises:
        BadRequest: a string is not a JSON object.
    """
    metadata = params.get("metadata") or {}
    extra: Json = {}
    if "extra_body" in metadata:
        extra = {k: v for k, v in _json_object(metadata, "extra_body").items() if params.get(k) is None}
    if "chat_template_kwargs" in metadata:
        own = params.get("chat_template_kwargs") or {}
        extra["chat_template_kwargs"] = _json_object(metadata, "chat_template_kwargs") | own
    return extra


def _json_object(metadata: Json, name: str) -> Json:
    try:
        value = orjson.loads(metadata[name])
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise BadRequest(f"field 'metadata.{name}': must be a JSON object in a string, such as '{{\"top_k\": 20}}'")
    return value


def _chat_tools(params: Json) -> Json:
    """tools, tool_choice and parallel_tool_calls; without tools, the latter two are left out."""
    tools = params.get("tools")
    if not tools:
        return {}
    result: Json = {"tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]}
    choice = params.get("tool_choice")
    if choice is not None:
        result["tool_choice"] = choice if isinstance(choice, str) else _chat_choice(choice)
    if params.get("parallel_tool_calls") is not None:
        result["parallel_tool_calls"] = params["parallel_tool_calls"]
    return result


def _chat_tool(tool: Json, where: str) -> Json:
    if tool["type"] != "function":
        raise BadRequest(f"field '{where}.type': this model's back end knows 'function' only, not {tool['type']!r}")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _responses_tool(tool: Json) -> Json:
    """Convert a tool with explicit `strict`: the default is false in Chat Completions and true in the Responses API."""
    function = tool["function"]
    names = ("name", "description", "parameters")
    given = {name: function[name] for name in names if function.get(name) is not None}
    return {"type": "function", **given, "strict": bool(function.get("strict"))}


def _chat_choice(choice: Json) -> Json:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_chat_choice(t) for t in tools]}}
        case _:
            raise BadRequest("field 'tool_choice': must be none, auto, required or {'type': 'function', 'name': ...}")


def _responses_choice(choice: Json) -> Json:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}:
            return {"type": "allowed_tools", "mode": mode, "tools": [_responses_choice(tool) for tool in tools]}
        case _:
            named = "{'type': 'function', 'function': {'name': ...}}"
            raise BadRequest(f"field 'tool_choice': must be none, auto, required or {named}")


def _chat_text(text: Json) -> Json:
    result: Json = {}
    match text.get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_schema", **schema}:
            result["response_format"] = {"type": "json_schema", "json_schema": schema}
        case {"type": "json_object"}:
            result["response_format"] = {"type": "json_object"}
        case other:
            raise BadRequest(
                f"field 'text.format': {_kind(other)!r} is not known; use text, json_schema or json_object"
            )
    if text.get("verbosity") is not None:
        result["verbosity"] = text["verbosity"]
    return result


def _responses_text(request: Json) -> Json:
    result: Json = {}
    match request.get("response_format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_schema", "json_schema": dict(schema)}:
            result["format"] = {"type": "json_schema", **schema}
        case {"type": "json_object"}:
            result["format"] = {"type": "json_object"}
        case other:
            raise BadRequest(f"field 'response_format': {_kind(other)!r} is not known; use text or json_schema")
    if request.get("verbosity") is not None:
        result["verbosity"] = request["verbosity"]
    return result


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else type(value).__name__
