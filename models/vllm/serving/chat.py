"""Chat Completions on vLLM's engine, whole and as chunks.

- A stream is a series of plain dicts: vLLM's own generator writes each chunk as text, which we would read again. One
  choice; no echo, no beams. What an answer says is told by vLLM's parser of the family, as there.
- The finish_reason is the engine's: vLLM answers `tool_calls` where a text that was cut off parses as a call.
- A prompt without room for one token in the context is a ContextFull, counted in tokens.

The handler renders the template, has the engine generate, and parses reasoning and tool calls. It is called in this
process, without a route in between, and takes ready prompt ids where a prefill server would put them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.entrypoints.generate.base.protocol import DeltaMessage, RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.inputs import EngineInput
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import ConversationMessage
from vllm.tokenizers import TokenizerLike

from ngym.did_you_mean import did_you_mean
from ngym.errors import BadRequest, NotReady, Overloaded, ServiceError
from ngym.rollout.token_splice import Ends, Seen, begins_with, splice
from ngym.schema import Json

from .tokens import Tokens, recorded

if TYPE_CHECKING:
    from ngym.services.models.model_call import SeenCall
    from ngym.services.models.server import ModelCall


PROMPT_TOO_LONG = ("input_tokens", "input_text")  # the parameter that vLLM's renderer names for such a prompt
HOSTED = (  # what a hosted API does with a request: an engine has no part in it
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "thinking",  # whether is said by reasoning_effort, too
    "user",
    "verbosity",
)
KNOWN = frozenset(ChatCompletionRequest.model_fields)
CUT_OFF = "a weight push of mode abort cut this answer off; ask again, and the new weights answer"
CONTRADICTION = (
    "the engine gave up: the grammar of this request (its schema, choice or tools) allows no token that its other fields "
    "allow, such as allowed_token_ids, logit_bias, bad_words and min_tokens"
)
BEAMS_ARE_WHOLE = "field 'beam_width': beams are told apart at their end; ask without stream"
Chunks = AsyncGenerator[Json]


class ContextFull(Exception):
    """A prompt leaves no room in the context: that ends a rollout, and is no error.

    tokens: of the prompt. vLLM stops counting one token beyond the context, so a longer prompt may have more.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"a prompt of {tokens} tokens leaves no room in the context")
        self.tokens = tokens


class ChatInChunks(OpenAIServingChat):
    """vLLM's chat handler but for that."""

    async def render_chat_request(
        self, request: ChatCompletionRequest
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """The prompt of a conversation, or the ids that the request brings for it. Raises ContextFull."""
        context: int = self.model_config.max_model_len
        try:
            rendered = await super().render_chat_request(request)
        except VLLMValidationError as error:
            if error.parameter in PROMPT_TOO_LONG:
                raise ContextFull(context + 1) from None
            raise
        if not isinstance(rendered, ErrorResponse):
            longest = max(self._extract_prompt_len(prompt) for prompt in rendered[1])
            if longest >= context:
                raise ContextFull(longest)
        return rendered

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: AsyncIterator[RequestOutput], *told: Any, **more: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """vLLM's answer, which says `tool_calls` only where the engine stopped by itself."""
        last: RequestOutput | None = None

        async def seen() -> AsyncGenerator[RequestOutput]:
            nonlocal last
            async for last in result_generator:
                yield last

        answer = await super().chat_completion_full_generator(request, seen(), *told, **more)
        if isinstance(answer, ChatCompletionResponse) and last is not None:
            for choice, output in zip(answer.choices, last.outputs, strict=True):
                called = choice.finish_reason == "tool_calls"
                choice.finish_reason = _finish_reason(output.finish_reason, called)
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
        """Chunks; the last has the finish_reason and the usage. Raises what the engine raises."""
        parser = self._make_parser(request, tokenizer, chat_template_kwargs) if self.parser_cls is not None else None
        head = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model_name}
        sampled: list[int] = []
        called = False
        delta: Json = {"role": "assistant", "content": ""}
        async for result in result_generator:
            output = result.outputs[0]
            self._raise_if_error(output.finish_reason, request_id)
            sampled.extend(output.token_ids)
            said = _said(parser, output, result.prompt_token_ids, request)
            called = called or "tool_calls" in said
            choice: Json = {"index": 0, "delta": delta | said, "finish_reason": None}
            if request.logprobs:
                choice["logprobs"] = self._create_chat_logprobs(
                    token_ids=output.token_ids,
                    top_logprobs=output.logprobs,
                    tokenizer=tokenizer,
                    num_output_top_logprobs=request.top_logprobs,
                    logprob_token_ids=request.logprob_token_ids,
                ).model_dump(mode="json", exclude_none=True)
            chunk: Json = {**head, "choices": [choice]}
            if output.finish_reason is not None:
                named = not isinstance(request.tool_choice, str | None)  # the API calls that a stop
                choice["finish_reason"] = _finish_reason(output.finish_reason, called and not named)
                chunk["usage"] = _usage(result, sampled, parser if self._include_reasoning_tokens_details else None)
            elif not (choice["delta"] or request.logprobs):
                continue
            delta = {}
            yield chunk


