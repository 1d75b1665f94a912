"""vLLM's chat handler with three changes.

- A stream is a series of plain dicts: vLLM's own generator writes each chunk as text, which we would read again. One
  choice; no echo, no beams. What an answer says is told by vLLM's parser of the family, as there.
- The finish_reason is the engine's: vLLM answers `tool_calls` where a text that was cut off parses as a call.
- A prompt without room for one token in the context is a ContextFull, counted in tokens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import ConversationMessage
from vllm.tokenizers import TokenizerLike

from ngym.schema import Json

PROMPT_TOO_LONG = ("input_tokens", "input_text")  # the parameter that vLLM's renderer names for such a prompt


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
