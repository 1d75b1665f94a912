"""scripted: a model with scripted answers, for tests, benchmarks and first steps. rules.py has the rules."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from ngym import ModelCall, ServiceContext, model_server
from ngym.convert import message_item, new_response, output_text, overflow_response, response_events
from ngym.net.json_limits import by_size
from ngym.services.models.server import ModelOptions

from .rules import Answer, Reply, answer, read_replies, situation
from .tokens import logprob, render, shortened

_WORD = re.compile(r"\s*\S+\s*\Z|\s*\S+|\s+")
CONTEXT = 1_000_000  # tokens, if token ids are on: each is a Python object
ECHO = Reply(text="{user}")


class Options(ModelOptions):
    model: str = "scripted"
    replies: tuple[Reply, ...] = Field(default=(), description="Tried in order, before those of the file.")
    file: Path | None = Field(default=None, description="JSONL, one reply per line; relative to the config's folder.")
    latency_s: float = Field(default=0, ge=0, le=3600, description="Delay before the first word.")
    word_latency_s: float = Field(default=0, ge=0, le=60, description="Delay of each word.")
    tokens: bool = Field(default=False, description="Send token ids (one per byte) and logprobs.")


@asynccontextmanager
async def replies(context: ServiceContext) -> AsyncIterator[tuple[Reply, ...]]:
    """All replies, with the echo as the last, so that one always matches."""
    options: Options = context.options
    read = read_replies(context.root / options.file) if options.file else ()
    yield (*options.replies, *read, ECHO)


async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    """The first matching reply, cut to `max_output_tokens`. Usage counts one token per byte."""
    options: Options = call.options
    response = await by_size(call.size, _response, request, call)
    thinking_s = options.latency_s
    if options.word_latency_s:
        thinking_s += options.word_latency_s * sum(1 for event in response_events(response) for _ in _words(event))
    if thinking_s:
        await asyncio.sleep(thinking_s)
    return response


async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
    """The same reply, word by word."""
    options: Options = call.options
    for event in response_events(await by_size(call.size, _response, request, call)):
        said = False
        for word in _words(event):
            await asyncio.sleep(options.word_latency_s)
            yield {**event, "delta": word}
            said = True
        if not said:
            yield event
        if event["type"] == "response.in_progress" and options.latency_s:
            await asyncio.sleep(options.latency_s)


def _words(event: dict[str, Any]) -> Iterator[str]:
    """The words of an event's text, each with the spaces before it."""
    for word in _WORD.finditer(event.get("delta", "")):
        yield word[0]


def _response(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    options: Options = call.options
    said = answer(call.state, situation(request["input"]))
    prompt = render(request, call.seen)
    if options.tokens and len(prompt) > CONTEXT:
        return overflow_response(request, response_id=f"resp_{secrets.token_hex(12)}", model=options.model)
    said, sampled, cut = shortened(said, request.get("max_output_tokens"))
    stem = secrets.token_hex(12)
    output = _items(said, stem)
    if options.tokens:
        logprobs = [logprob(token) for token in sampled]
        output[-1] |= {"prompt_token_ids": list(prompt), "generation_token_ids": list(sampled)}
        output[-1]["generation_log_probs"] = logprobs
    response = new_response(
        request,
        output,
        response_id=f"resp_{stem}",
        model=options.model,
        usage=_usage(len(prompt), len(sampled)),
        incomplete="max_output_tokens" if cut else None,
    )
    return {**response, "ng": {"policy_version": [[0, len(sampled), 0]]}} if options.tokens else response


def _items(said: Answer, stem: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.reasoning:
        text = {"type": "reasoning_text", "text": said.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{stem}", "summary": [], "content": [text]})
    if said.text or not said.calls:
        items.append(message_item([output_text(said.text)], f"msg_{stem}"))
    for index, (name, arguments) in enumerate(said.calls):
        ids = {"id": f"fc_{stem}_{index}", "call_id": f"call_{stem}_{index}"}
        items.append({"type": "function_call", **ids, "name": name, "arguments": arguments, "status": "completed"})
    return items


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


app = model_server(respond=respond, stream=stream, options=Options, lifespan=replies)
