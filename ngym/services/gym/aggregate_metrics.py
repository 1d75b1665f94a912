"""POST /aggregate_metrics: numbers over many verify responses, per task and over all (NeMo Gym's keys), and the author's own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from ngym.errors import BadRequest, ServiceError, boundary
from ngym.schema import Json
from ngym.stats.score_summary import Scores, Subsets, parts_of

NOT_METRICS = frozenset({"_ng_task_index", "_ng_rollout_index", "_ng_attempt_index"})
MOST_ROWS = 100_000
MOST_OWN = 1000  # numbers of an author

ComputeMetrics = Callable[[list[Json]], Mapping[str, float | None]]


def aggregated(body: Json, compute_metrics: ComputeMetrics | None) -> Json:
    """The answer to a request; `by` in it names a field by whose values the scores are told, too.

    Raises:
        BadRequest: verify_responses is no list of rows, or has too many.
    """
    rows, by = body.get("verify_responses") or [], body.get("by")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and _is_scored(row) for row in rows):
        raise BadRequest("verify_responses must be a list of objects whose 'reward' is a number or null")
    if len(rows) > MOST_ROWS:
        raise BadRequest(f"verify_responses has {len(rows):,} rows; send no more than {MOST_ROWS:,}, such as a sample")
    if by is not None and not isinstance(by, str):
        raise BadRequest(f"'by' must be the name of a field, not {by!r:.60}")
    answer = aggregate(rows, by)
    if compute_metrics is not None:
        own = own_metrics(compute_metrics, [row for row in rows if row.get("reward") is not None])
        answer["agent_metrics"] |= own["metrics"]
        answer["key_metrics"] |= own["metrics"]
        answer["ng"] = {"environment": own}
    return answer


def aggregate(rows: Sequence[Json], by: str | None = None) -> Json:
    """Mean, min, max, median and std of each numeric field, pass@k and majority@k; null rewards are left out, and counted.

    Returns:
        `{"group_level_metrics": [one per task], "agent_metrics": {...}, "key_metrics": {...}}`.
    """
    groups: dict[Any, list[Json]] = defaultdict(list)
    scores, subsets = Scores(), Subsets(by) if by else None
    places: dict[Any, int] = {}
    for row in rows:
        index = row.get("_ng_task_index")
        groups[index].append(row)
        task = places.setdefault(index, len(places))
        scores.add(task, row)
        if subsets is not None:
            subsets.add(task, row)
    key = scores.metrics() | (subsets.metrics() if subsets else {})
    return {
        "group_level_metrics": [
            {
                "_ng_task_index": index,
                "rollouts": len(group),
                "unscored": sum(row.get("reward") is None for row in group),
                **_numbers(group),
            }
            for index, group in groups.items()
        ],
        "agent_metrics": {**_numbers(rows), **key, "unscored": scores.unscored},
        "key_metrics": key,
    }


def own_metrics(compute_metrics: ComputeMetrics, rows: list[Json]) -> Json:
    """What the author's function says of the scored rows, and what went wrong: `{"metrics": {...}, "errors": [...]}`."""
    try:
        with boundary("verify_error", "compute_metrics failed"):
            found = dict(compute_metrics(rows))
    except ServiceError as error:  # the author's bug costs the author's numbers, and none of the others
        return {"metrics": {}, "errors": [error.detail]}
    errors = []
    if len(found) > MOST_OWN:
        errors.append(f"compute_metrics gave {len(found):,} numbers; only the first {MOST_OWN:,} are kept")
    metrics = {}
    for name, value in list(found.items())[:MOST_OWN]:
        if isinstance(value, int | float) and math.isfinite(value):
            metrics[str(name)] = float(value)
        elif value is not None:
            errors.append(f"compute_metrics gave {value!r:.60} as {name!r}; it must be a finite number or None")
    return {"metrics": metrics, "errors": errors}


def _is_scored(row: Json) -> bool:
    return isinstance(row.get("reward"), int | float | None)


def _numbers(rows: Iterable[Json]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in (*row.items(), *parts_of(row)):
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
