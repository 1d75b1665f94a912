"""Responses events as they come -> Chat chunks: what `chat_from_response` makes of the whole, told piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ngym.convert.chat.responses import chat_from_response
from ngym.convert.reasoning.signed_reasoning import BETWEEN, block_from_reasoning
from ngym.schema import TOKEN_FIELDS, Json

_SAID = {  # the events that say something, and the field of a chunk's delta that says it
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning_content",
    "response.reasoning_summary_text.delta": "reasoning_content",
}
_LAST = frozenset({"response.completed", "response.incomplete"})


class ChunkStream:
    """One answer of a Responses back end as a stream of Chat chunks.

    The last chunk with a choice has its finish_reason, token data beside the delta, and `ng`; usage comes after it,
    where the client asked for it. What came only whole (`output_item.done` without deltas) is told as one delta.

    Args:
        model: its name; None takes the Response's.
        include_usage: whether the client asked for `stream_options.include_usage`.
    """

    def __init__(self, model: str | None = None, include_usage: bool = False) -> None:
        self._model = model
        self._include_usage = include_usage
        self._head: Json | None = None
        self._told: dict[int, set[str]] = {}
        self._calls: dict[int, int] = {}
        self._reasoned = False
        self._ended = False

    def take(self, event: Json) -> Iterator[Json]:
        """The chunks of one event."""
        kind = event["type"]
        if self._head is None and "response" in event:
            yield from self._begin(event["response"])
        if kind in _SAID:
            yield from self._said(event, _SAID[kind])
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            yield self._call(event["item"], event["output_index"])
        elif kind == "response.function_call_arguments.delta":
            yield self._arguments(event["output_index"], event["delta"])
        elif kind == "response.output_item.done":
            yield from self._rest(event["item"], event["output_index"])
        elif kind in _LAST:
            yield from self._last(event["response"])
        elif kind in ("error", "response.failed"):
            yield from self.fail(_message(event))

    def end(self) -> Iterator[Json]:
        """What closes the stream: nothing, but where its last event never came."""
        if not self._ended:
            yield from self.fail("the model's back end ended its stream before the answer was finished")

    def fail(self, message: str, kind: str = "server_error") -> Iterator[Json]:
        """A chunk that says what went wrong: the answer cannot be finished."""
        self._ended = True
        yield {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def _begin(self, response: Json) -> Iterator[Json]:
        stem = str(response["id"]).removeprefix("resp_")
        self._head = {"id": f"chatcmpl-{stem}", "object": "chat.completion.chunk"}
        self._head |= {"created": int(response["created_at"]), "model": self._model or response.get("model") or ""}
        yield self._chunk({"role": "assistant", "content": ""})

    def _said(self, event: Json, field: str) -> Iterator[Json]:
        place, text = event["output_index"], event["delta"]
        if not text:
            return
        told = self._told.setdefault(place, set())
        if "summary_index" in event:
            told.add("summary")
        elif field == "reasoning_content" and "summary" in told:
            return  # the same reasoning twice: chat_from_response has room for one text
        if field == "reasoning_content" and field not in told:
            text = BETWEEN + text if self._reasoned else text
            self._reasoned = True
        told.add(field)
        logprobs = {"content": event["logprobs"], "refusal": None} if event.get("logprobs") else None
        yield self._chunk({field: text}, logprobs=logprobs)

    def _call(self, item: Json, place: int) -> Json:
        index = self._calls[place] = len(self._calls)
        self._told[place] = set()
        function = {"name": item["name"], "arguments": ""}
        return self._chunk(
            {"tool_calls": [{"index": index, "id": item["call_id"], "type": "function", "function": function}]}
        )

    def _arguments(self, place: int, text: str) -> Json:
        self._told[place].add("arguments")
        return self._chunk({"tool_calls": [{"index": self._calls[place], "function": {"arguments": text}}]})

    def _rest(self, item: Json, place: int) -> Iterator[Json]:
        """What an item holds that no delta told."""
        told = set(self._told.get(place, ()))
        match item["type"]:
            case "function_call":
                if place not in self._calls:
                    yield self._call(item, place)
                if item["arguments"] and "arguments" not in told:
                    yield self._arguments(place, item["arguments"])
            case "message":
                for part in item["content"]:
                    field = "refusal" if part["type"] == "refusal" else "content"
                    text = part["refusal" if field == "refusal" else "text"]
                    if text and field not in told:
                        yield from self._said(
                            {"output_index": place, "delta": text, "logprobs": part.get("logprobs")}, field
                        )
            case "reasoning":
                block = block_from_reasoning(item)
                if block.get("thinking") and "reasoning_content" not in told:
                    yield from self._said({"output_index": place, "delta": block["thinking"]}, "reasoning_content")
                if item.get("encrypted_content"):
                    yield self._chunk({"thinking_blocks": [block]})

    def _last(self, response: Json) -> Iterator[Json]:
        self._ended = True
        completion = chat_from_response(response)
        choice, message = completion["choices"][0], completion["choices"][0]["message"]
        tokens = {name: message[name] for name in TOKEN_FIELDS if name in message}
        last = self._chunk({}, choice["finish_reason"], **tokens)
        yield last | ({"ng": completion["ng"]} if "ng" in completion else {})
        if self._include_usage:
            yield {**(self._head or {}), "choices": [], "usage": completion["usage"]}

    def _chunk(self, delta: Json, finish: str | None = None, **beside: Any) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None, **beside}
        return {**(self._head or {}), "choices": [choice]}


def _message(event: Json) -> str:
    error = (event.get("response") or {}).get("error") or event.get("error") or event
    return str(error.get("message") or "the model's back end failed and gave no reason")
