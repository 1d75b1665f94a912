"""Remote servers on real sockets, in their own protocols, with one scripted model: for the tests of back ends.

What they say follows from the conversation alone, so that every API, and every way through us, must tell the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ngym.services import ServiceOptions

Json = dict[str, Any]
CONTEXT = 2000  # words
ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}


class Turn(NamedTuple):
    role: str
    text: str


class StubReply(NamedTuple):
    """An answer: reasoning, words of the text, a call or none; whether it was cut off; what it cost."""

    reasoning: str
    words: list[str]
    call: Json | None
    cut: bool
    prompt_tokens: int
    completion_tokens: int

    @property
    def text(self) -> str:
        return "".join(self.words)


class Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class TooLong(Exception):
    pass


def scripted_reply(turns: list[Turn], tools: bool, limit: int | None) -> StubReply:
    """The scripted next turn. `status 429`, `garbage`, `forever` and so on in the last turn cause a fault of the
    server.
    """
    prompt = sum(len(turn.text.split()) for turn in turns)
    if prompt > CONTEXT:
        raise TooLong
    role, text = turns[-1]
    if role == "user" and (match := re.search(r"status (\d{3})", text)):
        raise Refused(int(match[1]))
    if role == "user" and "add" in text and tools:
        return StubReply("I must add.", [], ADD, False, prompt, 7)
    answer = f"The tool says {text}, naïve ☕ indeed." if role == "tool" else f"You said: {text}. Fine ☕, isn't it?"
    words = re.findall(r"\S+\s*", answer)
    if limit is not None and limit < len(words):
        return StubReply("", words[:limit], None, True, prompt, limit)
    return StubReply("", words, None, False, prompt, len(words))


class Stub:
    """A server of one protocol. `requests`: what it got; `abandoned`: how many answers no one waited for.

    corruption: where set, chance puts something wrong somewhere into each answer.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, Json, Request]] = []
        self.running = self.abandoned = 0
        self.corruption: random.Random | None = None
        self.app = FastAPI()
        self.app.state.options_model, self.app.state.kind = ServiceOptions, "model"
        self.app.add_api_route("/{path:path}", self._handle, methods=["POST", "GET"])

    @property
    def body(self) -> Json:
        return self.requests[-1][1]

    async def _handle(self, path: str, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.requests.append((path, body, request))
        known = next((route for route in self.routes() if path.endswith(route)), None)
        if known is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        if "garbage" in str(raw):
            return Response("<html>welcome</html>", media_type="text/html")
        if b"forever" in raw:
            return await self._forever(request, bool(body.get("stream")))
        try:
            answer = self.answer(known, body)
            return answer if self.corruption is None else _corrupted(answer, self.corruption)
        except Refused as error:
            headers = {"retry-after-ms": "10"} if error.status in (429, 529) else {}
            return JSONResponse(self.error(error.status), error.status, headers)
        except TooLong:
            return JSONResponse(self.too_long(), 400)

    async def _forever(self, request: Request, stream: bool) -> Response:
        async def nothing() -> AsyncIterator[bytes]:
            self.running += 1
            try:
                while True:
                    yield self.keep_alive()
                    await asyncio.sleep(0.02)
            finally:
                self.abandoned += 1

        if stream:
            return StreamingResponse(nothing(), media_type="text/event-stream")
        self.running += 1
        while not await request.is_disconnected():
            await asyncio.sleep(0.02)
        self.abandoned += 1
        return Response()

    def routes(self) -> tuple[str, ...]:
        raise NotImplementedError

    def answer(self, route: str, body: Json) -> Response:
        raise NotImplementedError

    def keep_alive(self) -> bytes:
        """An event that says a little, for a stream without end."""
        raise NotImplementedError

    def error(self, status: int) -> Json:
        return {"error": {"message": f"stub says {status}", "type": "x", "param": None, "code": None}}

    def too_long(self) -> Json:
        message = f"This model's maximum context length is {CONTEXT} tokens. Please reduce the length of the messages."
        return {"error": {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}}


WRONG = (None, 0, -1, "", "x", [], {}, [None], [{}], {"a": 1}, 1.5, True, 1e30)


def _corrupted(answer: Response, draw: random.Random) -> Response:
    if not isinstance(answer, StreamingResponse):
        return JSONResponse(_with_a_fault(json.loads(answer.body), draw))
    events = answer.body_iterator

    async def corrupted() -> AsyncIterator[str]:
        async for event in events:
            text = event if isinstance(event, str) else bytes(event).decode()
            name, _, data = text.partition("data: ")
            wrong = draw.random() < 0.1 and data.startswith("{")
            yield f"{name}data: {json.dumps(_with_a_fault(json.loads(data), draw))}\n\n" if wrong else text

    return StreamingResponse(corrupted(), media_type="text/event-stream")


def _with_a_fault(value: Json, draw: random.Random) -> Json:
    """The value with one of its members, however deep, left out or replaced."""
    holders: list[tuple[Any, Any]] = []
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        members = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, inner in members:
            holders.append((one, key))
            waiting.append(inner)
    holder, key = draw.choice(holders)
    if draw.random() < 0.3:
        del holder[key]
    else:
        holder[key] = draw.choice(WRONG)
    return value


def sse(events: Iterator[Json], *, named: bool = False, done: bool = False) -> Response:
    async def format_events() -> AsyncIterator[str]:
        for event in events:
            yield (f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n"
            await asyncio.sleep(0)
        if done:
            yield "data: [DONE]\n\n"

    return StreamingResponse(format_events(), media_type="text/event-stream")


def text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)


class OpenAI(Stub):
    """OpenAI's two APIs, at OpenAI's paths and Azure's; Chat also with vLLM's `return_token_ids`."""

    def __init__(self, responses: bool = True) -> None:
        super().__init__()
        self._responses = responses

    def routes(self) -> tuple[str, ...]:
        return ("/responses", "/chat/completions") if self._responses else ("/chat/completions",)

    def answer(self, route: str, body: Json) -> Response:
        if route == "/responses":
            items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
            reply = scripted_reply(
                [_turn(item) for item in items], bool(body.get("tools")), body.get("max_output_tokens")
            )
            response = _response(reply)
            if body.get("stream"):
                return sse(_response_events(reply, response), named=True)
            return JSONResponse(response)
        turns = [Turn(message["role"], text_of(message["content"])) for message in body["messages"]]
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        reply = scripted_reply(turns, bool(body.get("tools")), limit)
        ids = bool(body.get("return_token_ids"))
        if body.get("stream"):
            return sse(_chunks(reply, ids, bool(body.get("stream_options", {}).get("include_usage"))), done=True)
        return JSONResponse(_completion(reply, ids))

    def keep_alive(self) -> bytes:
        if self.requests[-1][0].endswith("/responses"):
            event = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "content_index": 0}
            return b"data: " + json.dumps(event | {"delta": "on ", "sequence_number": 1}).encode() + b"\n\n"
        choice = {"index": 0, "delta": {"content": "on "}, "finish_reason": None}
        return b"data: " + json.dumps(_head("chat.completion.chunk") | {"choices": [choice]}).encode() + b"\n\n"


