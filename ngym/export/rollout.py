"""Is this row a rollout that may be used, and how did it end? Rows are parsed here and trusted afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ngym.export.tally import Reason
from ngym.schema import CUT_TURNS, Json

Ending = Literal["whole", "step limit", "cut"]
"""whole: the policy ended it. step limit: every turn is whole, but there might have been more. cut: in mid-turn, so that
an end of turn after it was never said."""


class NoRollout(Exception):
    """The row is not one that ng_collect_rollouts writes; the message says why."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A scored rollout. task: what its group has in common (its id and index), for rollouts with the same prompt."""

    task: tuple[str, int]
    reward: float
    ending: Ending
    params: Json
    response: Json


def parse(row: Json) -> Rollout | Reason:
    """A row of wire.md, section 3; of NeMo Gym's collector, too, whose rows have no `ng`.

    Raises:
        NoRollout: it is something else.
    """
    if "failure" in row or "_ng_failure_class" in row:
        return Reason.FAILED
    params = _record(row, "responses_create_params")
    response = _record(row, "response")
    reward = _reward(row)
    trace = row.get("ng") or {}
    if not isinstance(trace, dict):
        raise NoRollout(f"no rollout: 'ng' must be an object, not {type(trace).__name__}")
    if response.get("status") in ("failed", "cancelled"):
        return Reason.FAILED
    if reward is None:
        return Reason.UNSCORED
    task = (str(trace.get("task_id", "")), _task_index(row))
    return Rollout(task, reward, _ending(trace, response), params, response)


def _record(row: Json, name: str) -> Json:
    value = row.get(name)
    if isinstance(value, dict):
        return value
    wrong = f"must be an object, not {type(value).__name__}" if name in row else "is missing"
    raise NoRollout(f"no rollout: {name!r} {wrong}; ng_collect_rollouts writes rollouts")


def _reward(row: Json) -> float | None:
    if "reward" not in row:
        raise NoRollout("no rollout: 'reward' is missing (null would mean: could not be scored)")
    reward = row["reward"]
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise NoRollout(f"'reward' must be a number or null, not {reward!r:.60}")
    return float(reward)


def _task_index(row: Json) -> int:
    index: Any = row.get("_ng_task_index")
    if isinstance(index, bool) or not isinstance(index, int):
        raise NoRollout(
            f"'_ng_task_index' must be a whole number, not {index!r:.60}; it says whose group the rollout is"
        )
    return index


def _ending(trace: Json, response: Json) -> Ending:
    stop, turns = trace.get("stop_reason"), trace.get("finish_reasons") or []
    if not isinstance(turns, list):
        raise NoRollout(f"no rollout: 'ng.finish_reasons' must be a list, not {type(turns).__name__}")
    if response.get("status") == "incomplete" or any(
        reason in CUT_TURNS for reason in (stop, *turns) if isinstance(reason, str)
    ):
        return "cut"
    if stop == "max_steps":
        return "step limit"
    return "cut" if trace.get("status") == "truncated" else "whole"
