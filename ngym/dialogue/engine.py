"""The interface of an engine: sampling parameters in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal, NamedTuple

from ngym.errors import BadRequest
from ngym.schema import Json

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


class Sampled(NamedTuple):
    """The next tokens and logprobs, [n] each; the last ones with a finish reason; the version of the weights."""

    ids: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    version: int = 0


Generate = Callable[[list[int], Sampling], AsyncGenerator[Sampled, None]]
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
    stop = request.get("stop") or ()
    limit = request.get("max_completion_tokens") or request.get("max_tokens") or room
    return Sampling(
        max_tokens=min(limit, room),
        temperature=request.get("temperature", 1.0),
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
