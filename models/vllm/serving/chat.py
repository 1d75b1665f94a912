"""Chat Completions on vLLM's engine, whole and as chunks.

vLLM's handler renders the template, has the engine generate, and parses reasoning and tool calls. It is called
directly, without a route.

Differences from vLLM's own server:

- A conversation continues from the ids of its earlier calls, with images or without.
- A stream consists of dicts; vLLM's generator would write each chunk as text. One choice; no echo, no beams.
- An answer with several choices (`n`) has no token data of ours; ask for `return_token_ids` and `logprobs`.
- `routed_experts` are in `ng`, of all tokens; `routed_experts_prompt_start` has no effect on them.
- The finish_reason is the engine's; vLLM answers `tool_calls` if a cut-off text parses as a call.
- A prompt that leaves no room in the context raises ContextFull with its number of tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import ValidationError
from vllm.entrypoints.generate.base.protocol import DeltaMessage, RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.inputs import EngineInput
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import ConversationMessage
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from ngym.did_you_mean import did_you_mean
from ngym.errors import BadRequest, NotReady, Overloaded, ServiceError
from ngym.rollout import PriorTokens, TurnEnds, begins_with, image_digest, shortest_float32, splice
from ngym.routed_experts import ExpertRows
from ngym.schema import ROUTED_EXPERTS, TOKEN_FIELDS, Json

if TYPE_CHECKING:
    from ngym.services.models.server import ModelCall
    from ngym.services.models.token_capture import PriorCall

TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>")
REQUESTS = ("[/INST]", "[/TOOL_RESULTS]", "[/AVAILABLE_TOOLS]")  # Mistral's: the answer follows without a header
recorded: ContextVar[Tokens | None] = ContextVar("ngym_vllm_tokens", default=None)
"""Where the tokens of the current request are recorded; None: nowhere."""
continued: ContextVar[PriorCall | None] = ContextVar("ngym_vllm_prior_call", default=None)
"""The earlier call from whose ids the current request continues."""
PROMPT_TOO_LONG = ("input_tokens", "input_text")  # the parameter that vLLM's renderer names for such a prompt
HOSTED = (  # fields for a hosted API, without meaning for an engine
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "thinking",  # reasoning_effort also says whether
    "user",
    "verbosity",
)
REQUEST_FIELDS = frozenset(ChatCompletionRequest.model_fields)
CUT_OFF = "a weight push with mode abort cut this answer off; retry to get an answer from the new weights"
CONTRADICTION = (
    "the engine stopped: the grammar of this request (its schema, choice or tools) and its other fields, such as "
    "allowed_token_ids, logit_bias, bad_words and min_tokens, allow no token"
)
TEXTS = ("text", "input_text", "output_text", "refusal", "thinking")  # types of the text parts of a message
BEAMS_ARE_WHOLE = (
    "field 'beam_width': beam search cannot stream, because beams are compared at their end; leave out stream"
)
Chunks = AsyncGenerator[Json]


def turn_ends(engine: AsyncLLM) -> TurnEnds:
    """The token ids that end a turn of this model."""
    tokenizer = engine.get_tokenizer()
    generation = engine.model_config.try_get_generation_config()
    ends = generation.get("eos_token_id") or []
    of_model = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    special = {token: id for token, id in tokenizer.get_vocab().items() if token in (*TURNS, *REQUESTS)}
    requests = frozenset(id for token, id in special.items() if token in REQUESTS)
    return TurnEnds(frozenset(of_model | set(special.values())), requests)


@dataclass
class Tokens:
    """Tokens of a call: prompt [P], sampled [G], logprobs [G]; versions: spans [start, end, policy version] over [G].

    images: digests of those in the prompt, in order. aborted: a weight push ended the generation (its mode `abort`).
    experts: of the first tokens of prompt and answer, if vLLM returns them.
    """

    prompt: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    aborted: bool = False
    experts: ExpertRows | None = None

    def add(self, output: RequestOutput) -> None:
        """Add one output: all tokens of the call or, in a stream, the next few."""
        completion = output.outputs[0]
        self.prompt = output.prompt_token_ids or self.prompt
        self.sampled.extend(completion.token_ids)
        logprobs = completion.logprobs
        if isinstance(logprobs, FlatLogprobs):
            self.logprobs.extend(logprobs.logprobs)  # one per position, that of the sampled token
        elif logprobs is not None:
            self.logprobs.extend(one[token].logprob for one, token in zip(logprobs, completion.token_ids, strict=True))
        self.aborted = completion.finish_reason == "abort"
        self.versions = [[span.start, span.end, int(span.version)] for span in completion.weight_versions or []]
        if completion.routed_experts is not None:
            self.experts = _expert_rows(completion.routed_experts)

    @property
    def fields(self) -> Json:
        """The token fields of a message; {} if nothing was recorded."""
        if not self.prompt:
            return {}
        return dict(zip(TOKEN_FIELDS, (self.prompt, self.sampled, shortest_float32(self.logprobs)), strict=True))

    @property
    def trace(self) -> Json:
        """The fields of the whole answer."""
        if not self.prompt:
            return {}
        trace: Json = {"policy_version": self.versions}
        if self.images:
            trace["images"] = self.images
        if self.experts is not None:
            trace[ROUTED_EXPERTS] = self.experts.record()
        return {"ng": trace}


def _expert_rows(routed_RLK: np.ndarray[Any, Any]) -> ExpertRows:
    """vLLM's array of experts as our record."""
    _, layers, chosen = routed_RLK.shape
    little_endian = routed_RLK.astype(routed_RLK.dtype.newbyteorder("<"), copy=False)
    return ExpertRows(layers, chosen, routed_RLK.dtype.name, bytearray(little_endian.tobytes()))