def _finish_reason(engines: str | None, called: bool) -> str | None:
    """That of an answer. engines: the engine's own; `repetition` cuts an answer off as a limit does."""
    if engines == "stop" and called:
        return "tool_calls"
    return "length" if engines == "repetition" else engines


def _said(
    parser: Parser | None, output: CompletionOutput, prompt: list[int] | None, request: ChatCompletionRequest
) -> Json:
    """What is new, as a delta; nothing while the parser cannot tell what it will be."""
    if parser is None:
        return {"content": output.text} if output.text else {}
    message: DeltaMessage | None = parser.parse_delta(
        output.text, list(output.token_ids), request, prompt, finished=output.finish_reason is not None
    )
    if message is None:
        return {}
    calls = [
        call.model_dump(exclude_none=True)
        for call in message.tool_calls
        if call.index == 0 or request.parallel_tool_calls is not False
    ]
    said = {"reasoning_content": message.reasoning, "content": message.content, "tool_calls": calls}
    return {name: value for name, value in said.items() if value}


def _usage(result: RequestOutput, sampled: list[int], thinking: Parser | None) -> Json:
    prompt = len(result.prompt_token_ids or ()) + len(result.encoder_prompt_token_ids or ())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": len(sampled),
        "total_tokens": prompt + len(sampled),
        "prompt_tokens_details": {"cached_tokens": result.num_cached_tokens},
        # without a parser nothing is told apart as reasoning
        "completion_tokens_details": {"reasoning_tokens": thinking.count_reasoning_tokens(sampled) if thinking else 0},
    }


