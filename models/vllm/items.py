"""The token fields on the wire: taken from the items that come back, written onto the last item of an answer."""

from __future__ import annotations

from typing import NamedTuple

from ngym.convert import message_item, output_text
from ngym.errors import BadRequest
from ngym.schema import TOKEN_FIELDS, Json

from .splice import Seen
from .tokens import Tokens


class SeenItem(NamedTuple):
    """The last item that came back with its ids: its place in the input, and whether the model's turn goes on after it.

    Items that a caller appended to the model's own turn were not seen by the engine.
    """

    place: int
    ids: Seen
    turn_goes_on: bool


def take_seen(body: Json) -> SeenItem | None:
    """Remove the token fields from the input's items, for vLLM does not know them; the ids of the last that had them."""
    items = body.get("input")
    if not isinstance(items, list):
        return None
    last = None
    for index, item in enumerate(items):
        if isinstance(item, dict) and TOKEN_FIELDS[0] in item:
            prompt, sampled, _ = (item.pop(field, None) for field in TOKEN_FIELDS)
            last = _seen(index, prompt, sampled) or last
    if last is None:
        return None
    index, ids = last
    return SeenItem(index, ids, index + 1 < len(items) and _is_the_models(items[index + 1]))


def _seen(index: int, prompt: object, sampled: object) -> tuple[int, Seen] | None:
    if prompt is None and sampled is None:
        return None
    for field, ids in zip(TOKEN_FIELDS[:2], (prompt, sampled), strict=True):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            where = f"field 'input.{index}.{field}'"
            raise BadRequest(f"{where}: must be a list of token ids; send the item back as it came, or without it")
    return index, Seen(prompt, sampled)  # type: ignore[arg-type]  # checked just above


def _is_the_models(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


def with_tokens(response: Json, tokens: Tokens) -> Json:
    """The response, its last output item carrying the call's tokens; an empty answer gets an empty message for them."""
    if not response["output"]:
        response["output"] = [message_item([output_text("")], "msg_" + response["id"].removeprefix("resp_"))]
    prompt_field, sampled_field, logprobs_field = TOKEN_FIELDS
    response["output"][-1] |= {
        prompt_field: tokens.prompt,
        sampled_field: tokens.sampled,
        logprobs_field: tokens.logprobs,
    }
    response["ng"] = {"policy_version": tokens.versions}
    return response
