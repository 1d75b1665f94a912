"""The Anthropic Messages API for clients: converts requests to Responses params, and answers and streams back.

`cache_control` has no effect (prefixes are always cached), and neither has `thinking.display` (thinking is always
shown). A Response that did not fit the context has the stop reason `model_context_window_exceeded`.

The input of a tool is streamed in one piece at the end, as in Anthropic's API without `eager_input_streaming`: only
then is it known to be a valid object, so clients never receive broken JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ngym.convert.anthropic_blocks import blocks_from_items, is_object, items_from_blocks, text_block, tool_use
from ngym.convert.chat_items import CallIds
from ngym.convert.chat_requests import chat_request, response_from_chat
from ngym.convert.reasoning import ChunkReader, ReasoningPiece, ReasoningStyle, thinking
from ngym.convert.request_validation import SAMPLING
from ngym.schema import Json

_SAME = ("model", "temperature", "top_p", "stream", *SAMPLING)
_FINISH = {"length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}
_TIERS = {"standard_only": "default"}


def chat_from_messages_api(body: Json, *, style: ReasoningStyle = "field") -> Json:
    """Convert a checked Messages request to a Chat Completions request, with token data and thinking blocks.

    style: where the back end reads and leaves reasoning; see ReasoningStyle.

    Raises:
        BadRequest: a block or tool has no counterpart; the message names it.
    """
    return chat_request(create_params_from_messages_api(body), style=style, tokens=True)


def create_params_from_messages_api(body: Json) -> Json:
    """Convert a checked Messages request to Responses create params; `thinking` is kept for Anthropic back ends."""
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
    """Convert a Chat Completion to an Anthropic message; token data is on its last block, `ng` next to the content.

    body: the request; its model is used if the completion names none. style: as above.

    Raises:
        UpstreamError: it has no choice, or the engine aborted.
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
    """An empty Anthropic message."""
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
    """The reason why the model stopped: `stop_reason` and `stop_sequence`.

    met: vLLM's `stop_reason`, the stop string (or token) that was met. called, refused: it has calls, refusals.
    """
    reason = _FINISH.get(finish or "", "end_turn")
    if finish == "length" and usage and usage.get("completion_tokens") == 0:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}  # see overflow_response
    if reason == "end_turn" and isinstance(met, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": met}
    if reason == "end_turn" and (called or refused):
        reason = "tool_use" if called else "refusal"
    return {"stop_reason": reason, "stop_sequence": None}


def messages_api_usage(usage: Json | None) -> Json:
    """Convert Chat usage to Anthropic's, which counts the cached input separately; unknown counts are null."""
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
    output_format = (body.get("output_config") or {}).get("format")
    if not output_format:
        return {}
    return {
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": output_format["schema"], "strict": True}}
    }


def _tools(body: Json) -> Json:
    tools = body.get("tools")
    if not tools:
        return {}
    result: Json = {"tools": [_tool(tool) for tool in tools]}
    choice = body.get("tool_choice") or {"type": "auto"}
    function_choice = {"type": "function", "name": choice.get("name")}
    result["tool_choice"] = {"any": "required", "tool": function_choice}.get(choice["type"], choice["type"])
    if "disable_parallel_tool_use" in choice:
        result["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return result


def _tool(tool: Json) -> Json:
    described = {"description": tool["description"]} if tool.get("description") else {}
    parameters = {"parameters": tool["input_schema"], "strict": bool(tool.get("strict"))}
    return {"type": "function", "name": tool["name"], **described, **parameters}


@dataclass(slots=True)
class _Call:
    """A tool call whose arguments are incomplete."""

    call_id: str
    name: str
    arguments: str = ""


class MessagesStream:
    """Converts a stream of Chat chunks to Anthropic events.

    `message_delta` has the complete usage and `ng`; `message_start` has the usage of the first chunk, else zeros. Token data is on the
    last block if that is a tool call, else on `message_delta`: no other block is still open when it is known.

    Args:
        model: the model's name; None: that of the chunks.
        style: where the back end puts reasoning; as in ResponseStream.
    """

    def __init__(self, model: str | None = None, style: ReasoningStyle = "field") -> None:
        self._model = model
        self._reader = ChunkReader(style)
        self._started = False
        self._stem = ""
        self._count = 0
        self._open: str | None = None
        self._calls: dict[int, _Call] = {}
        self._refused = False

    def start(self) -> Iterator[Json]:
        """`message_start` and a `ping`, unless they were sent; `take` also sends them."""
        if not self._started:
            yield from self._begin({})

    def take(self, chunk: Json) -> Iterator[Json]:
        """The events of one chunk."""
        if not self._started and "error" not in chunk:
            yield from self._begin(chunk)
        for piece in self._reader.read(chunk):
            yield from self._piece(piece)

    def end(self) -> Iterator[Json]:
        """The closing events: message_delta and message_stop, or an error.

        Raises:
            UpstreamError: the back end's token data contradicts itself.
        """
        reader = self._reader
        for piece in reader.end():
            yield from self._piece(piece)
        if reader.trouble:
            yield from self.fail(reader.trouble)
            return
        yield from self.start()
        yield from self._close()
        tokens = reader.tokens()
        yield from self._tool_uses(tokens)
        if not self._count:
            yield from self._begin_block("text", text_block(""))
            yield from self._close()
        stop = stop_of(reader.finish, reader.stop, reader.usage, bool(self._calls), self._refused)
        extra = ({} if self._calls else tokens) | ({} if reader.ng is None else {"ng": reader.ng})
        yield {"type": "message_delta", "delta": stop, "usage": messages_api_usage(reader.usage), **extra}
        yield {"type": "message_stop"}

    def fail(self, message: str, kind: str = "api_error") -> Iterator[Json]:
        """An `error` event: the answer cannot be finished."""
        yield {"type": "error", "error": {"type": kind, "message": message}}

    def _begin(self, head: Json) -> Iterator[Json]:
        self._started = True
        self._stem = str(head.get("id") or "").removeprefix("chatcmpl-")
        message = new_message(self._stem, self._model or head.get("model") or "")
        counted = {name: count for name, count in messages_api_usage(head.get("usage")).items() if count is not None}
        message["usage"] |= {"input_tokens": 0, "output_tokens": 0} | counted  # clients require two whole numbers
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _piece(self, piece: ReasoningPiece) -> Iterator[Json]:
        match piece.kind:
            case "text" | "refusal":
                if self._open != piece.kind:
                    yield from self._begin_block(piece.kind, text_block(""))
                self._refused = self._refused or piece.kind == "refusal"
                yield self._delta({"type": "text_delta", "text": piece.text})
            case "think":
                yield from self._begin_block("thinking", thinking(""))
            case "reasoning":
                yield self._delta({"type": "thinking_delta", "thinking": piece.text})
            case "thought":
                if "signature" in piece.more:
                    yield self._delta({"type": "signature_delta", "signature": piece.more["signature"]})
                yield from self._close({"ng": {"tags": piece.more["tags"]}} if "tags" in piece.more else {})
            case "redacted":
                yield from self._begin_block("redacted", piece.more)
                yield from self._close()
            case "call":
                self._calls[piece.call] = _Call(piece.more["id"], piece.text)
            case "arguments":
                self._calls[piece.call].arguments += piece.text

    def _tool_uses(self, tokens: Json) -> Iterator[Json]:
        """The events of all calls; token data is on the last one, so that clients send it back."""
        ids = CallIds(self._stem)
        for number, call in enumerate(self._calls.values(), 1):
            block = tool_use(ids.take(call.call_id), call.name, call.arguments)
            arguments = call.arguments if is_object(call.arguments) else orjson.dumps(block["input"]).decode()
            yield from self._begin_block(
                "tool_use", block | {"input": {}} | (tokens if number == len(self._calls) else {})
            )
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield from self._close()

    def _begin_block(self, kind: str, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._open = kind
        self._count += 1
        yield {"type": "content_block_start", "index": self._count - 1, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._count - 1, "delta": delta}

    def _close(self, extra: Json | None = None) -> Iterator[Json]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._count - 1, **(extra or {})}
