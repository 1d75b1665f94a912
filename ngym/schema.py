"""The records of the wire (reference/rows.md): Task -> Rollout -> Segment. Fields are only added, never removed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import orjson

from ngym.errors import FailureClass

SCHEMA_VERSION = 1

Json = dict[str, Any]
Kind = Literal["gym_server", "agent", "model"]
Status = Literal["ok", "truncated", "unscored"]
StopReason = Literal["answer", "max_steps", "context", "length", "user_done"]
FinishReason = Literal["stop", "tool_calls", "length", "context", "content_filter"]

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
# Beside them on the items of NeMo Gym's models, often null; its servers refuse it without them.
REWARD_PENDING = "reward_pending"
ROUTED_EXPERTS = "routed_experts"


def token_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """The TOKEN_FIELDS of an item or a message: all of them, or {}."""
    return {name: item[name] for name in TOKEN_FIELDS} if all(name in item for name in TOKEN_FIELDS) else {}


RESERVED = frozenset([
    "verify", "verify_group", "seed_session", "aggregate_metrics", "tools", "session", "mcp", "reset", "step",
    "health", "ready", "metrics", "openapi.json", "docs", "redoc",
])  # fmt: skip
"""Routes of gym servers that are not tools."""
SESSION_HEADER = "x-ng-session"  # on every call in a session and its answer
SESSION_COOKIE = "ng_session"  # the same, for callers that keep cookies
ROLLOUT_HEADER = "x-ng-rollout-id"  # the rollout of a request, passed through every hop
DEADLINE_HEADER = "x-ng-deadline-ms"  # milliseconds that the caller will wait from now on
IDEMPOTENCY_HEADER = "idempotency-key"  # of a POST that may be sent again: it is executed once
TOOL_ERRORS_HEADER = "x-ng-tool-errors"  # of a tool call; "show": the model reads the error of a crash too
TOOL_OUTPUT_HEADER = "x-ng-tool-output"  # of a tool's answer; PARTS: a list of input_text and input_image, else text
PARTS = "parts"
REPEATABLE_HEADER = "x-ng-repeatable-s"  # of a gym server's answers: seconds that it keeps an answer with such a key
WAITING_HEADER = "x-ng-waiting"  # of an agent's answer to /run: rollouts that wait there
PREFER_HEADER = "prefer"  # of a call of /verify; MINIMAL: answer only what `verify` adds to the row (RFC 7240)
APPLIED_HEADER = "preference-applied"  # of its answer, if the server did
MINIMAL = "return=minimal"
TOKEN_FORMAT_HEADER = "x-ng-token-format"  # to an agent's /run; "ng": segments only, else NeMo Gym's fields stay too


class RoutedExperts(TypedDict):
    """The experts that the engine chose for the first R tokens of a context (`ngym.routed_experts`).

    shape: [R, L, K], L layers of the decoder and K experts of a token in each. dtype: uint8 or uint16 (little-endian).
    data: the numbers of the experts as base64.
    """

    shape: list[int]
    dtype: str
    data: str


class Segment(TypedDict):
    """The token ids of one unbroken context, and which of them the policy sampled.

    token_ids: [T] every token, prompt and tool outputs included.
    mask: spans [start, end) of the tokens that the policy sampled.
    logprobs: [number of masked tokens] the sampler's own, in order.
    policy_version: spans [start, end, version] over token_ids.
    images: `image_digest` of those whose placeholders are in token_ids, in order; absent without images.
    routed_experts: of the first tokens, if the model server records them.
    """

    token_ids: list[int]
    mask: list[list[int]]
    logprobs: list[float]
    policy_version: list[list[int]]
    images: NotRequired[list[str]]
    routed_experts: NotRequired[RoutedExperts]


Failure = TypedDict(
    "Failure",
    {
        "class": FailureClass,
        "stage": str,
        "service": str | None,
        "http_status": int | None,
        "message": str,
        "retryable": bool,
    },
)
"""Why an attempt failed; the `failure` of a row in `*_failures.jsonl`."""

Span = tuple[str, float, float]
"""One call: its name, start and duration in seconds."""


class Trace(TypedDict, total=False):
    """The record `ng` of an output row: the data of a rollout other than its answer and its reward.

    schema_version: version of the row format. run_id: of the collection. task_id: sha256 of the input row, 16 hex
    digits.
    rollout_id: the id that every hop gets as a header. attempt: failed attempts before this one.
    status: truncated where a turn or the rollout was cut off, unscored where the reward is null.
    policy_version: every version that sampled a part of it. segments: the trainer's input.
    reward_components: parts whose sum is the reward. stop_reason: why it ended. turns: model calls.
    finish_reasons: why each model call ended, from the engine.
    tool_calls: calls of tools. tool_errors: those of them that were answered with an error.
    timings: seconds of waiting, model calls, tool calls and `/verify`, and their total.
    spans: each call of the agent's: `seed`, `model`, `tool:` and its name, or `verify`; seconds from the rollout's
    start to its start, and its duration in seconds. started_at: ISO 8601, UTC.
    """

    schema_version: int
    run_id: str
    task_id: str
    rollout_id: str
    attempt: int
    status: Status
    policy_version: list[int]
    segments: list[Segment]
    reward_components: dict[str, float]
    stop_reason: StopReason
    turns: int
    finish_reasons: list[FinishReason]
    tool_calls: int
    tool_errors: int
    timings: dict[str, float]
    spans: list[Span]
    started_at: str


class AgentRef(TypedDict):
    """The agent that runs a row. name: of its stanza. type: NeMo Gym's name of its kind."""

    name: str
    type: NotRequired[str]


