"""Converts Responses requests and responses to those of Chat Completions, and back.

Dropped in Chat requests, because they have no counterpart: `store`, `metadata` (except the JSON strings
`metadata.extra_body` and `metadata.chat_template_kwargs`, which are applied), `include` other than logprobs,
`max_tool_calls` (it bounds only built-in tools), keys of `reasoning` other than the effort, `truncation: disabled`,
`thinking` (Anthropic's; but see `tokens`), keys of a function tool other than name, description, parameters and strict,
an item's status and id. In Responses requests a message's `name` is dropped. Everything else is translated, passed on
under the same name (PASSED), or refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal, get_args

import orjson

from ngym.convert.chat_items import (
    CallIds,
    assistant_items,
    content_text,
    items_from_messages,
    message_item,
    messages_from_items,
    output_text,
)
from ngym.convert.reasoning import BETWEEN, GAVE_UP, ReasoningStyle, block_from_reasoning
from ngym.convert.request_validation import SAMPLING, VLLM_CHAT
from ngym.errors import BadRequest, Problem, UpstreamError, bad_request
from ngym.schema import TOKEN_FIELDS, FinishReason, Json, token_fields

PASSED = (
    "model", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "service_tier", *SAMPLING,
)  # fmt: skip
"""Fields with the same name and meaning on both sides."""
_PASSED = frozenset(PASSED)
LOGPROBS = "message.output_text.logprobs"
ASKS_FOR_TOKENS = ("return_token_ids", "return_tokens_as_token_ids")
"""Fields of vLLM's Chat API that also other back ends support, if their answers have TOKEN_FIELDS."""
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
        BadRequest: something has no Chat form (built-in tools, truncation "auto", previous_response_id, some items
            and parts).
    """
    if params.get("truncation") == "auto":
        raise BadRequest("field 'truncation': 'auto' is not supported by this model's back end; shorten the input")
    if params.get("previous_response_id") is not None:
        raise BadRequest("field 'previous_response_id': has no form in Chat Completions; send the whole input")
    request = {
        name: value
        for name, value in params.items()
        if value is not None and (name in _PASSED or (tokens and name == "thinking"))
    }
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
    unsupported = VLLM_CHAT.keys() & request.keys() - {*ASKS_FOR_TOKENS}  # these: with_token_ids, or refuse_token_ids
    _refuse(sorted(name for name in unsupported if (name, request[name]) != ("n", 1)))
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


def with_token_ids(completion: Json, request: Json) -> Json:
    """The completion, with the model's tokens also in vLLM's form if the request asks for it.

    Raises:
        BadRequest: it asks, but the model gave no tokens.
    """
    if not any(request.get(name) for name in ASKS_FOR_TOKENS):
        return completion
    choice = completion["choices"][0]
    tokens = token_fields(choice["message"])
    if not tokens:
        refuse_token_ids(request)
    prompt, ids, logprobs = (tokens[name] for name in TOKEN_FIELDS)
    if request.get("return_tokens_as_token_ids") and request.get("logprobs"):
        entries = zip(ids, logprobs, strict=True)
        content = [{"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []} for i, p in entries]
        choice = {**choice, "logprobs": {"content": content, "refusal": None}}
    if request.get("return_token_ids"):
        completion, choice = {**completion, "prompt_token_ids": prompt}, {**choice, "token_ids": ids}
    return {**completion, "choices": [choice]}


def refuse_token_ids(request: Json) -> None:
    """Raise a BadRequest if the request asks for tokens in vLLM's form: of a stream, or of a model without tokens."""
    _refuse(name for name in ASKS_FOR_TOKENS if request.get(name))


def _refuse(names: Iterable[str]) -> None:
    why = "is not supported by this model's back end (models/vllm supports it); leave it out"
    if problems := [Problem(name, why) for name in names]:
        raise bad_request(problems)


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
    fields = {name: function[name] for name in names if function.get(name) is not None}
    return {"type": "function", **fields, "strict": bool(function.get("strict"))}


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
            form = "{'type': 'function', 'function': {'name': ...}}"
            raise BadRequest(f"field 'tool_choice': must be none, auto, required or {form}")


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