def _turn(item: Json) -> Turn:
    if item.get("type") == "function_call_output":
        return Turn("tool", text_of(item["output"]))
    return Turn(item.get("role", "assistant"), text_of(item.get("content")))


def _response(reply: StubReply) -> Json:
    output: list[Json] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "sealed"})
    if reply.words:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        status = "incomplete" if reply.cut else "completed"
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": [part]})
    if reply.call:
        call = {"call_id": "call_1", "name": reply.call["name"], "arguments": json.dumps(reply.call["arguments"])}
        output.append({"type": "function_call", "id": "fc_1", "status": "completed", **call})
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "incomplete" if reply.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "error": None,
        "model": "stub-1",
        "output": output,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _response_events(reply: StubReply, response: Json) -> Iterator[Json]:
    initial = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[Json] = [{"type": "response.created", "response": initial}]
    for index, item in enumerate(response["output"]):
        at = {"item_id": item["id"], "output_index": index}
        empty = item | {"status": "in_progress", "content": []} if item["type"] == "message" else item
        events.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        if item["type"] == "message":
            part = item["content"][0]
            at |= {"content_index": 0}
            events.append({"type": "response.content_part.added", **at, "part": part | {"text": ""}})
            events += [{"type": "response.output_text.delta", **at, "delta": w, "logprobs": []} for w in reply.words]
            events.append({"type": "response.output_text.done", **at, "text": reply.text, "logprobs": []})
            events.append({"type": "response.content_part.done", **at, "part": part})
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            events.append({"type": "response.function_call_arguments.delta", **at, "delta": arguments[:4]})
            events.append({"type": "response.function_call_arguments.delta", **at, "delta": arguments[4:]})
            events.append({"type": "response.function_call_arguments.done", **at, "arguments": arguments})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        yield event | {"sequence_number": number}


def _head(kind: str) -> Json:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "stub-1"}


def _usage(reply: StubReply) -> Json:
    total = reply.prompt_tokens + reply.completion_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": total,
    }


def _finish(reply: StubReply) -> str:
    return "length" if reply.cut else "tool_calls" if reply.call else "stop"


def _ids(reply: StubReply) -> tuple[list[int], list[Json]]:
    """vLLM's ids and logprobs of what was sampled: here one a word."""
    ids = [100 + index for index in range(reply.completion_tokens)]
    return ids, [{"token": "x", "logprob": -id / 256, "bytes": None, "top_logprobs": []} for id in ids]


