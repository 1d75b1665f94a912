"""Chat chunks as they come -> Responses events: what `response_from_chat` makes of the whole, told piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from ngym.convert.chat.chat_to_items import CallIds, message_item, reasoning_item
from ngym.convert.chat.requests import wants_logprobs
from ngym.convert.chat.responses import INCOMPLETE, new_response, usage_from_chat
from ngym.convert.reasoning.reasoning_pieces import ChunkReader, Piece
from ngym.convert.reasoning.think_tags import Block, ReasoningStyle
from ngym.convert.stream.finished_stream import begun_item, begun_response
from ngym.convert.stream.open_item import OpenItem, Told
from ngym.schema import Json


class ResponseStream:
    """One answer of a Chat back end as a stream of events, `sequence_number` from 0 on.

    Args:
        params: the checked create params that are answered.
        response_id: of the Response; None takes the completion's.
        model: its name; None takes the chunks'.
        style: where the back end leaves reasoning. With "tags" nothing is told of an answer that does not begin with a
            tag before a closer or the end shows that it holds no reasoning.
    """

    def __init__(
        self,
        params: Json,
        response_id: str | None = None,
        model: str | None = None,
        style: ReasoningStyle = "field",
    ) -> None:
        self._params = params
        self._id = response_id
        self._model = model
        self._reader = ChunkReader(style)
        self._wants_logprobs = wants_logprobs(params)
        self._number = 0
        self._base: Json | None = None
        self._output: list[Json] = []
        self._open: OpenItem | None = None
        self._calls: dict[int, OpenItem] = {}
        self._thoughts = self._messages = 0

    def start(self) -> Iterator[Json]:
        """`response.created` and `response.in_progress`, where they have not been told; `take` does it, too."""
        if self._base is None:
            yield from self._begin({})

    def take(self, chunk: Json) -> Iterator[Json]:
        """The events of one chunk."""
        if self._base is None and "error" not in chunk:
            yield from self._begin(chunk)
        for piece in self._reader.read(chunk):
            yield from self._piece(piece)

    def end(self) -> Iterator[Json]:
        """What closes the stream; its last event is response.completed, .incomplete or .failed.

        Raises:
            UpstreamError: the back end's token data contradicts itself.
        """
        for piece in self._reader.end():
            yield from self._piece(piece)
        trouble = self._reader.trouble
        if trouble:
            yield from self.fail(trouble)
            return
        yield from self.start()
        if not self._output:
            yield from self._message("output_text")
        response = self._finished(self._reader.tokens())
        yield from self._close()
        for call in self._calls.values():
            yield from self._numbered(call.done())
        yield self._event(f"response.{response['status']}", {"response": response})

    def fail(self, message: str, code: str = "server_error") -> Iterator[Json]:
        """`response.failed` with what there is: the answer cannot be finished."""
        yield from self.start()
        failed = {**self._response(), "status": "failed", "completed_at": None}
        failed["error"] = {"code": code, "message": message}
        yield self._event("response.failed", {"response": failed})

    def _begin(self, head: Json) -> Iterator[Json]:
        stem = str(head.get("id") or "").removeprefix("chatcmpl-")
        response_id = self._id or f"resp_{stem}"
        self._stem = response_id.removeprefix("resp_")
        self._ids = CallIds(self._stem)
        model = self._model or head.get("model") or self._params.get("model") or ""
        created = head.get("created")
        self._base = new_response(self._params, [], response_id=response_id, model=model, created_at=created)
        begun = begun_response(self._base)
        yield self._event("response.created", {"response": begun})
        yield self._event("response.in_progress", {"response": begun})

    def _response(self) -> Json:
        """The Response as far as it is known."""
        for item in (self._open, *self._calls.values()):
            if item is not None:
                item.settle()
        usage = usage_from_chat(self._reader.usage)
        return {**(self._base or {}), "output": self._output, "usage": usage}

    def _finished(self, tokens: Json) -> Json:
        incomplete = INCOMPLETE.get(self._reader.finish or "")
        response = self._response()
        base = new_response(
            self._params,
            self._output,
            response_id=response["id"],
            model=response["model"],
            usage=response["usage"],
            incomplete=incomplete,
            created_at=response["created_at"],
        )
        if self._wants_logprobs and len(self._output) == 1 and self._output[0]["type"] == "message":
            self._output[0]["content"][0]["logprobs"] = self._reader.logprobs
        self._output[-1] |= tokens
        return base | ({} if self._reader.ng is None else {"ng": self._reader.ng})

    def _piece(self, piece: Piece) -> Iterator[Json]:
        match piece.kind:
            case "text" | "refusal":
                yield from self._say(piece)
            case "reasoning" if self._open:
                yield from self._numbered(self._open.more("reasoning_text", piece.text))
            case "arguments":
                yield from self._numbered(self._calls[piece.call].more("arguments", piece.text))
            case "think" | "redacted":
                yield from self._think(piece)
            case "thought" if self._open:
                self._open.item |= _marks(piece.more)
                yield from self._close()
            case "call":
                yield from self._call(piece)

    def _say(self, piece: Piece) -> Iterator[Json]:
        kind = "refusal" if piece.kind == "refusal" else "output_text"
        opened = self._open
        if opened is None or opened.item["type"] != "message":
            opened = yield from self._message(kind)
        logprobs = self._reader.latest if self._wants_logprobs else []
        yield from self._numbered(opened.more(kind, piece.text, logprobs))

    def _message(self, kind: str) -> Generator[Json, None, OpenItem]:
        self._messages += 1
        suffix = f"_{self._messages - 1}" if self._messages > 1 else ""
        opened = yield from self._begin_item(message_item([], f"msg_{self._stem}{suffix}"))
        yield from self._numbered(opened.part(kind))
        return opened

    def _think(self, piece: Piece) -> Iterator[Json]:
        item = reasoning_item(Block(""), f"rs_{self._stem}_{self._thoughts}")
        item["content"] = []
        self._thoughts += 1
        if piece.kind == "redacted":
            yield from self._begin_item(item | {"encrypted_content": piece.more["data"]})
            yield from self._close()
            return
        opened = yield from self._begin_item(item)
        yield from self._numbered(opened.part("reasoning_text"))

    def _call(self, piece: Piece) -> Iterator[Json]:
        item: Json = {"type": "function_call", "id": f"fc_{self._stem}_{len(self._calls)}"}
        item |= {
            "call_id": self._ids.take(piece.more["id"]),
            "name": piece.text,
            "arguments": "",
            "status": "completed",
        }
        self._calls[piece.call] = yield from self._begin_item(item)
        self._open = None  # calls stay open to the end: some back ends tell several at once

    def _begin_item(self, item: Json) -> Generator[Json, None, OpenItem]:
        yield from self._close()
        self._open = opened = OpenItem(item, len(self._output))
        self._output.append(item)
        yield self._event("response.output_item.added", {"output_index": opened.place, "item": begun_item(item)})
        return opened

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            done, self._open = self._open.done(), None
            yield from self._numbered(done)

    def _numbered(self, events: Told) -> Iterator[Json]:
        for kind, event in events:
            yield self._event(kind, event)

    def _event(self, kind: str, event: Json) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **event}


def _marks(more: Json) -> Json:
    """What the end of a block of reasoning says of it."""
    if "signature" in more:
        return {"encrypted_content": more["signature"]}
    return {"ng": {"tags": more["tags"]}} if "tags" in more else {}
