"""Converts between streams of Chat chunks and of Responses events."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import orjson

from ngym.convert.chat_items import CallIds, message_item, output_text, reasoning_item
from ngym.convert.chat_requests import INCOMPLETE, chat_from_response, new_response, usage_from_chat, wants_logprobs
from ngym.convert.reasoning import (
    BETWEEN,
    ENDED_EARLY,
    Block,
    ChunkReader,
    ReasoningPiece,
    ReasoningStyle,
    block_from_reasoning,
)
from ngym.schema import Json, token_fields

SSE_DONE = b"data: [DONE]\n\n"
SplitText = Iterator[tuple[str, Json]]
"""Events without their number: type and members."""
_PARTS: dict[str, Any] = {
    "output_text": lambda: output_text(""),
    "reasoning_text": lambda: {"type": "reasoning_text", "text": ""},
    "refusal": lambda: {"type": "refusal", "refusal": ""},
}
_SAID = {  # events with text -> the field of a chunk's delta for it
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning_content",
    "response.reasoning_summary_text.delta": "reasoning_content",
}
FINISHED_EVENTS = frozenset({"response.completed", "response.incomplete"})


def sse(event: Json) -> bytes:
    """One server-sent event; Responses events carry their type as the event's name, Chat chunks have none."""
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + orjson.dumps(event) + b"\n\n"


def response_events(response: Json) -> Iterator[Json]:
    """The events of a finished Response, `sequence_number` from 0 on."""
    for number, (kind, event) in enumerate(_response_events(response)):
        yield {"type": kind, "sequence_number": number, **event}


def chat_chunks(completion: Json, *, include_usage: bool = False) -> Iterator[Json]:
    """The chunks of a finished Chat Completion; usage, if requested, in a last one without choices."""
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = completion["choices"][0]
    message = choice["message"]

    def chunk(delta: Json, finish: str | None = None, **more: Any) -> Json:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None, **more}]}

    yield chunk({"role": "assistant", "content": ""})
    for delta in _reasoning_deltas(message):
        yield chunk(delta)
    for name in ("content", "refusal"):
        if message.get(name):
            more = {"logprobs": choice.get("logprobs")} if name == "content" else {}
            yield chunk({name: message[name]}, **more)
    for index, call in enumerate(message.get("tool_calls") or ()):
        start = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
        yield chunk({"tool_calls": [start]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]})
    extra = token_fields(message)
    if "stop_reason" in choice:  # vLLM's: the stop string that was met
        extra["stop_reason"] = choice["stop_reason"]
    yield chunk({}, choice["finish_reason"], **extra) | ({"ng": completion["ng"]} if "ng" in completion else {})
    if include_usage:
        yield {**head, "choices": [], "usage": completion.get("usage")}


def _reasoning_deltas(message: Json) -> Iterator[Json]:
    """Reasoning in one piece; signed reasoning block by block, each followed by its signature."""
    blocks = message.get("thinking_blocks") or ()
    if not blocks and message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    between = ""
    for block in blocks:
        if block.get("thinking"):
            yield {"reasoning_content": between + block["thinking"]}
            between = BETWEEN
        yield {"thinking_blocks": [block]}


def _response_events(response: Json) -> Iterator[tuple[str, Json]]:
    started = initial_response(response)
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(response["output"]):
        place = {"item_id": item.get("id"), "output_index": index}
        yield "response.output_item.added", {"output_index": index, "item": initial_item(item)}
        match item["type"]:
            case "message":
                yield from _content_events(item["content"], place)
            case "function_call":
                arguments = item["arguments"]
                if arguments:
                    yield "response.function_call_arguments.delta", {**place, "delta": arguments}
                yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}
            case "reasoning":
                yield from _summary_events(item["summary"], place)
                yield from _content_events(item.get("content") or [], place)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def initial_response(response: Json) -> Json:
    """The Response as it was at its beginning, without output."""
    initial = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    return initial | {"incomplete_details": None, "error": None}


def initial_item(item: Json) -> Json:
    """The item as it was at its beginning, without content."""
    initial = {name: [] if name in ("content", "summary") else value for name, value in item.items()}
    if "arguments" in initial:
        initial["arguments"] = ""
    if "status" in initial:
        initial["status"] = "in_progress"
    return initial


