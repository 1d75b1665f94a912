"""Chat chunks as they come -> Anthropic's events: `messages_api_from_chat`, told piece by piece.

The input of a tool comes in one piece at the end, as Anthropic's does unless a tool asks for `eager_input_streaming`:
only then it is certain that it is an object, and no client stumbles over broken JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from ngym.convert.anthropic.blocks import is_object, text_block, tool_use
from ngym.convert.anthropic.client_api import messages_api_usage, new_message, stop_of
from ngym.convert.chat.chat_to_items import CallIds
from ngym.convert.reasoning.reasoning_pieces import ChunkReader, Piece
from ngym.convert.reasoning.signed_reasoning import thinking
from ngym.convert.reasoning.think_tags import ReasoningStyle
from ngym.schema import Json


@dataclass(slots=True)
class _Call:
    """A tool call whose arguments are still coming."""

    call_id: str
    name: str
    arguments: str = ""


class MessagesStream:
    """One answer of a Chat back end as a stream of Anthropic's events.

    `message_delta` has the whole usage (before it, what the first chunk tells) and `ng`. Token data is on the last
    block where that is a tool's, else on `message_delta`: no other block is still open when it is known.

    Args:
        model: its name; None takes the chunks'.
        style: where the back end leaves reasoning; as in ResponseStream.
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
        """`message_start` and a `ping`, where they have not been told; `take` does it, too."""
        if not self._started:
            yield from self._begin({})

    def take(self, chunk: Json) -> Iterator[Json]:
        """The events of one chunk."""
        if not self._started and "error" not in chunk:
            yield from self._begin(chunk)
        for piece in self._reader.read(chunk):
            yield from self._piece(piece)

    def end(self) -> Iterator[Json]:
        """What closes the stream: message_delta and message_stop, or an error.

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
        beside = ({} if self._calls else tokens) | ({} if reader.ng is None else {"ng": reader.ng})
        yield {"type": "message_delta", "delta": stop, "usage": messages_api_usage(reader.usage), **beside}
        yield {"type": "message_stop"}

    def fail(self, message: str, kind: str = "api_error") -> Iterator[Json]:
        """An `error` event: the answer cannot be finished."""
        yield {"type": "error", "error": {"type": kind, "message": message}}

    def _begin(self, head: Json) -> Iterator[Json]:
        self._started = True
        self._stem = str(head.get("id") or "").removeprefix("chatcmpl-")
        message = new_message(self._stem, self._model or head.get("model") or "")
        message["usage"] = messages_api_usage(head.get("usage"))
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _piece(self, piece: Piece) -> Iterator[Json]:
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
        """The calls; token data is on the last, with which a client sends it back."""
        ids = CallIds(self._stem)
        for number, call in enumerate(self._calls.values(), 1):
            block = tool_use(ids.take(call.call_id), call.name, call.arguments)
            given = call.arguments if is_object(call.arguments) else orjson.dumps(block["input"]).decode()
            yield from self._begin_block(
                "tool_use", block | {"input": {}} | (tokens if number == len(self._calls) else {})
            )
            yield self._delta({"type": "input_json_delta", "partial_json": given})
            yield from self._close()

    def _begin_block(self, kind: str, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._open = kind
        self._count += 1
        yield {"type": "content_block_start", "index": self._count - 1, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._count - 1, "delta": delta}

    def _close(self, beside: Json | None = None) -> Iterator[Json]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._count - 1, **(beside or {})}
