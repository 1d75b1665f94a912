"""Reasoning in answers: `<think>` tags, signed reasoning, and streamed reasoning.

A model that signs its reasoning (Anthropic's) refuses it without the signature, so signatures are kept and sent back. A
Chat message has these blocks in `thinking_blocks`, and their text in `reasoning_content` for other clients.

Only reasoning at the very start counts; a later `<think>` is text (code, a quotation). The first closing tag ends the
block, as in every chat template: the rest of a nested block is text. A closing tag without an opening one ends
reasoning that the template opened (DeepSeek-R1, Qwen3-Thinking put `<think>` into the prompt). An opening tag without a
closing one
was cut off: everything after it is reasoning.

ChunkReader also keeps the other fields of a stream: finish reason, usage, token data, logprobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ngym.errors import UpstreamError
from ngym.schema import TOKEN_FIELDS, Json

BETWEEN = "\n\n"
"""Separates pieces of reasoning where an API has one text for all of them."""
OPEN = "<think>"
CLOSE = "</think>"
ReasoningStyle = Literal["field", "tags"]
"""Where a Chat back end puts reasoning: in `reasoning_content` ("field"), or in the content between tags ("tags")."""
_BLOCK = re.compile(r"(\s*<think>)(.*?)(</think>|\Z)", re.DOTALL)
_UNOPENED = re.compile(r"()((?:(?!<think>).)*?)(</think>)", re.DOTALL)
_WORD = re.compile(r"\S")
_TAG = re.compile(r"</?think>")
GAVE_UP = frozenset({"abort", "error"})
"""vLLM's finish reasons when it was paused or lost its engine."""
ENDED_EARLY = "the model's back end ended its stream before the answer was finished"


def thinking(text: str, signature: str | None = None) -> Json:
    """A thinking block; the reasoning of most models is not signed."""
    return {"type": "thinking", "thinking": text, "signature": signature or ""}


def is_signed(block: Json) -> bool:
    """Whether the model requires this block to be sent back."""
    return block["type"] == "redacted_thinking" or bool(block.get("signature"))


def own_block(block: Json) -> Json:
    """A block with only the fields of Anthropic's API."""
    names = ("type", "data") if block["type"] == "redacted_thinking" else ("type", "thinking", "signature")
    return {name: block.get(name) or "" for name in names}


def thinking_text(blocks: Iterable[Json]) -> str:
    """The text of thinking blocks, for clients without signatures."""
    return BETWEEN.join(block["thinking"] for block in blocks if block.get("thinking"))


def reasoning_from_block(block: Json, item_id: str) -> Json:
    """Convert a thinking block to a reasoning item; the signature or the redacted data is its `encrypted_content`."""
    item: Json = {"type": "reasoning", "id": item_id, "summary": [], "content": []}
    if block["type"] == "redacted_thinking":
        return item | {"encrypted_content": block["data"]}
    item["content"] = [{"type": "reasoning_text", "text": block["thinking"]}]
    if block.get("signature"):
        item["encrypted_content"] = block["signature"]
    return item | ({"ng": block["ng"]} if "ng" in block else {})


def block_from_reasoning(item: Json) -> Json:
    """Convert a reasoning item to its thinking block; an item with only `encrypted_content` is redacted."""
    parts = item.get("content") or item.get("summary") or ()
    if not parts and item.get("encrypted_content"):
        return {"type": "redacted_thinking", "data": item["encrypted_content"]}
    block = thinking("".join(part["text"] for part in parts), item.get("encrypted_content"))
    return block | ({"ng": item["ng"]} if "ng" in item else {})


class Block(NamedTuple):
    """One block of reasoning; `opener + text + closer` are its bytes. A missing tag is ""."""

    text: str
    opener: str = OPEN
    closer: str = CLOSE


class Split(NamedTuple):
    """Reasoning blocks, and the text after them."""

    blocks: list[Block]
    text: str


class SplitText(NamedTuple):
    """One output of ThinkSplitter."""

    kind: Literal["think", "reasoning", "thought", "text"]
    text: str


def split_think(content: str) -> Split:
    """Split content with think tags into its leading reasoning and the rest; `join_think` is the exact inverse."""
    blocks: list[Block] = []
    at = 0
    match = _BLOCK.match(content) or _UNOPENED.match(content)
    while match:
        blocks.append(Block(match[2], match[1], match[3]))
        at = match.end()
        match = _BLOCK.match(content, at)
    return Split(blocks, content[at:])