def _content_events(parts: list[Json], place: Json) -> Iterator[tuple[str, Json]]:
    for index, part in enumerate(parts):
        at = {**place, "content_index": index}
        field = "refusal" if part["type"] == "refusal" else "text"
        name = "response." + part["type"]  # output_text, refusal, reasoning_text
        logprobs = {"logprobs": part.get("logprobs") or []} if part["type"] == "output_text" else {}
        yield "response.content_part.added", {**at, "part": empty_part(part)}
        if part[field]:
            yield f"{name}.delta", {**at, "delta": part[field], **logprobs}
        yield f"{name}.done", {**at, field: part[field], **logprobs}
        yield "response.content_part.done", {**at, "part": part}


def empty_part(part: Json) -> Json:
    """The part as it was at its beginning, without text."""
    field = "refusal" if part["type"] == "refusal" else "text"
    return {**part, field: ""} | ({"logprobs": []} if "logprobs" in part else {})


def _summary_events(parts: list[Json], place: Json) -> Iterator[tuple[str, Json]]:
    for index, part in enumerate(parts):
        at = {**place, "summary_index": index}
        yield "response.reasoning_summary_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**at, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**at, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**at, "part": part}


class OpenItem:
    """An unfinished item, its place in the output, and the events of its content, each a (type, members) pair.

    `item` is the same dict as in the output; it has the content so far after `settle`.
    """

    def __init__(self, item: Json, place: int) -> None:
        self.item = item
        self.place = place
        self._at = {"item_id": item["id"], "output_index": place}
        self._deltas: list[str] = []

    def part(self, kind: str) -> SplitText:
        """Begin a part."""
        part = _PARTS[kind]()
        self.item["content"].append(part)
        yield "response.content_part.added", {**self._position(), "part": empty_part(part)}

    def more(self, kind: str, text: str, logprobs: list[Json] | None = None) -> SplitText:
        """Append to the part, or to the arguments of a call."""
        if kind == "arguments":
            self._deltas.append(text)
            yield "response.function_call_arguments.delta", {**self._at, "delta": text}
            return
        if self.item["content"][-1]["type"] != kind:
            yield from self._part_done()
            yield from self.part(kind)
        self._deltas.append(text)
        more = {"logprobs": logprobs} if kind == "output_text" else {}
        yield f"response.{kind}.delta", {**self._position(), "delta": text, **more}

    def settle(self) -> None:
        """Write the content so far into the item."""
        if self.item["type"] == "function_call":
            self.item["arguments"] = "".join(self._deltas)
        elif self.item.get("content"):
            part = self.item["content"][-1]
            part[_field(part)] = "".join(self._deltas)

    def done(self) -> SplitText:
        """End the item."""
        if self.item["type"] == "function_call":
            self.settle()
            fields = {"name": self.item["name"], "arguments": self.item["arguments"]}
            yield "response.function_call_arguments.done", {**self._at, **fields}
        elif self.item["content"]:
            yield from self._part_done()
        yield "response.output_item.done", {"output_index": self.place, "item": self.item}

    def _part_done(self) -> SplitText:
        self.settle()
        self._deltas = []
        part = self.item["content"][-1]
        fields = {_field(part): part[_field(part)]}
        if part["type"] == "output_text":
            fields["logprobs"] = part["logprobs"]
        yield f"response.{part['type']}.done", {**self._position(), **fields}
        yield "response.content_part.done", {**self._position(), "part": part}

    def _position(self) -> Json:
        return {**self._at, "content_index": len(self.item["content"]) - 1}


def _field(part: Json) -> str:
    return "refusal" if part["type"] == "refusal" else "text"