Incomplete = Literal["max_output_tokens", "content_filter"]
ANSWERED = ("completed", "incomplete")  # statuses of a Response that is an answer
INCOMPLETE: dict[str, Incomplete] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FINISH: dict[str, FinishReason] = {"max_output_tokens": "length", "content_filter": "content_filter"}
_ECHOED: Json = {  # the request's fields that a Response repeats, with their defaults
    "background": False,
    "frequency_penalty": 0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "store": False,
    "temperature": 1,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "truncation": "disabled",
}


def new_response(
    params: Json,
    output: list[Json],
    *,
    response_id: str,
    model: str,
    usage: Json | None = None,
    incomplete: Incomplete | None = None,
    created_at: int | None = None,
) -> Json:
    """A finished Response to `params`; `incomplete` marks it and its last item as cut off."""
    if incomplete and output and "status" in output[-1]:
        output[-1]["status"] = "incomplete"
    now = int(time.time())
    return {
        **_ECHOED,
        **{name: value for name, value in params.items() if name in _ECHOED and value is not None},
        "id": response_id,
        "object": "response",
        "created_at": now if created_at is None else created_at,
        "completed_at": None if incomplete else now,
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "error": None,
        "model": model,
        "output": output,
        "usage": usage,
    }


def overflow_response(params: Json, *, response_id: str, model: str) -> Json:
    """The Response to input that does not fit the context: an empty answer, not an error.

    Its reason is max_output_tokens, the nearest one in the specification; 0 sampled tokens distinguish it.
    """
    output = [message_item([output_text("")], "msg_" + response_id.removeprefix("resp_"))]
    usage = usage_from_chat({"completion_tokens": 0})
    return new_response(
        params, output, response_id=response_id, model=model, usage=usage, incomplete="max_output_tokens"
    )


def response_from_chat(completion: Json, params: Json, *, style: ReasoningStyle = "field") -> Json:
    """Convert a Chat Completion to the Response to `params`. Token data of the back end goes to the last item.

    Raises:
        UpstreamError: it has no choice, the engine aborted, or its token data is inconsistent.
    """
    choices = completion.get("choices")
    if not choices:
        raise UpstreamError("the model's back end answered without a choice", failure="model_error")
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish in GAVE_UP:
        raise UpstreamError(f"the model's back end gave up ({finish})", failure="model_error", retryable=True)
    stem = str(completion.get("id") or time.time_ns()).removeprefix("chatcmpl-")
    message = choice["message"] | _token_fields(completion, choice)
    output = assistant_items(message, stem, style=style, ids=CallIds(stem))
    logprobs = (choice.get("logprobs") or {}).get("content")
    if logprobs and wants_logprobs(params) and [item["type"] for item in output] == ["message"]:
        output[0]["content"][0]["logprobs"] = logprobs
    response = new_response(
        params,
        output,
        response_id=f"resp_{stem}",
        model=completion.get("model") or params.get("model") or "",
        usage=usage_from_chat(completion.get("usage")),
        incomplete=INCOMPLETE.get(finish),
        created_at=completion.get("created"),
    )
    return response | ({"ng": completion["ng"]} if "ng" in completion else {})


def finish_reason(answer: Json) -> FinishReason:
    """The finish reason of a Response or a Chat Completion.

    `context`: no token was sampled, because the conversation did not fit.
    """
    if "output" in answer:
        usage = answer.get("usage") or {}
        finish, sampled = _finish_of_response(answer), usage.get("output_tokens")
    else:
        choice = answer["choices"][0]
        finish, sampled = choice.get("finish_reason"), (answer.get("usage") or {}).get("completion_tokens")
        if finish not in get_args(FinishReason):
            finish = "tool_calls" if choice["message"].get("tool_calls") else "stop"
    return "context" if finish == "length" and sampled == 0 else finish


def unfinished(response: Json) -> str | None:
    """The reason why a Response is not an answer: the model server failed, or has not finished. None: it is one."""
    status, error = response.get("status") or "completed", response.get("error")
    has_error = any(error.values()) if isinstance(error, dict) else bool(error)
    if status in ANSWERED and not has_error:
        return None
    reason = error.get("message") if isinstance(error, dict) else error
    return f"the status {status!r}" + (f" and the error {reason!r:.200}" if has_error else "")


