"""What of a rollout fits into columns: its numbers, what was asked and answered last, the parts of its reward, its row's own fields."""

from __future__ import annotations

from typing import Any

from ngym.convert import last_user_text
from ngym.grading.answers import last_text
from ngym.notebook.frames import Kind
from ngym.schema import Json
from ngym.stats.score_summary import parts_of

KINDS: dict[str, Kind] = {
    "task_index": "int",
    "rollout_index": "int",
    "agent": "str",
    "reward": "float",
    "status": "str",
    "stop_reason": "str",
    "turns": "int",
    "tool_calls": "int",
    "tool_errors": "int",
    "input_tokens": "int",
    "output_tokens": "int",
    "queue_s": "float",
    "model_s": "float",
    "tools_s": "float",
    "verify_s": "float",
    "total_s": "float",
    "policy_version": "int",
    "asked": "str",
    "answered": "str",
    "task_id": "str",
    "rollout_id": "str",
    "run_id": "str",
    "started_at": "str",
}
OF_FAILURES: dict[str, Kind] = {
    "task_index": "int",
    "rollout_index": "int",
    "agent": "str",
    "attempt": "int",
    "class": "str",
    "stage": "str",
    "service": "str",
    "http_status": "int",
    "retryable": "bool",
    "message": "str",
    "asked": "str",
}
OF_TRACE = (
    "status",
    "stop_reason",
    "turns",
    "tool_calls",
    "tool_errors",
    "task_id",
    "rollout_id",
    "run_id",
    "started_at",
)
ELSEWHERE = frozenset({"reward", "reward_components", "agent_ref"})  # in a column of another name
NESTED = frozenset({"responses_create_params", "response", "ng"})


def slim(row: Json) -> Json:
    """A scored rollout as one flat record. policy_version: the newest. asked: the last user message of the prompt."""
    trace, usage = row.get("ng") or {}, row["response"].get("usage") or {}
    timings = trace.get("timings") or {}
    record = {
        **_who(row),
        "reward": row["reward"],
        **{name: usage.get(name) for name in ("input_tokens", "output_tokens")},
        **{name: timings.get(name) for name in ("queue_s", "model_s", "tools_s", "verify_s", "total_s")},
        **{name: trace.get(name) for name in OF_TRACE},
        "policy_version": max(trace.get("policy_version") or (), default=None),
        "answered": last_text(row["response"]),
        **dict(parts_of(row)),
    }
    for name, value in row.items():
        if not isinstance(value, dict | list) and not _is_told(name):
            record[_column(name)] = value
    return record


def full(row: Json) -> Json:
    """The same and everything that is not in it, lists and objects as they are."""
    record = slim(row)
    lists = {_column(name): each for name, each in row.items() if isinstance(each, dict | list) and not _is_told(name)}
    return {**record, **lists, **{name: row.get(name) for name in sorted(NESTED)}}


def failed(row: Json) -> Json:
    """A failed attempt as one flat record."""
    return {**_who(row), "attempt": row.get("attempt"), **row["failure"]}


def _who(row: Json) -> Json:
    params: Any = row.get("responses_create_params") or {}
    return {
        "task_index": row.get("_ng_task_index"),
        "rollout_index": row.get("_ng_rollout_index"),
        "agent": (row.get("agent_ref") or {}).get("name"),
        "asked": last_user_text(params.get("input") or ""),
    }


def _column(name: str) -> str:
    """That of a row's own field: those of ours keep their names."""
    return name if name not in KINDS else f"row.{name}"


def _is_told(name: str) -> bool:
    return name.startswith("_ng_") or name in ELSEWHERE or name in NESTED