class ChunkStream:
    """Converts a stream of Responses events to Chat chunks.

    The last chunk with a choice has its finish_reason, token data next to the delta, and `ng`; usage comes after it if
    the client requested it. An item without deltas (only `output_item.done`) becomes one delta.

    Args:
        model: the model's name; None: that of the Response.
        include_usage: whether the client set `stream_options.include_usage`.
    """

    def __init__(self, model: str | None = None, include_usage: bool = False) -> None:
        self._model = model
        self._include_usage = include_usage
        self._head: Json | None = None
        self._streamed: dict[int, set[str]] = {}
        self._calls: dict[int, int] = {}
        self._reasoned = False
        self._ended = False

    def take(self, event: Json) -> Iterator[Json]:
        """The chunks of one event."""
        kind = event["type"]
        if self._head is None and "response" in event:
            yield from self._begin(event["response"])
        if kind in _SAID:
            yield from self._text_delta(event, _SAID[kind])
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            yield self._call(event["item"], event["output_index"])
        elif kind == "response.function_call_arguments.delta":
            yield self._arguments(event["output_index"], event["delta"])
        elif kind == "response.output_item.done":
            yield from self._rest(event["item"], event["output_index"])
        elif kind in FINISHED_EVENTS:
            yield from self._last_chunks(event["response"])
        elif kind in ("error", "response.failed"):
            yield from self.fail(_message(event))

    def end(self) -> Iterator[Json]:
        """The closing chunks: an error if the last event never came, else none."""
        if not self._ended:
            yield from self.fail(ENDED_EARLY)

    def fail(self, message: str, kind: str = "server_error") -> Iterator[Json]:
        """An error chunk: the answer cannot be finished."""
        self._ended = True
        yield {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def _begin(self, response: Json) -> Iterator[Json]:
        stem = str(response["id"]).removeprefix("resp_")
        self._head = {"id": f"chatcmpl-{stem}", "object": "chat.completion.chunk"}
        self._head |= {"created": int(response["created_at"]), "model": self._model or response.get("model") or ""}
        yield self._chunk({"role": "assistant", "content": ""})

    def _text_delta(self, event: Json, field: str) -> Iterator[Json]:
        place, text = event["output_index"], event["delta"]
        if not text:
            return
        streamed = self._streamed.setdefault(place, set())
        if "summary_index" in event:
            streamed.add("summary")
        elif field == "reasoning_content" and "summary" in streamed:
            return  # the same reasoning twice: a Chat Completion has only one text for it
        if field == "reasoning_content" and field not in streamed:
            text = BETWEEN + text if self._reasoned else text
            self._reasoned = True
        streamed.add(field)
        logprobs = {"content": event["logprobs"], "refusal": None} if event.get("logprobs") else None
        yield self._chunk({field: text}, logprobs=logprobs)

    def _call(self, item: Json, place: int) -> Json:
        index = self._calls[place] = len(self._calls)
        self._streamed[place] = set()
        function = {"name": item["name"], "arguments": ""}
        return self._chunk(
            {"tool_calls": [{"index": index, "id": item["call_id"], "type": "function", "function": function}]}
        )

    def _arguments(self, place: int, text: str) -> Json:
        self._streamed[place].add("arguments")
        return self._chunk({"tool_calls": [{"index": self._calls[place], "function": {"arguments": text}}]})

    def _rest(self, item: Json, place: int) -> Iterator[Json]:
        """The chunks of the item's content that came without deltas."""
        streamed = set(self._streamed.get(place, ()))
        match item["type"]:
            case "function_call":
                if place not in self._calls:
                    yield self._call(item, place)
                if item["arguments"] and "arguments" not in streamed:
                    yield self._arguments(place, item["arguments"])
            case "message":
                for part in item["content"]:
                    field = "refusal" if part["type"] == "refusal" else "content"
                    text = part["refusal" if field == "refusal" else "text"]
                    if text and field not in streamed:
                        yield from self._text_delta(
                            {"output_index": place, "delta": text, "logprobs": part.get("logprobs")}, field
                        )
            case "reasoning":
                block = block_from_reasoning(item)
                if block.get("thinking") and "reasoning_content" not in streamed:
                    yield from self._text_delta(
                        {"output_index": place, "delta": block["thinking"]}, "reasoning_content"
                    )
                if item.get("encrypted_content"):
                    yield self._chunk({"thinking_blocks": [block]})

    def _last_chunks(self, response: Json) -> Iterator[Json]:
        self._ended = True
        completion = chat_from_response(response)
        choice, message = completion["choices"][0], completion["choices"][0]["message"]
        tokens = token_fields(message)
        last = self._chunk({}, choice["finish_reason"], **tokens)
        yield last | ({"ng": completion["ng"]} if "ng" in completion else {})
        if self._include_usage:
            yield {**(self._head or {}), "choices": [], "usage": completion["usage"]}

    def _chunk(self, delta: Json, finish: str | None = None, **extra: Any) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None, **extra}
        return {**(self._head or {}), "choices": [choice]}


def _message(event: Json) -> str:
    error = (event.get("response") or {}).get("error") or event.get("error") or event
    return str(error.get("message") or "the model's back end failed and gave no reason")


