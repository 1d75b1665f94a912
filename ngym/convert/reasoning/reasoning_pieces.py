"""Chat chunks, whatever their back end, as a sequence of pieces in which each block of reasoning is opened and closed.

ChunkReader also remembers what stands beside the text: why the model stopped, usage, token data, logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ngym.convert.reasoning.signed_reasoning import BETWEEN
from ngym.convert.reasoning.think_tags import ReasoningStyle, ThinkSplitter, Told
from ngym.errors import UpstreamError
from ngym.schema import TOKEN_FIELDS, Json

GAVE_UP = frozenset({"abort", "error"})
"""vLLM's finish reasons when it was paused or lost its engine."""

ENDED_EARLY = "the model's back end ended its stream before the answer was finished"


class Piece(NamedTuple):
    """One thing that a chunk says.

    think: a block of reasoning begins; more: nothing.
    reasoning, text, refusal, arguments: more of it (`call`: which call's arguments).
    thought: the block is over; more: `tags` if they are not the usual ones, or `signature`.
    redacted: a block of reasoning whose text nobody may read; more: the block.
    call: a tool call begins; text: the tool's name, call: its number, more: its `id`.
    """

    kind: Literal["think", "reasoning", "thought", "redacted", "text", "refusal", "call", "arguments"]
    text: str = ""
    call: int = 0
    more: Json = {}  # noqa: RUF012  # never written to


