"""One call: prompt ids to the engine, its tokens as Chat chunks, or as one Chat Completion made of the same pieces."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING

from ngym.dialogue.engine import Finish, Generate, Sampled, sampling_of
from ngym.dialogue.spoken import Piece, Spoken
from ngym.dialogue.template import Template
from ngym.dialogue.text import Detokenizer, Stops
from ngym.schema import TOKEN_FIELDS, Json

if TYPE_CHECKING:
    from ngym.services.models.client_token_ids import SeenCall

LONG = 20_000  # characters: some milliseconds


class Dialogue:
    """What a model server's `respond` and `stream` call.

    Args:
        model: its name, in answers.
        context: how many tokens it can take, prompt and answer together.
        can: what the engine can do beyond the common (engine.NEUTRAL has the names).
    """

    def __init__(
        self, template: Template, generate: Generate, model: str, context: int, can: frozenset[str] = frozenset()
    ) -> None:
        self._template = template
        self._generate = generate
        self._model = model
        self._context = context
        self._can = can
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")  # one: tokenizers are not made for more

    async def completion(self, request: Json, seen: SeenCall | None) -> Json:
        """The Chat Completion to a checked request; its message carries the token fields.

        Raises:
            BadRequest: it asks for what this back end cannot do.
        """
        answer = _Answer(self._model)
        async with aclosing(self._pieces(answer, request, seen, streamed=False)) as pieces:
            async for piece in pieces:
                answer.add(piece)
        return answer.completion(bool(request.get("logprobs")))

    async def chunks(self, request: Json, seen: SeenCall | None) -> AsyncGenerator[Json, None]:
        """Chat chunks as the tokens come; the one with the finish_reason carries the token fields, then comes usage."""
        answer = _Answer(self._model)
        said: Json = {"role": "assistant"}  # with the first piece: what fails before it is no stream
        async with aclosing(self._pieces(answer, request, seen, streamed=True)) as pieces:
            async for piece in pieces:
                yield answer.chunk(said | answer.add(piece))
                said = {}
        if said:
            yield answer.chunk(said | {"content": ""})
        for chunk in answer.last_chunks(bool(request.get("logprobs"))):
            yield chunk

    async def _prompt(self, request: Json, seen: SeenCall | None) -> list[int]:
        """A long conversation takes its time to be tokenised: it does that beside the event loop."""
        if sum(len(message.get("content") or ()) for message in request["messages"]) < LONG:
            return self._template.prompt(request, seen)
        work = asyncio.get_running_loop().run_in_executor
        return await work(self._thread, self._template.prompt, request, seen)

    async def _pieces(
        self, answer: _Answer, request: Json, seen: SeenCall | None, *, streamed: bool
    ) -> AsyncGenerator[Piece, None]:
        """Fills in the answer's tokens on the way."""
        template = self._template
        prompt = answer.prompt = await self._prompt(request, seen)
        sampling = sampling_of(request, self._context - len(prompt), self._can, streamed=streamed)
        if sampling.max_tokens < 1:
            answer.finish = "length"
            return  # the conversation does not fit: nothing is said, and that is no error
        text, stops = Detokenizer(template.tokenizer), Stops(sampling.stop)
        tools = bool(request.get("tools")) and request.get("tool_choice") != "none"
        spoken = Spoken(in_thought=template.in_thought(prompt), tools=tools)
        async with aclosing(self._generate(prompt, sampling)) as tokens:
            async for sampled in tokens:
                answer.take(sampled)
                for piece in spoken.take(stops.take(text.take(_without_end(sampled, template.ends.any)))):
                    yield piece
                if stops.met is not None:
                    answer.finish, answer.stop = "stop", stops.met
                    break
        for piece in spoken.take(stops.take(text.end()) + stops.end()):
            yield piece
        for piece in spoken.end():
            yield piece


def _without_end(sampled: Sampled, ends: frozenset[int]) -> list[int]:
    """The ids that say something: the one that ends the turn does not."""
    if sampled.finish == "stop" and sampled.ids and sampled.ids[-1] in ends:
        return sampled.ids[:-1]
    return sampled.ids


class _Answer:
    """What was said and sampled so far."""

    def __init__(self, model: str) -> None:
        self.prompt: list[int] = []
        self.finish: Finish | None = None
        self.stop: str | None = None
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._version = 0
        self._said: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        self._calls: list[Json] = []

    def take(self, sampled: Sampled) -> None:
        self._ids += sampled.ids
        self._logprobs += sampled.logprobs
        self.finish = sampled.finish or self.finish
        self._version = sampled.version

    def add(self, piece: Piece) -> Json:
        """Remember a piece; as a delta."""
        if piece.kind != "call":
            name = "reasoning_content" if piece.kind == "reasoning" else "content"
            self._said[name].append(piece.text)
            return {name: piece.text}
        function = {"name": piece.name, "arguments": piece.text}
        call = {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        self._calls.append(call)
        return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}

    def completion(self, logprobs: bool) -> Json:
        message: Json = {"role": "assistant", "content": None}
        message |= {name: "".join(parts) for name, parts in self._said.items() if parts}
        if self._calls:
            message["tool_calls"] = self._calls
        if not self._calls and message["content"] is None:
            message["content"] = ""
        choice = {"index": 0, "message": message | self._tokens(), **self._finish(), **self._told(logprobs)}
        return {"object": "chat.completion", **self._head, "choices": [choice], "usage": self._usage(), **self._ng()}

    def chunk(self, delta: Json) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        return {"object": "chat.completion.chunk", **self._head, "choices": [choice]}

    def last_chunks(self, logprobs: bool) -> Iterator[Json]:
        last = self.chunk({})
        last["choices"][0] |= self._tokens() | self._finish() | self._told(logprobs)
        yield last | self._ng()
        yield {**last, "choices": [], "usage": self._usage()}

    def _finish(self) -> Json:
        if self.finish == "stop" and self._calls:
            return {"finish_reason": "tool_calls"}
        return {"finish_reason": self.finish or "stop"} | ({"stop_reason": self.stop} if self.stop else {})

    def _tokens(self) -> Json:
        if not self._ids:
            return {}
        return dict(zip(TOKEN_FIELDS, (self.prompt, self._ids, self._logprobs), strict=True))

    def _ng(self) -> Json:
        return {"ng": {"policy_version": [[0, len(self._ids), self._version]]}} if self._ids else {}

    def _told(self, wanted: bool) -> Json:
        """Logprobs where the client asks for them."""
        if not wanted:
            return {"logprobs": None}
        entries: list[Json] = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(self._ids, self._logprobs, strict=True)
        ]
        return {"logprobs": {"content": entries, "refusal": None}}

    def _usage(self) -> Json:
        prompt, said = len(self.prompt), len(self._ids)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