class ResponseStream:
    """Converts a stream of Chat chunks to Responses events, `sequence_number` from 0 on.

    Args:
        params: the checked create params of the request.
        response_id: of the Response; None: that of the completion.
        model: the model's name; None: that of the chunks.
        style: where the back end puts reasoning. With "tags", an answer that does not begin with a tag is held back
            until a closing tag or the end shows whether it has reasoning.
    """

    def __init__(
        self, params: Json, response_id: str | None = None, model: str | None = None, style: ReasoningStyle = "field"
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
        """`response.created` and `response.in_progress`, unless they were sent; `take` also sends them."""
        if self._base is None:
            yield from self._begin({})

    def take(self, chunk: Json) -> Iterator[Json]:
        """The events of one chunk."""
        if self._base is None and "error" not in chunk:
            yield from self._begin(chunk)
        for piece in self._reader.read(chunk):
            yield from self._piece(piece)

    def end(self) -> Iterator[Json]:
        """The closing events; the last one is response.completed, .incomplete or .failed.

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
        response = self._finished_response(self._reader.tokens())
        yield from self._close()
        for call in self._calls.values():
            yield from self._number_events(call.done())
        yield self._event(f"response.{response['status']}", {"response": response})

    def fail(self, message: str, code: str = "server_error") -> Iterator[Json]:
        """`response.failed` with the partial output: the answer cannot be finished."""
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
        initial = initial_response(self._base)
        yield self._event("response.created", {"response": initial})
        yield self._event("response.in_progress", {"response": initial})

    def _response(self) -> Json:
        """The Response so far."""
        for item in (self._open, *self._calls.values()):
            if item is not None:
                item.settle()
        usage = usage_from_chat(self._reader.usage)
        return {**(self._base or {}), "output": self._output, "usage": usage}

    def _finished_response(self, tokens: Json) -> Json:
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

    def _piece(self, piece: ReasoningPiece) -> Iterator[Json]:
        match piece.kind:
            case "text" | "refusal":
                yield from self._text_events(piece)
            case "reasoning" if self._open:
                yield from self._number_events(self._open.more("reasoning_text", piece.text))
            case "arguments":
                yield from self._number_events(self._calls[piece.call].more("arguments", piece.text))
            case "think" | "redacted":
                yield from self._thought_events(piece)
            case "thought" if self._open:
                self._open.item |= _marks(piece.more)
                yield from self._close()
            case "call":
                yield from self._call(piece)

    def _text_events(self, piece: ReasoningPiece) -> Iterator[Json]:
        kind = "refusal" if piece.kind == "refusal" else "output_text"
        opened = self._open
        if opened is None or opened.item["type"] != "message":
            opened = yield from self._message(kind)
        logprobs = self._reader.latest if self._wants_logprobs else []
        yield from self._number_events(opened.more(kind, piece.text, logprobs))

    def _message(self, kind: str) -> Generator[Json, None, OpenItem]:
        self._messages += 1
        suffix = f"_{self._messages - 1}" if self._messages > 1 else ""
        opened = yield from self._begin_item(message_item([], f"msg_{self._stem}{suffix}"))
        yield from self._number_events(opened.part(kind))
        return opened

    def _thought_events(self, piece: ReasoningPiece) -> Iterator[Json]:
        item = reasoning_item(Block(""), f"rs_{self._stem}_{self._thoughts}")
        item["content"] = []
        self._thoughts += 1
        if piece.kind == "redacted":
            yield from self._begin_item(item | {"encrypted_content": piece.more["data"]})
            yield from self._close()
            return
        opened = yield from self._begin_item(item)
        yield from self._number_events(opened.part("reasoning_text"))

    def _call(self, piece: ReasoningPiece) -> Iterator[Json]:
        item: Json = {"type": "function_call", "id": f"fc_{self._stem}_{len(self._calls)}"}
        item |= {
            "call_id": self._ids.take(piece.more["id"]),
            "name": piece.text,
            "arguments": "",
            "status": "completed",
        }
        self._calls[piece.call] = yield from self._begin_item(item)
        self._open = None  # calls stay open to the end: some back ends interleave several

    def _begin_item(self, item: Json) -> Generator[Json, None, OpenItem]:
        yield from self._close()
        self._open = opened = OpenItem(item, len(self._output))
        self._output.append(item)
        yield self._event("response.output_item.added", {"output_index": opened.place, "item": initial_item(item)})
        return opened

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            item, self._open = self._open.done(), None
            yield from self._number_events(item)

    def _number_events(self, events: SplitText) -> Iterator[Json]:
        for kind, event in events:
            yield self._event(kind, event)

    def _event(self, kind: str, event: Json) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **event}


def _marks(more: Json) -> Json:
    """The fields that the end of a block adds to its reasoning item."""
    if "signature" in more:
        return {"encrypted_content": more["signature"]}
    return {"ng": {"tags": more["tags"]}} if "tags" in more else {}