def _completion(reply: StubReply, with_ids: bool) -> Json:
    message: Json = {"role": "assistant", "content": reply.text or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.call:
        function = {"name": reply.call["name"], "arguments": json.dumps(reply.call["arguments"])}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    choice: Json = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}
    completion = _head("chat.completion") | {"choices": [choice], "usage": _usage(reply)}
    if with_ids:
        ids, logprobs = _ids(reply)
        choice |= {"token_ids": ids, "logprobs": {"content": logprobs}}
        completion["prompt_token_ids"] = [1, 2, 3]
    return completion


def _chunks(reply: StubReply, with_ids: bool, include_usage: bool) -> Iterator[Json]:
    head = _head("chat.completion.chunk")
    ids, logprobs = _ids(reply)

    def chunk(delta: Json, finish: str | None = None, count: int = 0) -> Json:
        choice: Json = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        if with_ids:
            chunk_ids, probs = ids[:count], logprobs[:count]
            del ids[:count], logprobs[:count]
            choice |= {"token_ids": chunk_ids, "logprobs": {"content": probs} if probs else None}
        return head | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""}) | ({"prompt_token_ids": [1, 2, 3]} if with_ids else {})
    if reply.reasoning:
        yield chunk({"reasoning_content": reply.reasoning[:5]}, count=1)
        yield chunk({"reasoning_content": reply.reasoning[5:]}, count=1)
    for word in reply.words:
        yield chunk({"content": word}, count=1)
    if reply.call:
        arguments = json.dumps(reply.call["arguments"])
        start = {"name": reply.call["name"], "arguments": ""}
        yield chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": start}]}, count=1)
        yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments[:4]}}]}, count=2)
        yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments[4:]}}]}, count=2)
    yield chunk({}, _finish(reply), len(ids))
    if include_usage:
        yield head | {"choices": [], "usage": _usage(reply)}


class Anthropic(Stub):
    """Anthropic's Messages API: thinking is signed, and a call with thinking that comes back without it is refused."""

    def routes(self) -> tuple[str, ...]:
        return ("v1/messages",)

    def answer(self, route: str, body: Json) -> Response:
        turns = [Turn("system", text_of(body["system"]))] if body.get("system") else []
        for message in body["messages"]:
            blocks = message["content"]
            blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
            if message["role"] == "assistant" and any(block["type"] == "tool_use" for block in blocks):
                assert blocks[0] == {"type": "thinking", "thinking": "I must add.", "signature": "sealed"}, blocks
            for block in blocks:
                result = block["type"] == "tool_result"
                text = text_of(block["content"]) if result else block.get("text", "")
                turns.append(Turn("tool" if result else message["role"], text))
        reply = scripted_reply(turns, bool(body.get("tools")), body["max_tokens"])
        if body.get("stream"):
            return sse(self._events(reply), named=True)
        return JSONResponse(self._message(reply))

    def error(self, status: int) -> Json:
        kind = {429: "rate_limit_error", 529: "overloaded_error", 401: "authentication_error"}.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": f"stub says {status}"}, "request_id": "req_1"}

    def too_long(self) -> Json:
        message = f"prompt is too long: {CONTEXT + 1} tokens > {CONTEXT} maximum"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}

    def keep_alive(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    def _message(self, reply: StubReply) -> Json:
        content: list[Json] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": "sealed"})
        if reply.words:
            content.append({"type": "text", "text": reply.text, "citations": None})
        if reply.call:
            content.append(
                {"type": "tool_use", "id": "toolu_1", "name": reply.call["name"], "input": reply.call["arguments"]}
            )
        stop = "max_tokens" if reply.cut else "tool_use" if reply.call else "end_turn"
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        about = {"id": "msg_1", "type": "message", "role": "assistant", "model": "stub-1", "stop_sequence": None}
        return about | {"content": content, "stop_reason": stop, "usage": usage}

    def _events(self, reply: StubReply) -> Iterator[Json]:
        message = self._message(reply)
        initial = message | {"content": [], "stop_reason": None, "usage": message["usage"] | {"output_tokens": 1}}
        yield {"type": "message_start", "message": initial}
        yield {"type": "ping"}
        for index, block in enumerate(message["content"]):
            at = {"index": index}
            match block["type"]:
                case "thinking":
                    empty = {"type": "thinking", "thinking": "", "signature": ""}
                    halves = (block["thinking"][:5], block["thinking"][5:])
                    deltas = [{"type": "thinking_delta", "thinking": half} for half in halves]
                    deltas.append({"type": "signature_delta", "signature": "sealed"})
                case "text":
                    empty = {"type": "text", "text": ""}
                    deltas = [{"type": "text_delta", "text": word} for word in reply.words]
                case _:
                    empty = block | {"input": {}}
                    written = json.dumps(block["input"])
                    halves = ("", written[:4], written[4:])
                    deltas = [{"type": "input_json_delta", "partial_json": half} for half in halves]
            yield {"type": "content_block_start", **at, "content_block": empty}
            for delta in deltas:
                yield {"type": "content_block_delta", **at, "delta": delta}
            yield {"type": "content_block_stop", **at}
        ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": reply.completion_tokens}}
        yield {"type": "message_stop"}