class SampledLogprobs(LogprobsProcessor):
    """vLLM's record of a request's log-probabilities, only for the sampled tokens and without their texts."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        tokens_NK, logprobs_NK, ranks_N, _ = logprobs_lists
        record, logprobs = self.logprobs, logprobs_NK[:, 0].tolist()
        start = len(record.logprobs)
        record.start_indices.extend(range(start, start + len(logprobs)))
        record.end_indices.extend(range(start + 1, start + 1 + len(logprobs)))
        record.token_ids.extend(tokens_NK[:, 0].tolist())
        record.logprobs.extend(logprobs)
        record.ranks.extend(ranks_N.tolist())
        record.decoded_tokens.extend([None] * len(logprobs))
        self.cumulative_logprob += sum(logprobs)


class ContextFull(Exception):
    """A prompt leaves no room in the context. That ends a rollout, but is not an error.

    tokens: of the prompt. vLLM stops counting one token beyond the context, so a longer prompt may have more.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"a prompt of {tokens} tokens leaves no room in the context")
        self.tokens = tokens


class ChatInChunks(OpenAIServingChat):
    """vLLM's chat handler with the differences above. ends: end-of-turn ids of this model."""

    ends: TurnEnds

    async def render_chat_request(
        self, request: ChatCompletionRequest
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """The prompt of a conversation. Raises ContextFull."""
        context: int = self.model_config.max_model_len
        try:
            rendered = await super().render_chat_request(request)
        except VLLMValidationError as error:
            if error.parameter in PROMPT_TOO_LONG:
                raise ContextFull(context + 1) from None
            raise
        if isinstance(rendered, ErrorResponse):
            return rendered
        conversation, prompts = rendered
        if (call := continued.get()) is not None:
            prompts = [await self._continue_from(call, request, prompt) for prompt in prompts]
        longest = max(self._extract_prompt_len(prompt) for prompt in prompts)
        if longest >= context:
            self._forget_media(prompts)
            raise ContextFull(longest)
        return conversation, prompts

    async def _continue_from(self, call: PriorCall, request: ChatCompletionRequest, prompt: EngineInput) -> EngineInput:
        """The prompt with the ids of an earlier call, if the history is unchanged."""
        if call.turn_goes_on or request.truncate_prompt_tokens is not None:
            return prompt
        seen = PriorTokens(call.prompt_token_ids, call.generation_token_ids)
        ids = _ids_of(prompt)
        if ids is None or begins_with(ids, seen):
            return prompt
        # A copy: rendering sets the grammar of the tools on its request.
        until_answer = request.model_copy(update={"messages": request.messages[: call.place + 1]})
        rendered = await self.online_renderer.render_chat(until_answer, skip_mm_cache=True)
        history = None if isinstance(rendered, ErrorResponse) else _ids_of(rendered[1][0])
        spliced = history and splice(ids, history, seen, self.ends)
        return _with_ids(prompt, ids, spliced) if spliced else prompt

    async def count_prompt(self, request: ChatCompletionRequest) -> int:
        """The number of tokens of the prompt. Its media do not enter the cache, because the engine does not get them."""
        rendered = await self.online_renderer.render_chat(request, skip_mm_cache=True)
        if isinstance(rendered, ErrorResponse):
            raise refusal(rendered.error)
        return max(int(self._extract_prompt_len(prompt)) for prompt in rendered[1])

    def _forget_media(self, prompts: list[EngineInput]) -> None:
        """Remove the media of these prompts from the cache. The engine did not get them, and vLLM sends cached ones as
        hashes only, which the engine would answer with an error.
        """
        cache = self.renderer.mm_processor_cache
        for prompt in prompts if cache is not None else ():
            for digests in prompt.get("mm_hashes", {}).values():
                for digest in digests:
                    cache.invalidate(digest)

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: AsyncIterator[RequestOutput], *args: Any, **kwargs: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """vLLM's answer, with `tool_calls` only if the engine stopped by itself."""
        last: RequestOutput | None = None

        async def record_results() -> AsyncGenerator[RequestOutput]:
            nonlocal last
            async for last in result_generator:
                yield last

        answer = await super().chat_completion_full_generator(request, record_results(), *args, **kwargs)
        if isinstance(answer, ChatCompletionResponse) and last is not None:
            for choice, output in zip(answer.choices, last.outputs, strict=True):
                has_calls = choice.finish_reason == "tool_calls"
                choice.finish_reason = _finish_reason(output.finish_reason, has_calls)
        return answer

    async def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        request_id: str,
        model_name: str,
        conversation: list[ConversationMessage],
        tokenizer: TokenizerLike,
        request_metadata: RequestResponseMetadata,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_token_counts: dict[str, int] | None = None,
    ) -> AsyncGenerator[Json]:
        """Chunks; the last has the finish_reason and the usage. Raises the errors of the engine."""
        parser = self._make_parser(request, tokenizer, chat_template_kwargs) if self.parser_cls is not None else None
        head = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model_name}
        sampled: list[int] = []
        has_calls = False
        delta: Json = {"role": "assistant", "content": ""}
        async for result in result_generator:
            output = result.outputs[0]
            self._raise_if_error(output.finish_reason, request_id)
            sampled.extend(output.token_ids)
            parsed = _parse_delta(parser, output, result.prompt_token_ids, request)
            has_calls = has_calls or "tool_calls" in parsed
            choice: Json = {"index": 0, "delta": delta | parsed, "finish_reason": None}
            if request.logprobs:
                choice["logprobs"] = self._create_chat_logprobs(
                    token_ids=output.token_ids,
                    top_logprobs=output.logprobs,
                    tokenizer=tokenizer,
                    num_output_top_logprobs=request.top_logprobs,
                    logprob_token_ids=request.logprob_token_ids,
                    return_as_token_id=request.return_tokens_as_token_ids,
                ).model_dump(mode="json", exclude_none=True)
            chunk: Json = {**head, "choices": [choice]}
            if request.return_token_ids:
                choice["token_ids"] = list(output.token_ids)
                if delta:
                    chunk["prompt_token_ids"] = result.prompt_token_ids
            if output.finish_reason is not None:
                is_named_tool = not isinstance(request.tool_choice, str | None)  # the API then says `stop`
                choice["finish_reason"] = _finish_reason(output.finish_reason, has_calls and not is_named_tool)
                chunk["usage"] = _usage(result, sampled, parser if self._include_reasoning_tokens_details else None)
            elif not (choice["delta"] or request.logprobs or request.return_token_ids):
                continue
            delta = {}
            yield chunk