def join_think(blocks: Iterable[Block], text: str) -> str:
    """Join reasoning blocks and text to content with think tags, byte for byte as before the split."""
    return "".join(block.opener + block.text + block.closer for block in blocks) + text


class ThinkSplitter:
    """`split_think` for streamed content: takes text, yields ("think", opener), ("reasoning", text), ("thought",
    closer) and ("text", text).

    Reasoning that the template opened is only recognized by its closing tag: if content does not begin with a tag, it
    is held back until a tag or the end decides what it is.
    """

    def __init__(self) -> None:
        self._state: Literal["start", "unopened", "block", "after", "text"] = "start"
        self._buffer = ""
        self._searched = 0

    def take(self, text: str) -> Iterator[SplitText]:
        """The outputs that are certain with this further piece."""
        self._buffer += text
        while self._buffer:
            state, buffer = self._state, self._buffer
            if state == "text":
                yield SplitText("text", self._release(len(buffer)))
            elif state == "block":
                yield from self._in_block()
            elif state == "unopened":
                yield from self._unopened()
            else:
                yield from self._before_block()
            if (self._state, self._buffer) == (state, buffer):
                return

    def end(self) -> Iterator[SplitText]:
        """The text that was held back; everything after it is text."""
        if self._buffer:
            yield SplitText("reasoning" if self._state == "block" else "text", self._release(len(self._buffer)))
        if self._state == "block":
            yield SplitText("thought", "")
        self._state = "text"

    def _release(self, length: int) -> str:
        text, self._buffer, self._searched = self._buffer[:length], self._buffer[length:], 0
        return text

    def _in_block(self) -> Iterator[SplitText]:
        end = self._buffer.find(CLOSE)
        known = end if end >= 0 else len(self._buffer) - _marker_prefix_length(self._buffer, CLOSE)
        if known:
            yield SplitText("reasoning", self._release(known))
        if end >= 0:
            yield SplitText("thought", self._release(len(CLOSE)))
            self._state = "after"

    def _before_block(self) -> Iterator[SplitText]:
        word = _WORD.search(self._buffer, self._searched)
        start = word.start() if word else len(self._buffer)
        if self._buffer.startswith(OPEN, start):
            yield SplitText("think", self._release(start + len(OPEN)))
            self._state = "block"
        elif OPEN.startswith(self._buffer[start : start + len(OPEN)]):
            self._searched = start
        else:
            self._state = "text" if self._state == "after" else "unopened"

    def _unopened(self) -> Iterator[SplitText]:
        tag = _TAG.search(self._buffer, self._searched)
        self._searched = max(0, len(self._buffer) - len(CLOSE))
        if tag is None:
            return
        self._state = "text"
        if tag[0] == CLOSE:
            yield SplitText("think", "")
            if tag.start():
                yield SplitText("reasoning", self._release(tag.start()))
            yield SplitText("thought", self._release(len(CLOSE)))
            self._state = "after"