class RolloutKey(NamedTuple):
    """The identity of a rollout on resume."""

    task_id: str
    task_index: int
    rollout_index: int


CUT_OFF: frozenset[str] = frozenset({"max_steps", "context", "length"})
"""Stop reasons of rollouts that a limit ended."""
CUT_TURNS: frozenset[str] = frozenset({"context", "length"})
"""Stop and finish reasons of turns that a limit ended, so that the policy did not say the end of its turn."""


def stop_reason(reported: StopReason, finish_reasons: Sequence[FinishReason]) -> StopReason:
    """The reason why a rollout ended. reported: the agent's reason; the agent may not know that its last turn was cut
    off.
    """
    last = finish_reasons[-1] if finish_reasons else None
    if reported != "max_steps" and (last == "length" or last == "context"):
        return last
    return reported


def is_cut_off(reported: str | None, finish_reasons: Iterable[str]) -> bool:
    """Whether a limit ended a rollout with this stop reason, or one of its turns."""
    return reported in CUT_OFF or any(reason in CUT_TURNS for reason in finish_reasons)


LARGEST_REWARD = 3.4e38
"""The trainer computes in float32, whose largest number is slightly larger; squares of rewards fit into a double."""


def is_reward(value: Any) -> bool:
    """Whether a value is a finite number of at most LARGEST_REWARD, or a bool."""
    return isinstance(value, int | float) and abs(value) <= LARGEST_REWARD


def row_problem(row: Json) -> str | None:
    """The reason why a stored rollout or failed attempt cannot be read: its format is newer than ours, or its reward is
    invalid.

    A stored reward is null or a number; the collector converts the bools of verifiers.
    """
    if problem := version_problem(trace_of(row)):
        return problem
    reward = row.get("reward")
    if reward is None or is_failed_attempt(row):
        return None
    if isinstance(reward, bool) or not is_reward(reward):
        return f"'reward' must be null or a number within ±{LARGEST_REWARD:g}, not {reward!r:.60}"
    return None


class RolloutCopies:
    """Finds rollouts that were read before, by their `ng.rollout_id`; a row without one is never a copy."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def problem(self, row: Json) -> str | None:
        """The reason why a row would count a rollout twice; None for the first row of each rollout."""
        name = rollout_id(row)
        if name is None:
            return None
        if name in self._ids:
            return f"the rollout {name:.100} was read before; leave out one of its copies"
        self._ids.add(name)
        return None


def version_problem(trace: Json) -> str | None:
    """The reason why a row with this `ng` record cannot be read: its format is newer than ours."""
    version = trace.get("schema_version")
    if version is None or (type(version) is int and version <= SCHEMA_VERSION):
        return None
    return f"its ng.schema_version is {version!r:.60}, and this ngym reads {SCHEMA_VERSION}; update ngym"


def is_failed_attempt(row: Json) -> bool:
    """Whether a row is a failed attempt. A rollout, which has a response, may have a field `failure` of its own."""
    return "failure" in row and "response" not in row


def agent_name(row: Json) -> str | None:
    """The name in a row's `agent_ref`, or None. Rows of other tools may have the name itself there."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else reference
    return name if isinstance(name, str) else None


def trace_of(row: Json) -> Json:
    """A row's `ng` record; empty for rows of other tools."""
    trace = row.get("ng")
    return trace if isinstance(trace, dict) else {}


def rollout_id(row: Json) -> str | None:
    """The id that the collector gave a rollout; None for rows of other tools."""
    name = trace_of(row).get("rollout_id")
    return name if isinstance(name, str) and name else None


def is_pending(row: Json) -> bool:
    """Whether the reward of a row needs the other rollouts of its task."""
    return row.get("reward") is None and row.get(REWARD_PENDING) == "group"


def task_id(row: Json) -> str:
    """The task's identity: sha256 over the row without our own indices, 16 hex digits."""
    content = {key: value for key, value in row.items() if not key.startswith("_ng_")}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def value_of(row: Json, name: str) -> str:
    """A field of a row as text, for use as the name of a subset; a misspelled field is visible in the result."""
    return str(row.get(name, f"(no {name!r})"))