def _ids_of(prompt: EngineInput) -> list[int] | None:
    """The ids of a prompt with text and media; None for other kinds of prompts."""
    return prompt["prompt_token_ids"] if prompt["type"] in ("token", "multimodal") else None


def _with_ids(prompt: EngineInput, ids: list[int], spliced: list[int]) -> EngineInput:
    """The prompt with the spliced ids in place of `ids`, and its media where they are now. If that is ambiguous, because
    the policy sampled a placeholder: the prompt as it is.
    """
    found: EngineInput = {**prompt, "prompt_token_ids": spliced}
    for name in ("prompt", "prompt_token_offsets"):
        found.pop(name, None)
    if prompt["type"] != "multimodal":
        return found
    moved = {kind: list(places) for kind, places in prompt["mm_placeholders"].items()}
    media = [(place, places, index) for places in moved.values() for index, place in enumerate(places)]
    end = 0
    for place, places, index in sorted(media, key=lambda medium: medium[0].offset):
        tokens = ids[place.offset : place.offset + place.length]
        start = _find(tokens, spliced, end)
        if start is None or spliced.count(tokens[0]) != ids.count(tokens[0]):
            return prompt
        places[index], end = replace(place, offset=start), start + place.length
    found["mm_placeholders"] = moved
    return found