def _finish_of_response(response: Json) -> FinishReason:
    if response.get("status") == "incomplete":
        return _FINISH.get((response.get("incomplete_details") or {}).get("reason", ""), "length")
    has_calls = any(item.get("type") == "function_call" for item in response["output"])
    return "tool_calls" if has_calls else "stop"


def chat_from_response(response: Json) -> Json:
    """Convert a Response to a Chat Completion: reasoning in `reasoning_content`, token data on the message.

    Raises:
        UpstreamError: the Response failed, or is not finished.
    """
    if (problem := unfinished(response)) is not None:
        raise UpstreamError(f"the model's back end answered with {problem}", failure="model_error")
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    items = response["output"]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    calls = [_tool_call(item) for item in items if item["type"] == "function_call"]
    thoughts = [item for item in items if item["type"] == "reasoning"]
    reasoning = [content_text(item.get("content") or item["summary"]) for item in thoughts]
    refusals = [part["refusal"] for part in parts if part["type"] == "refusal"]
    text = content_text(parts)
    if text or (parts and not refusals):
        message["content"] = text
    if refusals:
        message["refusal"] = "".join(refusals)
    if any(reasoning):
        message["reasoning_content"] = BETWEEN.join(filter(None, reasoning))
    if any(item.get("encrypted_content") for item in thoughts):
        message["thinking_blocks"] = [block_from_reasoning(item) for item in thoughts]
    if calls:
        message["tool_calls"] = calls
    for item in items:
        message |= token_fields(item)
    logprobs = [entry for part in parts for entry in part.get("logprobs") or ()]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _finish_of_response(response),
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
    }
    completion: Json = {
        "id": "chatcmpl-" + response["id"].removeprefix("resp_"),
        "object": "chat.completion",
        "created": int(response["created_at"]),
        "model": response["model"],
        "choices": [choice],
        "usage": usage_to_chat(response.get("usage")),
    }
    return completion | ({"ng": response["ng"]} if "ng" in response else {})


def usage_from_chat(usage: Json | None) -> Json | None:
    """Convert Chat usage to Responses usage. The back end's total is kept; without one, it is the sum of both parts."""
    if usage is None:
        return None
    prompt, completion, total = usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens")
    if total is None and prompt is not None and completion is not None:
        total = prompt + completion
    return {
        "input_tokens": prompt,
        "input_tokens_details": _cached_tokens(usage.get("prompt_tokens_details")),
        "output_tokens": completion,
        "output_tokens_details": {
            "reasoning_tokens": (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        },
        "total_tokens": total,
    }


def usage_to_chat(usage: Json | None) -> Json | None:
    """Convert Responses usage to Chat usage."""
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "prompt_tokens_details": _cached_tokens(usage.get("input_tokens_details")),
        "completion_tokens": usage.get("output_tokens"),
        "completion_tokens_details": {
            "reasoning_tokens": (usage.get("output_tokens_details") or {}).get("reasoning_tokens")
        },
        "total_tokens": usage.get("total_tokens"),
    }


def _cached_tokens(details: Json | None) -> Json:
    """Cached input tokens, and those written to the cache if the back end reports them, as Anthropic's does."""
    details = details or {}
    written = {"cache_write_tokens": details["cache_write_tokens"]} if details.get("cache_write_tokens") else {}
    return {"cached_tokens": details.get("cached_tokens"), **written}


def _tool_call(item: Json) -> Json:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _token_fields(completion: Json, choice: Json) -> Json:
    """Token ids and logprobs of vLLM (`return_token_ids`, `logprobs`), under the names of TOKEN_FIELDS."""
    ids = choice.get("token_ids")
    if ids is None or completion.get("prompt_token_ids") is None:
        return {}
    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
    if len(logprobs) != len(ids):
        raise UpstreamError(
            f"the model's back end gave {len(ids)} token ids but {len(logprobs)} logprobs", failure="model_error"
        )
    return dict(zip(TOKEN_FIELDS, (completion["prompt_token_ids"], ids, logprobs), strict=True))
