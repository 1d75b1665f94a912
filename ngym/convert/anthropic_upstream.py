"""The Anthropic Messages API as a back end: converts Chat requests to Messages requests, and answers back.

Dropped from requests, because the API has no counterpart: reasoning without a signature (it is refused), empty
assistant messages, `metadata`, `store`, `prompt_cache_*`, `modalities`, `strict: false`, an image's `detail`, and
fields with a neutral value (a penalty of 0). Other fields that the API does not have are refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ngym.convert.anthropic_blocks import arguments_object, arguments_text, block_from_part
from ngym.convert.chat_items import text_only
from ngym.convert.chat_requests import without_allowed_tools
from ngym.convert.reasoning import BETWEEN, is_signed, own_block, thinking_text
from ngym.errors import BadRequest, UpstreamError
from ngym.schema import Json

_TIERS = {"auto": "auto", "default": "standard_only"}
_SAME = frozenset({"model", "temperature", "top_p", "top_k", "thinking", "stream"})
_READ = frozenset(
    {"messages", "max_tokens", "max_completion_tokens", "stop", "user", "safety_identifier", "service_tier"}
    | {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"}
)
_DROPPED = frozenset(
    {"metadata", "store", "stream_options", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
    | {"modalities"}
)
_NEUTRAL: Json = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "ignore_eos": False,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "chat_template_kwargs": {},
    "stop_token_ids": [],
    "verbosity": "medium",
}
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
    "tool_use": "tool_calls",
}
_SERVER_TOOLS = "server tools, which Anthropic runs itself, have no counterpart; leave them out of extra_body"
_BLOCKS = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})


def messages_api_request(request: Json, *, max_tokens: int) -> Json:
    """Convert a Chat Completions request to a Messages request.

    max_tokens: the default for requests without a bound; the API requires one.

    Raises:
        BadRequest: the Messages API does not have a field; the message names it.
    """
    for name, value in request.items():
        if name in _SAME or name in _READ or name in _DROPPED or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        raise BadRequest(f"field {name!r}: Anthropic's API does not have it; leave it out")
    body = {name: request[name] for name in _SAME if name in request}
    body["max_tokens"] = request.get("max_completion_tokens") or request.get("max_tokens") or max_tokens
    system, body["messages"] = _messages(request["messages"])
    if system:
        body["system"] = system
    stop = request.get("stop")
    if stop:
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    user = request.get("user") or request.get("safety_identifier")
    if user:
        body["metadata"] = {"user_id": user}
    if "service_tier" in request:
        if request["service_tier"] not in _TIERS:
            raise BadRequest(f"field 'service_tier': Anthropic's API knows {' and '.join(_TIERS)} only")
        body["service_tier"] = _TIERS[request["service_tier"]]
    return body | _tools(request) | _output(request)


def _messages(messages: list[Json]) -> tuple[str, list[Json]]:
    """The system prompt (leading system messages) and the messages; outputs of one turn's calls are one message."""
    system: list[str] = []
    result: list[Json] = []
    results: list[Json] | None = None
    for index, message in enumerate(messages):
        where, role = f"messages[{index}].content", message["role"]
        if role == "tool":
            if results is None:
                results = []
                result.append({"role": "user", "content": results})
            content = _content(message.get("content"), where)
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            results.append(block | ({"is_error": True} if message.get("is_error") else {}))
            continue
        results = None
        if role in ("system", "developer"):
            text = text_only(message.get("content"), where)
            if result:
                result.append({"role": "system", "content": text})
            elif text:
                system.append(text)
        elif role == "user":
            result.append({"role": "user", "content": _content(message.get("content"), where)})
        else:
            blocks = _assistant_blocks(message)
            result += [{"role": "assistant", "content": blocks}] if blocks else []
    return "\n\n".join(system), result