def _find(part: list[int], ids: list[int], begin: int) -> int | None:
    """Where the ids have this part, from `begin` on."""
    with suppress(ValueError):
        while True:
            begin = ids.index(part[0], begin)
            if ids[begin : begin + len(part)] == part:
                return begin
            begin += 1
    return None


def _finish_reason(engine_reason: str | None, has_calls: bool) -> str | None:
    """The finish_reason of an answer. engine_reason: the engine's; its `repetition` cuts an answer off, like a limit."""
    if engine_reason == "stop" and has_calls:
        return "tool_calls"
    return "length" if engine_reason == "repetition" else engine_reason


def _parse_delta(
    parser: Parser | None, output: CompletionOutput, prompt: list[int] | None, request: ChatCompletionRequest
) -> Json:
    """The new content as a delta, {} while the parser has not classified it."""
    if parser is None:
        return {"content": output.text} if output.text else {}
    message: DeltaMessage | None = parser.parse_delta(
        output.text, list(output.token_ids), request, prompt, finished=output.finish_reason is not None
    )
    if message is None:
        return {}
    calls = [
        _with_arguments(call.model_dump(exclude_none=True))
        for call in message.tool_calls
        if call.index == 0 or request.parallel_tool_calls is not False
    ]
    delta = {"reasoning_content": message.reasoning, "content": message.content, "tool_calls": calls}
    return {name: value for name, value in delta.items() if value}


def _with_arguments(call: Json) -> Json:
    """A part of a tool call. Its first part has arguments, as OpenAI's has, to which clients add those of the others."""
    if "id" in call:
        call.setdefault("function", {}).setdefault("arguments", "")
    return call


def _usage(result: RequestOutput, sampled: list[int], thinking: Parser | None) -> Json:
    prompt = len(result.prompt_token_ids or ()) + len(result.encoder_prompt_token_ids or ())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": len(sampled),
        "total_tokens": prompt + len(sampled),
        "prompt_tokens_details": {"cached_tokens": result.num_cached_tokens},
        # without a parser no tokens count as reasoning
        "completion_tokens_details": {"reasoning_tokens": thinking.count_reasoning_tokens(sampled) if thinking else 0},
    }


