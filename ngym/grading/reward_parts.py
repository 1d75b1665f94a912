"""Composes rewards from weighted parts and shaping terms; reports both the measured parts and the rewarded components.

Every function returns the fields that `verify` returns: `reward`, `reward_components` (their sum is the reward) and
`raw_reward`, the reward before shaping. A part that could not be measured is None, and makes the reward None: never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ngym.grading.answers import boxed, last_text, without_reasoning
from ngym.rollout import function_calls

Json = dict[str, Any]


def weighted(parts: Mapping[str, float | None], weights: Mapping[str, float], *, gate: str | None = None) -> Json:
    """The weighted sum of the parts.

    Args:
        parts: name -> 0 to 1, or None if it could not be measured.
        weights: name -> weight; a part without one is not reported, a weight of 0 reports it without a reward.
        gate: a part that must be above 0 for any other to count (no reward for a quick wrong answer). If it could not
            be measured, the reward is None, whatever its weight.
    """
    missing = [name for name, weight in weights.items() if (weight or name == gate) and parts[name] is None]
    opening = None if gate is None else parts[gate]
    shut = opening is not None and opening <= 0
    components: dict[str, float | None] = {}
    for name, weight in weights.items():
        value = parts[name]
        components[name] = None if value is None else 0.0 if shut and name != gate else weight * value
    reward = None if missing else sum(value for value in components.values() if value is not None)
    return {"reward": reward, "reward_components": components, "parts": {name: parts[name] for name in weights}}


def efficiency(needed: float, used: float) -> float:
    """1 if no more was used than needed, else needed / used; for calls, turns, tokens."""
    return 1.0 if used <= needed else needed / used


class Shaping(BaseModel):
    """Shaping terms that a stanza adds to the reward of its environment; all are off by default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overlong_limit: int | None = Field(default=None, ge=1, description="Tokens; the cost begins at limit - buffer.")
    overlong_buffer: int = Field(
        default=512, ge=1, description="Tokens over which the cost grows from 0 to its weight."
    )
    overlong_weight: float = Field(default=1.0, ge=0, description="The cost of an answer at the limit.")
    length_target: int | None = Field(default=None, ge=1, description="Characters of the final text.")
    length_weight: float = Field(default=0.1, ge=0, description="Cost of a text of twice the target, or of no text.")
    format: Literal["none", "boxed", "one_line"] = Field(
        default="none", description="The required format of the final text."
    )
    format_weight: float = Field(default=0.1, ge=0, description="Cost of a final text without the format.")
    free_calls: int | None = Field(default=None, ge=0, description="Tool calls without a cost.")
    call_weight: float = Field(default=0.05, ge=0, description="Cost of each further tool call.")
    max_call_cost: float = Field(default=0.5, ge=0, description="The largest total cost of tool calls.")


def shaped(outcome: Mapping[str, Any], response: Mapping[str, Any], shaping: Shaping) -> Json:
    """The outcome with the shaping terms added as components; `raw_reward` is the reward without them.

    If a term cannot be measured (the response has no token count), it is None, and so is the reward.
    """
    raw = outcome["reward"]
    terms = shaping_terms(response, shaping)
    known = [value for value in terms.values() if value is not None]
    unknown = raw is None or len(known) < len(terms)
    components = outcome.get("reward_components") or {"correctness": raw}
    return {
        **outcome,
        "reward": None if unknown else raw + sum(known),
        "raw_reward": raw,
        "reward_components": {**components, **{f"shaping/{name}": value for name, value in terms.items()}},
    }


def shaping_terms(response: Mapping[str, Any], shaping: Shaping) -> dict[str, float | None]:
    """Each enabled term, 0 or less; None if the response lacks its data."""
    text = without_reasoning(last_text(response)).strip()
    terms: dict[str, float | None] = {}
    if shaping.overlong_limit is not None:
        tokens = (response.get("usage") or {}).get("output_tokens")
        cost = None if tokens is None else overlong(tokens, shaping.overlong_limit, shaping.overlong_buffer)
        terms["overlong"] = None if cost is None else shaping.overlong_weight * cost
    if shaping.length_target is not None:
        off = abs(len(text) - shaping.length_target) / shaping.length_target
        terms["length"] = -shaping.length_weight * min(1.0, off)
    if shaping.format != "none":
        terms["format"] = 0.0 if has_format(text, shaping.format) else -shaping.format_weight
    if shaping.free_calls is not None:
        calls = len(list(function_calls(response.get("output") or ())))
        cost = shaping.call_weight * max(0, calls - shaping.free_calls)
        terms["tool_use"] = -min(cost, shaping.max_call_cost)
    return terms


def overlong(tokens: int, limit: int, buffer: int) -> float:
    """DAPO's soft punishment, 0 to -1: linear over the last `buffer` tokens before `limit` (arXiv 2503.14476, eq. 13)."""
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))


def has_format(text: str, wanted: str) -> bool:
    r"""`boxed`: exactly one closed `\boxed{...}`; `one_line`: some text and no line break."""
    if wanted == "boxed":
        return text.count("\\boxed") == 1 and bool(boxed(text))
    return bool(text) and "\n" not in text