def _assistant_blocks(message: Json) -> list[Json]:
    blocks = [own_block(block) for block in message.get("thinking_blocks") or () if is_signed(block)]
    content = message.get("content") or message.get("refusal") or ""
    texts = [content] if isinstance(content, str) else [text_only([part], "content") for part in content]
    blocks += [{"type": "text", "text": text} for text in texts if text]
    for call in message.get("tool_calls") or ():
        arguments = arguments_object(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _content(content: str | list[Json] | None, where: str) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    return [block_from_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _tools(request: Json) -> Json:
    request = without_allowed_tools(request)
    tools = [_tool(tool["function"]) for tool in request.get("tools") or ()]
    if not tools:
        return {}
    choice: Json = {"type": "auto"}
    match request.get("tool_choice"):
        case "none":
            return {"tools": tools, "tool_choice": {"type": "none"}}
        case "required":
            choice = {"type": "any"}
        case {"type": "function", "function": {"name": str(name)}}:
            choice = {"type": "tool", "name": name}
    if request.get("parallel_tool_calls") is False:
        choice["disable_parallel_tool_use"] = True
    return {"tools": tools, "tool_choice": choice}


def _tool(function: Json) -> Json:
    tool = {
        "name": function["name"],
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    if function.get("description"):
        tool["description"] = function["description"]
    return tool | ({"strict": True} if function.get("strict") else {})


def _output(request: Json) -> Json:
    """thinking and output_config, from reasoning_effort and response_format."""
    config: Json = {}
    effort = request.get("reasoning_effort")
    off = {"thinking": {"type": "disabled"}} if effort == "none" else {}
    if effort and not off:
        config["effort"] = "low" if effort == "minimal" else effort
    match request.get("response_format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            config["format"] = {"type": "json_schema", "schema": schema}
        case _:
            raise BadRequest("field 'response_format': Anthropic's API knows text and json_schema only")
    return off | ({"output_config": config} if config else {})


def chat_from_message(message: Json) -> Json:
    """Convert an Anthropic message to a Chat Completion: texts are joined, signed reasoning is in `thinking_blocks`.

    Raises:
        UpstreamError: it is not finished, or has a block without a counterpart, such as `server_tool_use`.
    """
    blocks = message["content"]
    for block in blocks:
        _check_kind(block)
    answer: Json = {"role": "assistant", "content": None, "refusal": None}
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = [own_block(block) for block in blocks if block["type"] in ("thinking", "redacted_thinking")]
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    if text or not (thoughts or calls):
        answer["content"] = text
    if thinking_text(thoughts):
        answer["reasoning_content"] = thinking_text(thoughts)
    if any(map(is_signed, thoughts)):
        answer["thinking_blocks"] = thoughts
    if calls:
        answer["tool_calls"] = calls
    return {
        **head_of(message),
        "object": "chat.completion",
        "choices": [{"index": 0, "message": answer, "logprobs": None, **finish_of(message)}],
        "usage": chat_usage(message.get("usage")),
    }


def chat_usage(usage: Json | None) -> Json | None:
    """Convert Anthropic's usage to Chat usage, which counts the cached part in the prompt; unknown counts are null."""
    if usage is None:
        return None
    read, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    prompt, completion = usage.get("input_tokens"), usage.get("output_tokens")
    whole = None if prompt is None else prompt + (read or 0) + (written or 0)
    reasoning = (usage.get("output_tokens_details") or {}).get("thinking_tokens")
    return {
        "prompt_tokens": whole,
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
        "completion_tokens": completion,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": None if whole is None or completion is None else whole + completion,
    }


def head_of(message: Json) -> Json:
    """id, created and model of a completion or chunk."""
    return {
        "id": "chatcmpl-" + str(message["id"]).removeprefix("msg_"),
        "created": int(time.time()),
        "model": message["model"],
    }


def finish_of(message: Json) -> Json:
    """finish_reason, and as in vLLM the stop string that was met.

    Raises:
        UpstreamError: the message has no stop_reason, or not one of a finished answer.
    """
    reason = message.get("stop_reason")
    if reason is None:
        raise UpstreamError(
            "the model's back end ended the answer without a stop_reason", failure="model_error", retryable=True
        )
    if reason not in _FINISH:
        why = (
            f"a paused turn: {_SERVER_TOOLS}" if reason == "pause_turn" else "not the end of an answer that ngym knows"
        )
        raise UpstreamError(f"the model's back end stopped with {reason!r:.60}: {why}", failure="model_error")
    finish: Json = {"finish_reason": _FINISH[reason]}
    return finish | ({"stop_reason": message["stop_sequence"]} if message.get("stop_sequence") else {})


def _check_kind(block: Json) -> None:
    if block["type"] not in _BLOCKS:
        detail = f"the model's back end answered with a block {block['type']!r:.60}: {_SERVER_TOOLS}"
        raise UpstreamError(detail, failure="model_error")


def _call(block: Json) -> Json:
    function = {"name": block["name"], "arguments": arguments_text(block)}
    return {"id": block["id"], "type": "function", "function": function}


class MessageChunks:
    """Converts a stream of Anthropic events to Chat chunks."""

    def __init__(self) -> None:
        self._message: Json = {}
        self._head: Json = {}
        self._blocks: dict[int, Json] = {}
        self._calls = 0
        self._reasoned = False

    def take(self, event: Json) -> Iterator[Json]:
        """The chunks of one event; the last two have the finish_reason and usage. Raises as `chat_from_message`."""
        match event["type"]:
            case "message_start":
                self._message = dict(event["message"])
                self._head = head_of(self._message) | {"object": "chat.completion.chunk"}
                yield self._chunk({"role": "assistant", "content": ""})
            case "content_block_start":
                yield from self._block(event)
            case "content_block_delta":
                yield from self._delta(self._blocks[event["index"]], event["delta"])
            case "content_block_stop":
                yield from self._stop(self._blocks.pop(event["index"]))
            case "message_delta":
                self._message |= event["delta"]
                usage = {name: value for name, value in event["usage"].items() if value is not None}
                self._message["usage"] = {**self._message["usage"], **usage}
            case "message_stop":
                last = self._chunk({})
                last["choices"][0] |= finish_of(self._message)
                yield last
                yield {**last, "choices": [], "usage": chat_usage(self._message["usage"])}
            case "error":
                yield {"error": event["error"]}

    def end(self) -> Iterator[Json]:
        """No chunks: a missing finish_reason shows the reader that the answer is incomplete."""
        return iter(())

    def _block(self, event: Json) -> Iterator[Json]:
        block = self._blocks[event["index"]] = dict(event["content_block"])
        _check_kind(block)
        match block["type"]:
            case "text":
                if block["text"]:
                    yield self._chunk({"content": block["text"]})
            case "thinking":
                block["texts"] = []
                yield from self._thinking(block, block["thinking"])
            case "redacted_thinking":
                yield self._chunk({"thinking_blocks": [own_block(block)]})
            case "tool_use":
                block["place"], block["has_arguments"] = self._calls, False
                self._calls += 1
                yield self._chunk_of_call(block, "", id=block["id"], type="function")

    def _delta(self, block: Json, delta: Json) -> Iterator[Json]:
        match delta["type"]:
            case "text_delta":
                yield self._chunk({"content": delta["text"]})
            case "thinking_delta":
                yield from self._thinking(block, delta["thinking"])
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "input_json_delta" if delta["partial_json"] and block["type"] == "tool_use":
                block["has_arguments"] = True
                yield self._chunk_of_call(block, delta["partial_json"])

    def _stop(self, block: Json) -> Iterator[Json]:
        if block["type"] == "thinking" and block.get("signature"):
            yield self._chunk({"thinking_blocks": [own_block(block | {"thinking": "".join(block["texts"])})]})
        elif block["type"] == "tool_use" and not block["has_arguments"]:
            yield self._chunk_of_call(block, arguments_text(block))

    def _thinking(self, block: Json, text: str) -> Iterator[Json]:
        if text:
            between = BETWEEN if self._reasoned and not block["texts"] else ""
            self._reasoned = True
            block["texts"].append(text)
            yield self._chunk({"reasoning_content": between + text})

    def _chunk(self, delta: Json) -> Json:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]}

    def _chunk_of_call(self, block: Json, arguments: str, **first_fields: Any) -> Json:
        """first_fields: fields of the first chunk of a call."""
        name = {"name": block["name"]} if first_fields else {}
        return self._chunk(
            {"tool_calls": [{"index": block["place"], **first_fields, "function": {**name, "arguments": arguments}}]}
        )
