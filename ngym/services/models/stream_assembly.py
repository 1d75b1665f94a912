"""A native stream as the answer that it makes: a Response, or a Chat Completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ngym.schema import TOKEN_FIELDS, Json


class WholeResponse:
    """Of Responses events: the last one holds it."""

    def __init__(self) -> None:
        self.answer: Json | None = None

    def take(self, event: Json) -> None:
        if event["type"] in ("response.completed", "response.incomplete"):
            self.answer = event["response"]


class WholeCompletion:
    """Of chat chunks: their pieces put together. Token data stands beside the delta of the chunk that ends the choice."""

    def __init__(self) -> None:
        self.answer: Json | None = None
        self._text: dict[str, list[str]] = {}
        self._calls: dict[int, Json] = {}
        self._arguments: dict[int, list[str]] = {}

    def take(self, chunk: Json) -> None:
        if self.answer is not None:
            self.answer["usage"] = chunk.get("usage") or self.answer["usage"]
        for choice in chunk.get("choices") or ():
            self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self.answer = self._whole(chunk, choice)

    def _delta(self, delta: Json) -> None:
        for name in ("content", "refusal", "reasoning_content"):
            if delta.get(name):
                self._text.setdefault(name, []).append(delta[name])
        for part in delta.get("tool_calls") or ():
            index, function = part["index"], part.get("function") or {}
            call = self._calls.setdefault(index, {"id": "", "type": "function", "name": ""})
            call["id"] = part.get("id") or call["id"]
            call["name"] = function.get("name") or call["name"]
            self._arguments.setdefault(index, []).append(function.get("arguments") or "")

    def _whole(self, chunk: Json, choice: Json) -> Json:
        message: Json = {"role": "assistant", "content": None}
        message |= {name: "".join(parts) for name, parts in self._text.items()}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(self._arguments[index])},
                }
                for index, call in sorted(self._calls.items())
            ]
        message |= {name: choice[name] for name in TOKEN_FIELDS if choice.get(name) is not None}
        ended: dict[str, Any] = {"index": 0, "message": message, "finish_reason": choice["finish_reason"]}
        told: Json = {name: chunk[name] for name in ("id", "created", "model", "ng") if name in chunk}
        return {"object": "chat.completion", **told, "choices": [ended], "usage": chunk.get("usage")}


Whole = WholeResponse | WholeCompletion
WHOLE: dict[str, Callable[[], Whole]] = {"responses": WholeResponse, "chat": WholeCompletion}