class ChunkReader:
    """Chunks in, pieces out; the attributes are what was said beside them.

    Attributes:
        head: id, created and model of the first chunk.
        finish: the finish_reason, None until it comes; stop: vLLM's stop_reason.
        usage, ng: of the chunks, None until they come.
        error: what the back end says went wrong.
        logprobs: of all sampled tokens so far, where the back end tells them; latest: those of the chunk being read.
    """

    def __init__(self, style: ReasoningStyle = "field") -> None:
        self.head: Json = {}
        self.finish: str | None = None
        self.stop: str | int | None = None
        self.usage: Json | None = None
        self.ng: Json | None = None
        self.error: str | None = None
        self.logprobs: list[Json] = []
        self.latest: list[Json] = []
        self._splitter = ThinkSplitter() if style == "tags" else None
        self._opener: str | None = None
        self._thinking = False
        self._signed = self._reasoned = False
        self._calls: dict[int | None, _Begun] = {}
        self._begun = 0
        self._tokens: Json = {}
        self._prompt: list[int] | None = None
        self._sampled: list[int] | None = None

    def read(self, chunk: Json) -> Iterator[Piece]:
        """The pieces of one chunk."""
        if "error" in chunk:
            self.error = _message(chunk["error"])
            return
        self.head = self.head or chunk
        self.usage = chunk.get("usage") or self.usage
        self.ng = chunk.get("ng", self.ng)
        if chunk.get("prompt_token_ids") is not None:
            self._prompt = chunk["prompt_token_ids"]
        for choice in chunk.get("choices") or ():
            self._beside(choice)
            yield from self._delta(choice.get("delta") or {})

    def end(self) -> Iterator[Piece]:
        """What was held back, and the end of what is open; then look whether `trouble` says something."""
        yield from self._end_text()

    @property
    def trouble(self) -> str | None:
        """Why there is no whole answer; None where there is one."""
        if self.error:
            return self.error
        if self.finish in GAVE_UP:
            return f"the model's back end gave up ({self.finish})"
        return ENDED_EARLY if self.finish is None else None

    def tokens(self) -> Json:
        """TOKEN_FIELDS, all or none; also where they came as vLLM writes them (`return_token_ids`, `logprobs`).

        Raises:
            UpstreamError: ids and logprobs are not equally many.
        """
        if self._tokens or self._prompt is None or self._sampled is None:
            return self._tokens
        logprobs = [entry["logprob"] for entry in self.logprobs]
        if len(logprobs) != len(self._sampled):
            raise UpstreamError(
                f"the model's back end gave {len(self._sampled)} token ids but {len(logprobs)} logprobs",
                failure="model_error",
            )
        return dict(zip(TOKEN_FIELDS, (self._prompt, self._sampled, logprobs), strict=True))

    def _beside(self, choice: Json) -> None:
        self.finish = choice.get("finish_reason") or self.finish
        self.stop = choice.get("stop_reason", self.stop)
        if choice.get("token_ids") is not None:
            self._sampled = [] if self._sampled is None else self._sampled
            self._sampled += choice["token_ids"]
        self.latest = (choice.get("logprobs") or {}).get("content") or []
        self.logprobs += self.latest
        if TOKEN_FIELDS[0] in choice:
            self._tokens = {name: choice[name] for name in TOKEN_FIELDS}

    def _delta(self, delta: Json) -> Iterator[Piece]:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield from self._reasoning(reasoning)
        for block in delta.get("thinking_blocks") or ():
            yield from self._block(block)
        if delta.get("content"):
            told = self._splitter.take(delta["content"]) if self._splitter else (Told("text", delta["content"]),)
            yield from self._told(told)
        if delta.get("refusal"):
            yield from self._end_text()
            yield Piece("refusal", delta["refusal"])
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _reasoning(self, text: str) -> Iterator[Piece]:
        if not self._thinking:
            self._thinking = True
            yield Piece("think")
            text = text.removeprefix(BETWEEN) if self._signed and self._reasoned else text
        if text:
            self._reasoned = True
            yield Piece("reasoning", text)

    def _block(self, block: Json) -> Iterator[Piece]:
        """A signed block is told whole when it is over; its text came before it, in reasoning_content."""
        if block["type"] == "redacted_thinking":
            yield from self._end_thought({})
            yield Piece("redacted", more=block)
        else:
            if not self._thinking:
                self._thinking = True
                yield Piece("think")
                if block["thinking"]:
                    self._reasoned = True
                    yield Piece("reasoning", block["thinking"])
            yield from self._end_thought({"signature": block["signature"]} if block.get("signature") else {})
        self._signed = True

    def _told(self, pieces: Any) -> Iterator[Piece]:
        for kind, text in pieces:
            match kind:
                case "think":
                    yield from self._end_thought({})
                    self._thinking, self._opener = True, text
                    yield Piece("think")
                case "thought":
                    tags = [self._opener, text]
                    yield from self._end_thought({} if tags == ["<think>", "</think>"] else {"tags": tags})
                case "reasoning":
                    yield Piece("reasoning", text)
                case _:
                    yield from self._end_thought({})
                    yield Piece("text", text)

    def _end_thought(self, more: Json) -> Iterator[Piece]:
        if self._thinking:
            self._thinking = False
            yield Piece("thought", more=more)

    def _call(self, call: Json) -> Iterator[Piece]:
        """A call begins with its name; what came before that waits for it. Some back ends repeat id and name.

        Others leave the index out, or give all calls the same: there another id begins another call.
        """
        yield from self._end_text()
        index, call_id, function = call.get("index"), call.get("id") or "", call.get("function") or {}
        begun = self._calls.get(index)
        if begun is None or (call_id and begun.call_id and call_id != begun.call_id):
            begun = self._calls[index] = _Begun(self._begun)
            self._begun += 1
        begun.call_id = begun.call_id or call_id
        begun.waiting += function.get("arguments") or ""
        if not begun.named and function.get("name"):
            begun.named = True
            yield Piece("call", function["name"], begun.place, {"id": begun.call_id})
        if begun.named and begun.waiting:
            yield Piece("arguments", begun.waiting, begun.place)
            begun.waiting = ""

    def _end_text(self) -> Iterator[Piece]:
        if self._splitter:
            yield from self._told(self._splitter.end())
        yield from self._end_thought({})


@dataclass(slots=True)
class _Begun:
    """A tool call of which something has come."""

    place: int
    call_id: str = ""
    waiting: str = ""
    named: bool = False


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