def _marker_prefix_length(text: str, tag: str) -> int:
    """The number of last characters of the text that may begin the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


class ReasoningPiece(NamedTuple):
    """One output of ChunkReader.

    think: a block of reasoning begins; more: nothing.
    reasoning, text, refusal, arguments: more of it (`call`: which call's arguments).
    thought: the block ends; more: `tags` if they are not the usual ones, or `signature`.
    redacted: a block of reasoning with encrypted text; more: the block.
    call: a tool call begins; text: the tool's name, call: its number, more: its `id`.
    """

    kind: Literal["think", "reasoning", "thought", "redacted", "text", "refusal", "call", "arguments"]
    text: str = ""
    call: int = 0
    more: Json = {}  # noqa: RUF012  # never written to


class ChunkReader:
    """Converts chunks to pieces; the attributes hold the other fields of the stream.

    Attributes:
        head: id, created and model of the first chunk.
        finish: the finish_reason, None until it comes; stop: vLLM's stop_reason.
        usage, ng: of the chunks, None until they come.
        error: the back end's error message.
        logprobs: of all sampled tokens so far, if the back end reports them; latest: those of the current chunk.
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
        self._calls: dict[int | None, _OpenToolCall] = {}
        self._call_count = 0
        self._tokens: Json = {}
        self._prompt: list[int] | None = None
        self._sampled: list[int] | None = None

    def read(self, chunk: Json) -> Iterator[ReasoningPiece]:
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

    def end(self) -> Iterator[ReasoningPiece]:
        """The pieces that were held back, and the end of an open block; check `trouble` afterwards."""
        yield from self._end_text()

    @property
    def trouble(self) -> str | None:
        """The reason why the answer is incomplete; None if it is complete."""
        if self.error:
            return self.error
        if self.finish in GAVE_UP:
            return f"the model's back end gave up ({self.finish})"
        return ENDED_EARLY if self.finish is None else None

    def tokens(self) -> Json:
        """TOKEN_FIELDS, all or none; also built from vLLM's fields (`return_token_ids`, `logprobs`).

        Raises:
            UpstreamError: the numbers of ids and logprobs differ.
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

    def _delta(self, delta: Json) -> Iterator[ReasoningPiece]:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield from self._reasoning(reasoning)
        for block in delta.get("thinking_blocks") or ():
            yield from self._block(block)
        if delta.get("content"):
            pieces = self._splitter.take(delta["content"]) if self._splitter else (SplitText("text", delta["content"]),)
            yield from self._parse(pieces)
        if delta.get("refusal"):
            yield from self._end_text()
            yield ReasoningPiece("refusal", delta["refusal"])
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _reasoning(self, text: str) -> Iterator[ReasoningPiece]:
        if not self._thinking:
            self._thinking = True
            yield ReasoningPiece("think")
            text = text.removeprefix(BETWEEN) if self._signed and self._reasoned else text
        if text:
            self._reasoned = True
            yield ReasoningPiece("reasoning", text)

    def _block(self, block: Json) -> Iterator[ReasoningPiece]:
        """The pieces of a signed block, which comes complete at its end; its text came before, in reasoning_content."""
        if block["type"] == "redacted_thinking":
            yield from self._end_thought({})
            yield ReasoningPiece("redacted", more=block)
        else:
            if not self._thinking:
                self._thinking = True
                yield ReasoningPiece("think")
                if block["thinking"]:
                    self._reasoned = True
                    yield ReasoningPiece("reasoning", block["thinking"])
            yield from self._end_thought({"signature": block["signature"]} if block.get("signature") else {})
        self._signed = True

    def _parse(self, pieces: Any) -> Iterator[ReasoningPiece]:
        for kind, text in pieces:
            match kind:
                case "think":
                    yield from self._end_thought({})
                    self._thinking, self._opener = True, text
                    yield ReasoningPiece("think")
                case "thought":
                    tags = [self._opener, text]
                    yield from self._end_thought({} if tags == ["<think>", "</think>"] else {"tags": tags})
                case "reasoning":
                    yield ReasoningPiece("reasoning", text)
                case _:
                    yield from self._end_thought({})
                    yield ReasoningPiece("text", text)

    def _end_thought(self, more: Json) -> Iterator[ReasoningPiece]:
        if self._thinking:
            self._thinking = False
            yield ReasoningPiece("thought", more=more)

    def _call(self, call: Json) -> Iterator[ReasoningPiece]:
        """The pieces of a call. It begins with its name; earlier arguments wait. Some back ends repeat id and name.

        Others omit the index, or give all calls the same: then a new id begins a new call.
        """
        yield from self._end_text()
        index, call_id, function = call.get("index"), call.get("id") or "", call.get("function") or {}
        open_call = self._calls.get(index)
        if open_call is None or (call_id and open_call.call_id and call_id != open_call.call_id):
            open_call = self._calls[index] = _OpenToolCall(self._call_count)
            self._call_count += 1
        open_call.call_id = open_call.call_id or call_id
        open_call.waiting += function.get("arguments") or ""
        if not open_call.named and function.get("name"):
            open_call.named = True
            yield ReasoningPiece("call", function["name"], open_call.place, {"id": open_call.call_id})
        if open_call.named and open_call.waiting:
            yield ReasoningPiece("arguments", open_call.waiting, open_call.place)
            open_call.waiting = ""

    def _end_text(self) -> Iterator[ReasoningPiece]:
        if self._splitter:
            yield from self._parse(self._splitter.end())
        yield from self._end_thought({})


@dataclass(slots=True)
class _OpenToolCall:
    """A tool call that has begun."""

    place: int
    call_id: str = ""
    waiting: str = ""
    named: bool = False


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