class ChatHandler:
    """The handler of the model server's routes. ends: end-of-turn ids of this model."""

    def __init__(self, serving: OpenAIServingChat, ends: TurnEnds) -> None:
        serving.__class__ = ChatInChunks  # vLLM creates it, from twenty arguments
        self._serving = cast(ChatInChunks, serving)
        self._serving.ends = ends

    async def respond(self, request: Json, call: ModelCall) -> Json:
        """A Chat Completion whose message has the token fields.

        Raises:
            BadRequest: vLLM refuses the request.
            NotReady: vLLM cannot answer, or a weight push cut the answer off.
        """
        tokens = Tokens(images=_images(request))
        try:
            answer = await self._ask(self._validate(request | {"stream": False}), call.seen, tokens)
        except ContextFull as full:
            return self._empty_answer("chat.completion", "message", full.tokens)
        assert isinstance(answer, ChatCompletionResponse)
        if tokens.aborted or any(choice.finish_reason == "abort" for choice in answer.choices):
            raise NotReady(CUT_OFF)  # vLLM would report the partial answer as completed
        completion: Json = answer.model_dump(mode="json", exclude_none=True)
        if "beam_width" in request:
            del completion["choices"][1:]  # keep only the best beam
        for choice in completion["choices"]:
            message = choice["message"]
            if "reasoning" in message:  # vLLM's name; our converter and most clients use the other
                message["reasoning_content"] = message.pop("reasoning")
            message.setdefault("content", None)  # the API always has this field
        if tokens.experts is not None:
            completion["choices"][0].pop("routed_experts", None)  # vLLM's; `ng` has the same
        completion["choices"][0]["message"] |= tokens.fields
        completion["usage"].setdefault("completion_tokens_details", {"reasoning_tokens": 0})  # as in a stream
        return completion | tokens.trace

    async def stream(self, request: Json, call: ModelCall) -> AsyncGenerator[Json]:
        """Chat Completion chunks; the one with the finish_reason has the token fields. Raises as `respond`."""
        tokens = Tokens(images=_images(request))
        checked = self._validate(request | {"stream": True})
        try:
            answer = await self._ask(checked, call.seen, tokens)
        except ContextFull as full:
            yield self._empty_answer("chat.completion.chunk", "delta", full.tokens)
            return
        assert not isinstance(answer, ChatCompletionResponse)
        try:
            async for chunk in answer:
                [choice] = chunk["choices"]
                if choice["finish_reason"] is not None:
                    if tokens.aborted:
                        raise NotReady(CUT_OFF)
                    choice |= tokens.fields
                    chunk |= tokens.trace
                yield chunk
        except ServiceError:
            raise
        except Exception as error:
            raise _service_error(error, checked) from error

    async def count(self, request: Json, call: ModelCall) -> int:
        """The number of tokens of the prompt; vLLM counts up to one beyond the context."""
        try:
            return await self._serving.count_prompt(self._validate(request | {"stream": False}))
        except Exception as error:
            if isinstance(error, VLLMValidationError) and error.parameter in PROMPT_TOO_LONG:
                return int(self._serving.model_config.max_model_len) + 1
            raise error if isinstance(error, ServiceError) else refusal(create_error_response(error).error) from error

    def _validate(self, request: Json) -> ChatCompletionRequest:
        """The request as vLLM's own record. Raises BadRequest for unknown fields and invalid values."""
        body = {name: value for name, value in request.items() if name not in HOSTED}
        width = body.pop("beam_width", None)
        for name in body.keys() - REQUEST_FIELDS:
            raise BadRequest(f"field {name!r}: vLLM has no such field{did_you_mean(name, REQUEST_FIELDS)}")
        if width and body.get("stream"):
            raise BadRequest(BEAMS_ARE_WHOLE)
        if body.get("n", 1) != 1 and (width or body.get("stream")):
            raise BadRequest("field 'n': one choice only in a stream and in beam search; leave out one of the two")
        if width is not None:
            body |= {"use_beam_search": True, "n": width}
        models = self._serving.models
        if body.get("model") not in models.lora_requests:
            body["model"] = models.model_name()  # any other name means the policy
        try:
            return ChatCompletionRequest.model_validate(body)
        except ValidationError as error:
            wrong = [f"field {'.'.join(map(str, one['loc']))!r}: {one['msg']}" for one in error.errors()]
            raise BadRequest("; ".join(wrong[:3])) from None
        except VLLMValidationError as error:
            raise refusal(create_error_response(error).error) from None

    async def _ask(
        self, request: ChatCompletionRequest, prior_call: PriorCall | None, tokens: Tokens
    ) -> ChatCompletionResponse | Chunks:
        """vLLM's answer, or its stream if the request asks for one. Raises ServiceError or ContextFull."""
        try:
            continued.set(prior_call)
            is_recorded = not request.use_beam_search and (request.n or 1) == 1
            recorded.set(tokens if is_recorded else None)
            if is_recorded:
                request.routed_experts_prompt_start = 0
            answer = await self._serving.create_chat_completion(request)
        except (ContextFull, ServiceError):
            raise
        except Exception as error:
            raise _service_error(error, request) from error
        if not isinstance(answer, ErrorResponse):
            return answer
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # vLLM has turned the cancellation into an error answer
        raise refusal(answer.error)

    def _empty_answer(self, kind: str, field: str, prompt: int) -> Json:
        """An empty answer to a conversation that leaves no room in the context. prompt: its number of tokens."""
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._serving.models.model_name(),
            "choices": [{"index": 0, field: {"role": "assistant", "content": ""}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
        }


def _images(request: Json) -> list[str]:
    """The digests of a conversation's images, in order. Other media have a digest, too, which no image of a row has: the
    trainer refuses such a row.
    """
    messages = request.get("messages")
    contents = (message.get("content") for message in messages or () if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))
    images = (part.get("image_url") or part for part in parts if part.get("type") not in TEXTS and "text" not in part)
    return [image_digest(str(image.get("url", image) if isinstance(image, dict) else image)) for image in images]


def _service_error(error: Exception, request: ChatCompletionRequest) -> ServiceError:
    """The error for an exception; vLLM's own table decides which ones are the caller's fault."""
    if isinstance(error, GenerationError) and request.extract_structured_outputs() is not None:
        return BadRequest(CONTRADICTION, failure="model_error")
    return refusal(create_error_response(error).error)


def refusal(error: ErrorInfo) -> ServiceError:
    """Translates an error answer of vLLM."""
    detail = " ".join(error.message.split())
    if error.code in (429, 503):
        return (Overloaded if error.code == 429 else NotReady)(f"vLLM: {detail}", failure="model_error")
    if error.code >= 500:
        return ServiceError(f"vLLM failed: {detail}", failure="model_error", retryable=True)
    wrong = {"errors": [{"field": error.param, "message": detail}]} if error.param else {}
    field = f"field {error.param!r}: " if error.param else ""
    return BadRequest(f"{field}{detail}", status=error.code, failure="model_error", extra=wrong)
