"""Comparative rewards: `/verify` leaves them pending, and `/verify_group` sets them for all rollouts of a task at once.

A pending row has `"reward": null, "reward_pending": "group"`: clients without support for groups see it as unscored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ngym.errors import ServiceError
from ngym.rollout import without_tokens
from ngym.schema import REWARD_PENDING, Json, is_cut_off, is_reward

ROUTE = "/verify_group"
TIMEOUT_S = 600.0

Post = Callable[..., Awaitable[Any]]


async def verify_group(post: Post, rows: Sequence[Json]) -> list[Json]:
    """The rows of one task with their comparative rewards. post: that of their agent or gym server.

    Raises:
        ServiceError: no answer, or not a valid one.
    """
    answer = await post(ROUTE, {"rollouts": [_bare_row(row) for row in rows]}, timeout=TIMEOUT_S, idempotent=True)
    outcomes = answer.get("rollouts") if isinstance(answer, dict) else None
    if not isinstance(outcomes, list) or len(outcomes) != len(rows) or not all(map(_is_outcome, outcomes)):
        raise ServiceError(f"{ROUTE} answered without one reward for each rollout", failure="verify_error")
    return [apply_outcome(row, outcome) for row, outcome in zip(rows, outcomes, strict=True)]


async def try_verify_group(post: Post, rows: Sequence[Json]) -> list[Json]:
    """As `verify_group`, but an error leaves the rows unscored, with the reason."""
    try:
        return await verify_group(post, rows)
    except ServiceError as error:
        return [mark_unscored(row, error.failure or "verify_error", error.detail) for row in rows]


def mark_unscored(row: Json, failure: str, reason: str) -> Json:
    """A row that could not be compared: its reward is null. failure: a failure class."""
    return apply_outcome(row, {"reward": None, "outcome": failure, "reason": reason})


def apply_outcome(row: Json, outcome: Json) -> Json:
    """A row with a verifier's new fields and reward, and the derived values in `ng`."""
    fields = {name: value for name, value in row.items() if name not in (REWARD_PENDING, "reward_components")}
    trace = row.get("ng")
    if not isinstance(trace, dict):
        return {**fields, **outcome}
    cut_off = is_cut_off(trace.get("stop_reason"), trace.get("finish_reasons") or ())
    ended = "truncated" if cut_off else "ok"
    status = "unscored" if outcome.get("reward") is None else ended
    parts = outcome.get("reward_components") or {}
    return {**fields, **outcome, "ng": {**trace, "status": status, "reward_components": parts}}


def _bare_row(row: Json) -> Json:
    response = row["response"]
    bare = {**response, "output": without_tokens(response.get("output") or [])}
    return {name: value for name, value in row.items() if name != "ng"} | {"response": bare}


def _is_outcome(outcome: Any) -> bool:
    if not isinstance(outcome, dict) or "reward" not in outcome:
        return False
    if not isinstance(outcome.get("reward_components") or {}, dict):
        return False
    reward = outcome["reward"]
    return reward is None or is_reward(reward)