class Chat:
    """What the model server's routes call. ends: of the turns, in the ids of this model."""

    def __init__(self, serving: OpenAIServingChat, ends: Ends) -> None:
        serving.__class__ = ChatInChunks  # vLLM makes it itself, out of twenty of its arguments
        self._serving = serving
        self._ends = ends

    async def respond(self, request: Json, call: ModelCall) -> Json:
        """A Chat Completion; its message carries the token fields.

        Raises:
            BadRequest: vLLM refuses the request. NotReady: it cannot answer, or a weight push cut the answer off.
        """
        tokens = Tokens()
        try:
            answer = await self._ask(self._checked(request | {"stream": False}), call.seen, tokens)
        except ContextFull as full:
            return self._nothing("chat.completion", "message", full.tokens)
        assert isinstance(answer, ChatCompletionResponse)
        if tokens.aborted:
            raise NotReady(CUT_OFF)  # vLLM would call the half of it completed
        completion: Json = answer.model_dump(mode="json", exclude_none=True)
        del completion["choices"][1:]  # the lesser beams
        message = completion["choices"][0]["message"]
        if "reasoning" in message:  # vLLM's name; our converter and most clients know the other
            message["reasoning_content"] = message.pop("reasoning")
        message.setdefault("content", None)  # which the API has in any case
        message |= tokens.fields
        completion["usage"].setdefault("completion_tokens_details", {"reasoning_tokens": 0})  # as in a stream
        return completion | tokens.trace

    async def stream(self, request: Json, call: ModelCall) -> AsyncGenerator[Json]:
        """Chat Completion chunks; the one with the finish_reason carries the token fields. Raises as `respond`."""
        tokens = Tokens()
        checked = self._checked(request | {"stream": True})
        try:
            answer = await self._ask(checked, call.seen, tokens)
        except ContextFull as full:
            yield self._nothing("chat.completion.chunk", "delta", full.tokens)
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
            raise _told(error, checked) from error

    def _checked(self, request: Json) -> ChatCompletionRequest:
        """The request as vLLM's own record. BadRequest names what it does not know, or takes for wrong."""
        body = {name: value for name, value in request.items() if name not in HOSTED}
        width = body.pop("beam_width", None)
        for name in body.keys() - KNOWN:
            raise BadRequest(f"field {name!r}: vLLM has no such field{did_you_mean(name, KNOWN)}")
        if body.get("n", 1) != 1 or (width and body.get("stream")):
            raise BadRequest("field 'n': one answer is given; ask again for more" if width is None else BEAMS_ARE_WHOLE)
        if width is not None:
            body |= {"use_beam_search": True, "n": width}
        models = self._serving.models
        if body.get("model") not in models.lora_requests:
            body["model"] = models.model_name()  # there is one policy, whatever an agent calls it
        try:
            return ChatCompletionRequest.model_validate(body)
        except ValidationError as error:
            wrong = [f"field {'.'.join(map(str, one['loc']))!r}: {one['msg']}" for one in error.errors()]
            raise BadRequest("; ".join(wrong[:3])) from None
        except VLLMValidationError as error:
            raise _refusal(create_error_response(error).error) from None

    async def _ask(
        self, request: ChatCompletionRequest, seen: SeenCall | None, tokens: Tokens
    ) -> ChatCompletionResponse | Chunks:
        """vLLM's answer or, where one was asked for, its stream. Its refusals are ServiceErrors, or ContextFull."""
        try:
            await self._go_on_from(seen, request)
            recorded.set(None if request.use_beam_search else tokens)
            answer = await self._serving.create_chat_completion(request)
        except (ContextFull, ServiceError):
            raise
        except Exception as error:
            raise _told(error, request) from error
        if not isinstance(answer, ErrorResponse):
            return answer
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # vLLM makes an answer of it that nobody reads
        raise _refusal(answer.error)

    async def _go_on_from(self, seen: SeenCall | None, request: ChatCompletionRequest) -> None:
        """Have vLLM continue from the ids of an earlier call, where the history is still that one."""
        if seen is None or seen.turn_goes_on:
            return
        rendered = await self._render(request)
        if rendered is None:
            return
        ids = Seen(seen.prompt_token_ids, seen.generation_token_ids)
        if not begins_with(rendered, ids):
            history = await self._render(request, until=seen.place + 1)
            rendered = (history and splice(rendered, history, ids, self._ends)) or rendered
        request.kv_transfer_params = {"prompt_token_ids": rendered}

    async def _render(self, request: ChatCompletionRequest, until: int | None = None) -> list[int] | None:
        """The prompt ids of the conversation (of its first messages), or None where there is more in it than text."""
        # A copy: rendering sets the grammar of the tools on its request.
        copy = request.model_copy(update={"messages": request.messages[:until]})
        result = await self._serving.render_chat_request(copy)
        if isinstance(result, ErrorResponse):
            return None
        _, [engine_input] = result
        ids: list[int] | None = engine_input["prompt_token_ids"] if engine_input["type"] == "token" else None
        return ids

    def _nothing(self, kind: str, said: str, prompt: int) -> Json:
        """The answer of no tokens to a conversation that leaves no room for any. prompt: its tokens, as counted."""
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._serving.models.model_name(),
            "choices": [{"index": 0, said: {"role": "assistant", "content": ""}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
        }


def _told(error: Exception, request: ChatCompletionRequest) -> ServiceError:
    """An exception as vLLM's own table tells it: which of them are the caller's fault."""
    if isinstance(error, GenerationError) and request.extract_structured_outputs() is not None:
        return BadRequest(CONTRADICTION, failure="model_error")
    return _refusal(create_error_response(error).error)


def _refusal(error: ErrorInfo) -> ServiceError:
    """vLLM's refusal as ours."""
    detail = " ".join(error.message.split())
    if error.code in (429, 503):
        return (Overloaded if error.code == 429 else NotReady)(f"vLLM: {detail}", failure="model_error")
    if error.code >= 500:
        return ServiceError(f"vLLM failed: {detail}", failure="model_error", retryable=True)
    wrong = {"errors": [{"field": error.param, "message": detail}]} if error.param else {}
    field = f"field {error.param!r}: " if error.param else ""
    return BadRequest(f"{field}{detail}", status=error.code, failure="model_error", extra=wrong)
