"""POST /aggregate_metrics: numbers over many verify responses, per task and over all (NeMo Gym's keys)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any

from ngym.metrics import best_at_k
from ngym.schema import Json

NOT_METRICS = frozenset({"_ng_task_index", "_ng_rollout_index", "_ng_attempt_index"})


def aggregate(rows: Sequence[Json]) -> Json:
    """Mean, min, max, median and std of each numeric field, and pass@k of the reward; null rewards are left out.

    Returns:
        `{"group_level_metrics": [one per task], "agent_metrics": {...}, "key_metrics": {...}}`.
    """
    groups: dict[Any, list[Json]] = defaultdict(list)
    for row in rows:
        groups[row.get("_ng_task_index")].append(row)
    overall = _numbers(rows)
    scored = [[row["reward"] for row in group if row.get("reward") is not None] for group in groups.values()]
    k = min((len(rewards) for rewards in scored if rewards), default=0)
    if k:
        overall[f"pass@{k}/reward"] = fmean(best_at_k(rewards, k) for rewards in scored if rewards)
    return {
        "group_level_metrics": [
            {"_ng_task_index": index, "rollouts": len(group), **_numbers(group)} for index, group in groups.items()
        ],
        "agent_metrics": overall,
        "key_metrics": {
            key: value for key, value in overall.items() if key == "mean/reward" or key.startswith("pass@")
        },
    }


def _numbers(rows: Iterable[Json]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and key not in NOT_METRICS:
                values[key].append(float(value))
    out: dict[str, float] = {}
    for key, numbers in values.items():
        out |= {
            f"mean/{key}": fmean(numbers),
            f"min/{key}": min(numbers),
            f"max/{key}": max(numbers),
            f"median/{key}": median(numbers),
        }
        if len(numbers) > 1:
            out[f"std/{key}"] = stdev(numbers)
    return out
