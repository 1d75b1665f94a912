"""Conversations over an engine that samples tokens: Chat request to prompt ids, sampled ids to Chat chunks or a completion.

Shared by `models/transformers` and `models/sglang`: the chat template, continuation of the ids that were seen,
incremental detokenization, parsing of reasoning and tool calls, stop strings, token data. An engine only returns ids.
(vLLM does all of this itself.) The tokenizer is passed in: nothing heavy is imported here.

Reasoning is between `<think>` and `</think>` at the very start, without the opening tag if the template has written it.
A tool call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen and many others); a call that is
not such JSON, is nested too deeply, or has no end, is text. White space around calls is dropped.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import orjson

from ngym.convert import content_text, without_allowed_tools
from ngym.errors import BadRequest
from ngym.net.json_limits import is_deep
from ngym.rollout import PriorTokens, TurnEnds, begins_with, splice
from ngym.schema import ROUTED_EXPERTS, TOKEN_FIELDS, Json

if TYPE_CHECKING:
    from ngym.routed_experts import ExpertRows
    from ngym.services.models.token_capture import PriorCall

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
PROMPTS_KEPT, KEPT_BYTES = 64, 1 << 18  # the ids of so many conversations, each of at most so much JSON
LONG = 20_000  # characters: some milliseconds

TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>")
REQUESTS = ("[/INST]", "[/TOOL_RESULTS]", "[/AVAILABLE_TOOLS]")  # Mistral's: the answer follows without a header
THOUGHT_TAIL = 16  # ids at a prompt's end in which a template may open a reasoning block


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[Json], **options: Any) -> Any: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def get_vocab(self) -> Mapping[str, int]: ...


def turn_ends(tokenizer: Tokenizer, of_model: int | list[int] | None) -> TurnEnds:
    """The ids that end a turn: the end-of-sequence ids of the generation config, and the markers of chat templates."""
    own = of_model if isinstance(of_model, list) else [of_model]
    vocabulary = tokenizer.get_vocab()
    known = {vocabulary[token] for token in (*TURNS, *REQUESTS) if token in vocabulary}
    requests = frozenset(vocabulary[token] for token in REQUESTS if token in vocabulary)
    return TurnEnds(frozenset(known | {end for end in (*own, tokenizer.eos_token_id) if end is not None}), requests)


class Template:
    """Renders conversations to the ids of one model.

    Args:
        ends: the ids that end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, ends: TurnEnds) -> None:
        self.tokenizer = tokenizer
        self.ends = ends
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self.hidden_ids = frozenset(
            id_ for id_, token in added.items() if token.special and token.content not in (THINK, THOUGHT, CALL, CALLED)
        )
        """Ids that are left out of texts: special tokens, as in vLLM, but not those that the parser reads."""
        self._cached_ids = lru_cache(PROMPTS_KEPT)(
            lambda conversation, minute: tuple(self._ids(*orjson.loads(conversation)))
        )
        self._cached_opens_thought = lru_cache(PROMPTS_KEPT)(self._opens_thought)

    def prompt(self, request: Json, seen: PriorCall | None) -> list[int]:
        """The ids of a checked Chat request, including the generation prompt.

        Raises:
            BadRequest: it has parts other than text or another template, forces a tool call, or the template refuses it.
        """
        request = without_allowed_tools(request)
        if request.get("tool_choice", "auto") not in ("auto", "none"):
            raise BadRequest("field 'tool_choice': this back end cannot force a call; use auto or none")
        messages = [_template_message(message, index) for index, message in enumerate(request["messages"])]
        rendered = self._render(messages, request)
        if seen is None or seen.turn_goes_on:
            return rendered
        ids = PriorTokens(list(seen.prompt_token_ids), list(seen.generation_token_ids))
        if begins_with(rendered, ids):
            return rendered
        history = self._render(messages[: seen.place + 1], request)
        return splice(rendered, history, ids, self.ends) or rendered

    def whole(self, request: Json) -> list[int]:
        """The ids of the conversation of a checked Chat request, without a generation prompt.

        Raises:
            BadRequest: as `prompt`.
        """
        messages = [_template_message(message, index) for index, message in enumerate(request["messages"])]
        return self._render(messages, request, prompt=False)

    def in_thought(self, prompt: list[int]) -> bool:
        """Whether the template has opened a reasoning block at the prompt's end."""
        return self._cached_opens_thought(tuple(prompt[-THOUGHT_TAIL:]))

    def _opens_thought(self, tail: tuple[int, ...]) -> bool:
        return self.tokenizer.decode(list(tail), skip_special_tokens=False).rstrip().endswith("<think>")

    def _render(self, messages: list[Json], request: Json, *, prompt: bool = True) -> list[int]:
        effort = request.get("reasoning_effort")
        kwargs = {} if effort is None else {"reasoning_effort": effort}
        kwargs |= {"enable_thinking": False} if effort == "none" else {}
        kwargs |= request.get("chat_template_kwargs") or {}
        if "chat_template" in kwargs:
            raise BadRequest("field 'chat_template_kwargs': chat_template is not supported, only the model's own")
        kwargs = {"tools": request.get("tools") or None, "add_generation_prompt": prompt} | kwargs
        try:
            conversation = orjson.dumps([messages, kwargs])
        except TypeError:  # such as an integer of more than 64 bits
            return self._ids(messages, kwargs)
        if len(conversation) > KEPT_BYTES:
            return self._ids(messages, kwargs)
        # A group of rollouts has the same prompt. A template may write the time.
        return list(self._cached_ids(conversation, int(time.time()) // 60))

    def _ids(self, messages: list[Json], kwargs: Json) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except Exception as error:  # jinja raises errors of any type
            raise BadRequest(f"the model's chat template refuses the conversation: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False)


def _template_message(message: Json, index: int) -> Json:
    """A message as chat templates expect it: text, arguments as objects, reasoning under both of its names."""
    content = message.get("content")
    if not isinstance(content, str | None) and any("text" not in part for part in content):
        raise BadRequest(f"messages[{index}].content: this back end reads text only")
    role = "system" if message["role"] == "developer" else message["role"]
    result: Json = {"role": role, "content": content_text(content)}
    if message.get("reasoning_content"):
        result |= dict.fromkeys(("reasoning_content", "reasoning"), message["reasoning_content"])
    if message.get("tool_calls"):
        result["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return result | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}


def _call(call: Json) -> Json:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


class Detokenizer:
    """Incremental text of one answer. Decodes only the last ids, with those before them, which decide about spaces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # of the ids that are decoded again
        self._returned = 0  # the text up to here was returned

    def take(self, ids: Iterable[int]) -> str:
        """The text of these further ids."""
        self._ids.extend(ids)
        return self._new_text(final=False)

    def end(self) -> str:
        """The rest, which was held back as an incomplete character."""
        return self._new_text(final=True)

    def _new_text(self, *, final: bool) -> str:
        if self._returned == len(self._ids):
            return ""
        before = self._decode(self._ids[self._start : self._returned])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and not final):
            return ""
        self._start, self._returned = self._returned, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class Stops:
    """Finds stop strings in streamed text; holds back text that may begin one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._buffer = ""
        self.match: str | None = None

    def take(self, text: str) -> str:
        """The text that is certain; "" once `match` is set."""
        if self.match is not None:
            return ""
        text = self._buffer + text
        if matches := [(text.find(stop), stop) for stop in self._stops if stop in text]:
            place, self.match = min(matches)
            self._buffer = ""
            return text[:place]
        keep = held_back(text, self._stops)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        text, self._buffer = self._buffer, ""
        return text


def held_back(text: str, markers: Iterable[str]) -> int:
    """The length of the longest suffix of the text that begins one of the markers."""
    return max(
        (length for marker in markers for length in range(1, len(marker)) if text.endswith(marker[:length])), default=0
    )


THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"


class AnswerPiece(NamedTuple):
    """More reasoning or text, or a complete call with its arguments in `text`."""

    kind: Literal["reasoning", "text", "call"]
    text: str
    name: str = ""


class AnswerParser:
    """Parses one answer into pieces.

    Args:
        in_thought: the template has opened a reasoning block.
        tools: whether to parse tool calls.
    """

    def __init__(self, *, in_thought: bool, tools: bool) -> None:
        self._state: Literal["start", "thought", "text", "call"] = "thought" if in_thought else "start"
        self._tools = tools
        self._buffer = ""
        self._has_text = False
        self._has_calls = False

    def take(self, text: str) -> Iterator[AnswerPiece]:
        """The pieces that are certain with this further text."""
        self._buffer += text
        while self._buffer:
            state, buffer = self._state, self._buffer
            yield from getattr(self, f"_{state}")()
            if (self._state, self._buffer) == (state, buffer):
                return

    def end(self) -> Iterator[AnswerPiece]:
        """The text that was held back; a call without its end is text."""
        text, self._buffer = self._buffer, ""
        if self._state == "call":
            text = CALL + text
        if text.strip() or (text and (self._state == "thought" or (self._has_text and not self._has_calls))):
            yield AnswerPiece("reasoning" if self._state == "thought" else "text", text)

    def _start(self) -> Iterator[AnswerPiece]:
        stripped = self._buffer.lstrip()
        if stripped.startswith(THINK):
            self._buffer, self._state = stripped[len(THINK) :], "thought"
        elif not THINK.startswith(stripped):
            self._state = "text"
        yield from ()

    def _thought(self) -> Iterator[AnswerPiece]:
        text, closer, rest = self._buffer.partition(THOUGHT)
        if closer:
            self._buffer, self._state = rest, "text"
        else:
            keep = held_back(self._buffer, (THOUGHT,))
            text, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        if text:
            yield AnswerPiece("reasoning", text)

    def _text(self) -> Iterator[AnswerPiece]:
        before, opener, rest = self._buffer.partition(CALL) if self._tools else (self._buffer, "", "")
        if opener:
            self._buffer, self._state = rest, "call"
            text = before.rstrip()
        else:
            keep = held_back(self._buffer, (CALL,)) if self._tools else 0
            text = self._buffer[: len(self._buffer) - keep]
            if self._tools or not self._has_text:
                text = text.rstrip()  # the next text decides whether the space belongs to the text
            self._buffer = self._buffer[len(text) :]
        if text:
            self._has_text = True
            yield AnswerPiece("text", text)

    def _call(self) -> Iterator[AnswerPiece]:
        written, closer, rest = self._buffer.partition(CALLED)
        if not closer:
            return
        self._buffer, self._state, self._has_calls = rest, "text", True
        yield _read(written)


def _read(written: str) -> AnswerPiece:
    """The contents of the tags as a call, or as text if they are not a call."""
    with suppress(ValueError, RecursionError):
        match json.loads(written):
            case {"name": str(name), "arguments": dict(arguments)} if name and not is_deep(written.encode(), arguments):
                text = json.dumps(arguments, ensure_ascii=False)
                (name + text).encode()  # raises for half of a surrogate pair, which no answer could have
                return AnswerPiece("call", text, name)
    return AnswerPiece("text", CALL + written + CALLED)


class ChatCodec:
    """Translates chat requests to token ids, and sampled ids to answers: `respond` and `stream` of a model server.

    Args:
        model: the model's name, for answers.
        context: the context length in tokens, prompt and answer together.
        can: optional features of the engine (names in NEUTRAL).
    """

    def __init__(
        self, template: Template, generate: Generate, model: str, context: int, can: frozenset[str] = frozenset()
    ) -> None:
        self._template = template
        self._generate = generate
        self._model = model
        self._context = context
        self._capabilities = can
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")  # one: tokenizers are not thread-safe

    async def completion(self, request: Json, seen: PriorCall | None) -> Json:
        """The Chat Completion to a checked request; its message carries the token fields.

        Raises:
            BadRequest: the request needs a feature that this back end lacks.
        """
        answer = _Answer(self._model, self._template.tokenizer)
        async with aclosing(self._pieces(answer, request, seen, streamed=False)) as pieces:
            async for piece in pieces:
                answer.add(piece)
        return answer.completion(bool(request.get("logprobs")))

    async def chunks(self, request: Json, seen: PriorCall | None) -> AsyncGenerator[Json, None]:
        """Chat chunks as the tokens come; the one with the finish_reason carries the token fields, then comes usage."""
        answer = _Answer(self._model, self._template.tokenizer)
        logprobs = bool(request.get("logprobs"))
        role_delta: Json = {"role": "assistant"}  # sent with the first piece: an earlier failure is not a stream
        async with aclosing(self._pieces(answer, request, seen, streamed=True)) as pieces:
            async for piece in pieces:
                yield answer.chunk(role_delta | answer.add(piece), logprobs)
                role_delta = {}
        if role_delta:
            yield answer.chunk(role_delta | {"content": ""}, logprobs)
        for chunk in answer.last_chunks(logprobs):
            yield chunk

    async def count(self, request: Json) -> int:
        """The number of tokens of the prompt."""
        return len(await self._prompt(request, None))

    async def _prompt(self, request: Json, seen: PriorCall | None) -> list[int]:
        """The prompt ids. A long conversation is tokenised in a thread, so that it does not block the event loop."""
        if sum(len(message.get("content") or ()) for message in request["messages"]) < LONG:
            return self._template.prompt(request, seen)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._template.prompt, request, seen)

    async def _pieces(
        self, answer: _Answer, request: Json, prior_call: PriorCall | None, *, streamed: bool
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces of the answer, and add its tokens to `answer`."""
        template = self._template
        prompt = answer.prompt = await self._prompt(request, prior_call)
        sampling = sampling_of(request, self._context - len(prompt), self._capabilities, streamed=streamed)
        if sampling.max_tokens < 1:
            answer.finish = "length"
            return  # the conversation does not fit: an empty answer, not an error
        text, stops = Detokenizer(template.tokenizer), Stops(sampling.stop)
        tools = bool(request.get("tools")) and request.get("tool_choice") != "none"
        parser = AnswerParser(in_thought=template.in_thought(prompt), tools=tools)
        async with aclosing(self._generate(prompt, sampling)) as tokens:
            async for sampled in tokens:
                answer.take(sampled)
                ids = [id_ for id_ in _without_end(sampled, template.ends.any) if id_ not in template.hidden_ids]
                for piece in parser.take(stops.take(text.take(ids))):
                    yield piece
                if stops.match is not None:
                    answer.finish, answer.stop = "stop", stops.match
                    break
        for piece in parser.take(stops.take(text.end()) + stops.end()):
            yield piece
        for piece in parser.end():
            yield piece


def _without_end(sampled: SampledTokens, ends: frozenset[int]) -> list[int]:
    """The sampled ids without the one that ends the turn."""
    is_turn_over = sampled.finish == "stop" and sampled.ids and sampled.ids[-1] in ends
    return sampled.ids[:-1] if is_turn_over else sampled.ids


class _Answer:
    """The text and tokens of an answer so far."""

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.prompt: list[int] = []
        self.finish: Finish | None = None
        self.stop: str | None = None
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[list[int]] = []
        self._experts: ExpertRows | None = None
        self._cached: int | None = None
        self._logprobs_sent = 0  # tokens whose logprobs were sent
        self._texts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        self._calls: list[Json] = []

    def take(self, sampled: SampledTokens) -> None:
        first = len(self._ids)
        self._ids += sampled.ids
        self._logprobs += sampled.logprobs
        self._cached = sampled.cached
        if self._experts is None:
            self._experts = sampled.experts
        elif sampled.experts is not None:
            self._experts.raw += sampled.experts.raw
        self.finish = sampled.finish or self.finish
        if self._versions and self._versions[-1][2] == sampled.version:
            self._versions[-1][1] = len(self._ids)
        elif sampled.ids:
            self._versions.append([first, len(self._ids), sampled.version])

    def add(self, piece: AnswerPiece) -> Json:
        """Add a piece, and return it as a delta."""
        if piece.kind != "call":
            name = "reasoning_content" if piece.kind == "reasoning" else "content"
            self._texts[name].append(piece.text)
            return {name: piece.text}
        function = {"name": piece.name, "arguments": piece.text}
        call = {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        self._calls.append(call)
        return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}

    def completion(self, logprobs: bool) -> Json:
        message: Json = {"role": "assistant", "content": None if self._calls else ""}
        message |= {name: "".join(parts) for name, parts in self._texts.items() if parts}
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "message": message | self._tokens(), **self._finish(), **self._new_logprobs(logprobs)}
        return {"object": "chat.completion", **self._head, "choices": [choice], "usage": self._usage(), **self._ng()}

    def chunk(self, delta: Json, logprobs: bool) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **self._new_logprobs(logprobs)}
        return {"object": "chat.completion.chunk", **self._head, "choices": [choice]}

    def last_chunks(self, logprobs: bool) -> Iterator[Json]:
        last = self.chunk({}, logprobs)
        last["choices"][0] |= self._tokens() | self._finish()
        yield last | self._ng()
        yield {**last, "choices": [], "usage": self._usage()}

    def _finish(self) -> Json:
        if self.finish == "stop" and self._calls:
            return {"finish_reason": "tool_calls"}
        return {"finish_reason": self.finish or "stop"} | ({"stop_reason": self.stop} if self.stop else {})

    def _tokens(self) -> Json:
        tokens = (self.prompt, self._ids, self._logprobs)
        return dict(zip(TOKEN_FIELDS, tokens, strict=True)) if self._ids else {}

    def _ng(self) -> Json:
        experts = {} if self._experts is None else {ROUTED_EXPERTS: self._experts.record()}
        return {"ng": {"policy_version": self._versions} | experts} if self._ids else {}

    def _new_logprobs(self, include: bool) -> Json:
        """The logprobs of the tokens since the last call, if the client requested them."""
        if not include:
            return {"logprobs": None}
        entries: list[Json] = []
        first, self._logprobs_sent = self._logprobs_sent, len(self._ids)
        for token, logprob in zip(self._ids[first:], self._logprobs[first:], strict=True):
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"logprobs": {"content": entries, "refusal": None}}

    def _usage(self) -> Json:
        prompt, completion = len(self.prompt), len(self._ids)
        usage: Json = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return usage if self._cached is None else usage | {"prompt_tokens_details": {"cached_tokens": self._cached}}


GREEDY_BELOW = 1e-5  # as in vLLM; logits divided by a smaller temperature overflow
Finish = Literal["stop", "length"]

HOSTED = frozenset(  # fields for a hosted API, which an engine ignores
    {"metadata", "model", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier"}
    | {"service_tier", "store", "stream_options", "user", "verbosity", "thinking", "reasoning_effort", "modalities"}
)
OURS = frozenset(
    {"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "max_tokens"}
    | {"max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"}
    | {"ignore_eos", "logprobs"}
)
NEUTRAL: Json = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "top_logprobs": 0,
}
"""Fields that not every engine supports, and their neutral values."""


class Sampling(NamedTuple):
    """temperature 0 is greedy; top_k 0 and top_p 1 allow all tokens; seed None is random. more: optional features,
    under the names of the request. streamed: whether the client reads tokens as they come."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    more: Json
    streamed: bool


class SampledTokens(NamedTuple):
    """The next tokens and logprobs, [n] each; the last ones with a finish reason; the version of the weights; how many
    tokens of the prompt were not computed again, if that is known; the experts of all tokens computed since the last ones.
    """

    ids: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    version: int = 0
    cached: int | None = None
    experts: ExpertRows | None = None


Generate = Callable[[list[int], Sampling], AsyncGenerator[SampledTokens, None]]
"""(prompt ids, sampling) -> a stream of tokens. Closing it ends the sampling."""


def sampling_of(request: Json, room: int, can: frozenset[str], *, streamed: bool) -> Sampling:
    """The sampling parameters of a checked Chat request.

    Args:
        room: tokens that fit the context after the prompt.
        can: names in NEUTRAL that this engine supports.

    Raises:
        BadRequest: the engine does not support a field; the message names it.
    """
    more: dict[str, Any] = {}
    for name, value in request.items():
        if name in HOSTED or name in OURS or value == NEUTRAL.get(name):
            continue
        if name not in can:
            raise BadRequest(f"field {name!r}: this back end does not support it; leave it out")
        more[name] = value
    stop, temperature = request.get("stop") or (), request.get("temperature", 1.0)
    limit = request.get("max_completion_tokens") or request.get("max_tokens") or room
    return Sampling(
        max_tokens=min(limit, room),
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=request.get("top_p", 1.0),
        top_k=max(request.get("top_k", 0), 0),
        min_p=request.get("min_p", 0.0),
        seed=request.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.get("stop_token_ids") or ()),
        ignore_eos=request.get("ignore_eos", False),
        more=more,
        streamed=streamed,
    )
