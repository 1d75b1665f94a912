"""Converts Chat Completions to Responses, and back."""

from __future__ import annotations

import time
from typing import Literal, get_args

from ngym.convert.chat_items import CallIds, assistant_items, content_text, message_item, output_text
from ngym.convert.chat_requests import wants_logprobs
from ngym.convert.reasoning import BETWEEN, GAVE_UP, ReasoningStyle, block_from_reasoning
from ngym.errors import UpstreamError
from ngym.schema import TOKEN_FIELDS, FinishReason, Json, token_fields

Incomplete = Literal["max_output_tokens", "content_filter"]
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
    """Why the turn of a Response or a Chat Completion ended.

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


def _finish_of_response(response: Json) -> FinishReason:
    if response.get("status") == "incomplete":
        return _FINISH.get((response.get("incomplete_details") or {}).get("reason", ""), "length")
    called = any(item.get("type") == "function_call" for item in response["output"])
    return "tool_calls" if called else "stop"


def chat_from_response(response: Json) -> Json:
    """Convert a Response to a Chat Completion: reasoning in `reasoning_content`, token data on the message.

    Raises:
        UpstreamError: the Response failed; its own error is the detail.
    """
    if response["status"] == "failed":
        reason = (response.get("error") or {}).get("message", "no reason given")
        raise UpstreamError(f"the model's back end failed: {reason}", failure="model_error")
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
    prompt, completion, total = (usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total"))
    if total is None and prompt is not None and completion is not None:
        total = prompt + completion
    return {
        "input_tokens": prompt,
        "input_tokens_details": _cached(usage.get("prompt_tokens_details")),
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
        "prompt_tokens_details": _cached(usage.get("input_tokens_details")),
        "completion_tokens": usage.get("output_tokens"),
        "completion_tokens_details": {
            "reasoning_tokens": (usage.get("output_tokens_details") or {}).get("reasoning_tokens")
        },
        "total_tokens": usage.get("total_tokens"),
    }


def _cached(details: Json | None) -> Json:
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
