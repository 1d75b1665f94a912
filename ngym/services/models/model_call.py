"""A call to a model, and what its back end gets in addition to the request, such as token ids that the client sent
back.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from ngym.errors import BadRequest
from ngym.schema import TOKEN_FIELDS, Json


class SeenCall(NamedTuple):
    """An earlier call that this one continues.

    place: the index, in the native request's messages (chat) or input items (responses), of the last item of its
    answer.
    prompt_token_ids, generation_token_ids: [P], [G], the engine's input and what it sampled.
    turn_goes_on: whether the model's turn continues after it; the engine has not seen what a client appended there.
    """

    place: int
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    turn_goes_on: bool


def take_seen(items: Any) -> SeenCall | None:
    """Remove the token fields from these items or messages; returns the call whose ids the last of them carried.

    Raises:
        BadRequest: the fields are not token ids.
    """
    if not isinstance(items, list):
        return None
    last = None
    for index, item in enumerate(items):
        if TOKEN_FIELDS[0] in item:
            prompt, sampled, _ = (item.pop(name, None) for name in TOKEN_FIELDS)
            last = (index, prompt, sampled)
    if last is None:
        return None
    index, prompt, sampled = last
    for name, ids in zip(TOKEN_FIELDS, (prompt, sampled), strict=False):
        _check_ids(ids, f"field 'input[{index}].{name}'")
    return SeenCall(index, prompt, sampled, index + 1 < len(items) and is_the_models(items[index + 1]))


def is_the_models(item: Json) -> bool:
    """Whether the model said this item or message."""
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


def _check_ids(ids: Any, where: str) -> None:
    try:
        array("I", ids)  # validates in C: a conversation has many ids
    except (TypeError, ValueError, OverflowError):
        raise BadRequest(
            f"{where}: must be a list of token ids; return the item unchanged, or without this field"
        ) from None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The context of one call: its rollout, and the state of the service.

    state: what the service's lifespan yielded.
    seen: the earlier call that this one continues; a back end that owns the tokens continues from exactly its ids.
    size: bytes of the client's request (`ngym.net.json_limits.by_size`).
    """

    options: Any
    state: Any
    rollout_id: str | None
    headers: Headers
    seen: SeenCall | None = None
    size: int = 0


Respond = Callable[[Json, ModelCall], Awaitable[Json]]
Stream = Callable[[Json, ModelCall], AsyncIterator[Json]]
