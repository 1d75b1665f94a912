"""Anthropic's Messages API as a back end: their message or events -> a Chat Completion or chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ngym.convert.anthropic.blocks import arguments_text
from ngym.convert.reasoning.signed_reasoning import BETWEEN, is_signed, own_block, thinking_text
from ngym.schema import Json

_FINISH = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
    "tool_use": "tool_calls",
}


def chat_from_message(message: Json) -> Json:
    """An Anthropic message -> a Chat Completion; its texts are one text, signed reasoning is in `thinking_blocks`."""
    blocks = message["content"]
    said: Json = {"role": "assistant", "content": None, "refusal": None}
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = [own_block(block) for block in blocks if block["type"] in ("thinking", "redacted_thinking")]
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    if text or not (thoughts or calls):
        said["content"] = text
    if thinking_text(thoughts):
        said["reasoning_content"] = thinking_text(thoughts)
    if any(map(is_signed, thoughts)):
        said["thinking_blocks"] = thoughts
    if calls:
        said["tool_calls"] = calls
    return {
        **head_of(message),
        "object": "chat.completion",
        "choices": [{"index": 0, "message": said, "logprobs": None, **finish_of(message)}],
        "usage": chat_usage(message.get("usage")),
    }


def chat_usage(usage: Json | None) -> Json | None:
    """Anthropic's usage -> Chat usage, in which the cached part is part of the prompt; unknown is null."""
    if usage is None:
        return None
    read, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    prompt, said = usage.get("input_tokens"), usage.get("output_tokens")
    whole = None if prompt is None else prompt + (read or 0) + (written or 0)
    reasoning = (usage.get("output_tokens_details") or {}).get("thinking_tokens")
    return {
        "prompt_tokens": whole,
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
        "completion_tokens": said,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": None if whole is None or said is None else whole + said,
    }


def head_of(message: Json) -> Json:
    """id, created and model of a completion or chunk."""
    return {
        "id": "chatcmpl-" + str(message["id"]).removeprefix("msg_"),
        "created": int(time.time()),
        "model": message["model"],
    }


def finish_of(message: Json) -> Json:
    """finish_reason, and as vLLM tells it the stop string that was met."""
    told: Json = {"finish_reason": _FINISH.get(message.get("stop_reason") or "", "stop")}
    return told | ({"stop_reason": message["stop_sequence"]} if message.get("stop_sequence") else {})


def _call(block: Json) -> Json:
    function = {"name": block["name"], "arguments": arguments_text(block)}
    return {"id": block["id"], "type": "function", "function": function}


class MessageChunks:
    """One answer of Anthropic's API as Chat chunks, as it comes."""

    def __init__(self) -> None:
        self._message: Json = {}
        self._head: Json = {}
        self._blocks: dict[int, Json] = {}
        self._calls = 0
        self._reasoned = False

    def take(self, event: Json) -> Iterator[Json]:
        """The chunks of one event; the last two have the finish_reason and usage."""
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
                told = {name: value for name, value in event["usage"].items() if value is not None}
                self._message["usage"] = {**self._message["usage"], **told}
            case "message_stop":
                last = self._chunk({})
                last["choices"][0] |= finish_of(self._message)
                yield last
                yield {**last, "choices": [], "usage": chat_usage(self._message["usage"])}
            case "error":
                yield {"error": event["error"]}

    def end(self) -> Iterator[Json]:
        """Nothing: who reads the chunks sees by the missing finish_reason that an answer is not whole."""
        return iter(())

    def _block(self, event: Json) -> Iterator[Json]:
        block = self._blocks[event["index"]] = dict(event["content_block"])
        match block["type"]:
            case "text":
                if block["text"]:
                    yield self._chunk({"content": block["text"]})
            case "thinking":
                block["said"] = []
                yield from self._thinking(block, block["thinking"])
            case "redacted_thinking":
                yield self._chunk({"thinking_blocks": [own_block(block)]})
            case "tool_use":
                block["place"], block["said"] = self._calls, False
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
                block["said"] = True
                yield self._chunk_of_call(block, delta["partial_json"])

    def _stop(self, block: Json) -> Iterator[Json]:
        if block["type"] == "thinking" and block.get("signature"):
            yield self._chunk({"thinking_blocks": [own_block(block | {"thinking": "".join(block["said"])})]})
        elif block["type"] == "tool_use" and not block["said"]:
            yield self._chunk_of_call(block, arguments_text(block))

    def _thinking(self, block: Json, text: str) -> Iterator[Json]:
        if text:
            between = BETWEEN if self._reasoned and not block["said"] else ""
            self._reasoned = True
            block["said"].append(text)
            yield self._chunk({"reasoning_content": between + text})

    def _chunk(self, delta: Json) -> Json:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]}

    def _chunk_of_call(self, block: Json, arguments: str, **begun: Any) -> Json:
        """begun: what only the first chunk of a call has."""
        named = {"name": block["name"]} if begun else {}
        return self._chunk(
            {"tool_calls": [{"index": block["place"], **begun, "function": {**named, "arguments": arguments}}]}
        )
