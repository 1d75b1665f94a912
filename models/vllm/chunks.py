"""vLLM's stream of a chat answer as plain dicts: its own generator writes each chunk as text, which we would read again.

What an answer says is told by vLLM's parser of the family, as there. One choice; no echo, no beams.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import ConversationMessage
from vllm.tokenizers import TokenizerLike

from ngym.schema import Json


class ChatInChunks(OpenAIServingChat):
    """vLLM's chat handler but for that."""

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
                calling = called and not named and output.finish_reason == "stop"
                choice["finish_reason"] = "tool_calls" if calling else output.finish_reason
                chunk["usage"] = _usage(result, sampled, parser if self._include_reasoning_tokens_details else None)
            elif not (choice["delta"] or request.logprobs):
                continue
            delta = {}
            yield chunk


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
