"""The row of a rollout: an agent's answer, with the token data that the model server kept for it.

To make an external agent trainable, send its model calls to `http://.../rollouts/{id}/v1`, with the id of the request
header.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import orjson
from pydantic import Field, InstanceOf, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from ngym.collect.plan import PlannedRollout
from ngym.collect.replica_outages import ReplicaOutages
from ngym.errors import BadRequest, Boundary, FailureClass, ServiceError, Unreachable, UpstreamError
from ngym.peer_answers import problem_of
from ngym.peers import Peers
from ngym.rollout import extend, function_calls, tokens_of, versions_in, without_tokens
from ngym.schema import (
    LARGEST_REWARD,
    SCHEMA_VERSION,
    TOKEN_FIELDS,
    Failure,
    FinishReason,
    Json,
    RolloutKey,
    Segment,
    Span,
    Status,
    StopReason,
    is_cut_off,
    is_failed_attempt,
    is_reward,
    stop_reason,
)
from ngym.telemetry import tracing

TIMEOUT_S = 60.0
NOT_CAPTURED = frozenset({404, 405})  # the model server does not capture, or has nothing for this rollout
TokenFormat = Literal["ng", "nemo"]
MESSAGE_CHARS = 2000
_TOKEN_DATA = frozenset(TOKEN_FIELDS)
STAGES: dict[FailureClass, str] = {
    "connect": "connect",
    "model_error": "model",
    "context_length": "model",
    "tool_error": "tool",
    "verify_error": "verify",
    "judge_error": "verify",
}


class _Doubt(NamedTuple):
    """A replica that may have served calls which are lost."""

    model: str
    url: str
    reason: str


class _Captured(NamedTuple):
    """What one replica has of a rollout: segments, and the span and finish reason of each call."""

    segments: list[Segment]
    calls: list[tuple[Span, FinishReason]]
    doubt: _Doubt | None


WAS_DOWN = "was down at {url} (if it stays down, take that address out of the config)"
STARTED_AGAIN = "at {url} started again, or dropped calls (captured_tokens), during the rollout"


class CaptureClient:
    """Fetches captured calls from the model servers. Call `begin` first, `close` at the end.

    A rollout that may have lost calls with a replica fails, and is run again.

    Args:
        models: names of the model servers. None: asks the head; if an agent's stanza names models, only those are used.
    """

    def __init__(self, peers: Peers, models: Collection[str] | None) -> None:
        self._peers = peers
        self._configured = models
        self._models: list[str] | None = list(models or ())  # None: the head has not answered yet
        self._of_agent: dict[str, list[str]] = {}
        self._fixed: dict[str, list[str]] = {}  # the addresses in the config: agents may have them from there
        self._listed = {model: set(peers.urls.get(model, ())) for model in models or ()}  # when last looked at
        self._delisted_at: dict[tuple[str, str], float] = {}  # by model and replica
        self._outages = ReplicaOutages(peers)
        self._probe_lock = asyncio.Lock()

    async def begin(self) -> None:
        """Ask the head which services are models, and which of them each agent's stanza names."""
        if self._configured is not None or self._peers.head_url is None:
            return
        self._models = None
        servers = await self._peers.fetch_servers()
        if servers is None:
            return  # `complete` asks again
        stanzas = await self._config()
        stanzas = stanzas if isinstance(stanzas, dict) else {}
        self._models = [server["name"] for server in servers if server.get("kind") == "model"]
        for model in self._models:
            self._fixed[model] = _urls_of(stanzas.get(model))
            self._listed[model] = set(self._peers.urls.get(model, ()))
        for server in servers:
            stanza = stanzas.get(server["name"])
            if server.get("kind") == "agent" and isinstance(stanza, Mapping):
                models = [model for model in self._models if model in stanza.values()]
                if models:
                    self._of_agent[server["name"]] = models

    async def complete(self, agent: str, rollout_id: str, answer: Any, began: float) -> None:
        """Add the captured token data to an answer that has no token data and no `ng.segments`.

        began: the start of the rollout, as time.perf_counter().

        Raises:
            Unreachable, UpstreamError: a model server or the head did not answer.
        """
        if not isinstance(answer, dict) or not isinstance(answer.get("ng", {}), dict) or _has_tokens(answer):
            return
        async with self._probe_lock:
            if self._models is None:
                await self.begin()
        if self._models is None:
            raise Unreachable(f"the head at {self._peers.head_url} does not say which services are models")
        models = self._models
        found: list[_Captured] = []
        dead: list[tuple[str, str]] = []
        for model in self._of_agent.get(agent, models):
            for url in self._replicas(model, began):
                if self._outages.was_dead(url, began):
                    dead.append((model, url))
                elif self._outages.was_down(url, began):
                    found.append(_Captured([], [], _Doubt(model, url, WAS_DOWN)))
                else:
                    found.append(await self._fetch_captured(model, url, rollout_id, began))
        if dead and sum(len(each.calls) for each in found) != _model_turns(answer):
            found += await self._fetch_from_dead(dead, rollout_id, began)
        segments = [segment for each in found for segment in each.segments]
        calls = sorted((call for each in found for call in each.calls), key=lambda call: call[0][1])
        if doubt := next((each.doubt for each in found if each.doubt), None):
            _check_complete(doubt, answer, len(calls))
        if segments or calls:
            trace = answer.setdefault("ng", {})
            trace["segments"] = segments
            trace["finish_reasons"] = [finish_reason for _, finish_reason in calls]
            trace.setdefault("spans", [span for span, _ in calls])

    async def close(self) -> None:
        await self._outages.close()

    def _replicas(self, model: str, began: float) -> list[str]:
        """The replicas that may have served a rollout which began then: the listed ones, those that have been delisted
        since, and those in the config.
        """
        listed = set(self._peers.urls.get(model, ()))
        for url in self._listed.get(model, set()) - listed:
            self._delisted_at[model, url] = time.perf_counter()
        self._listed[model] = listed
        delisted = [url for (name, url), at in self._delisted_at.items() if name == model and at >= began]
        return sorted({*listed, *delisted, *self._fixed.get(model, ())})

    async def _fetch_from_dead(self, dead: list[tuple[str, str]], rollout_id: str, began: float) -> list[_Captured]:
        """What replicas have of a rollout where, at the last probe, no process listened: one may have started since.

        dead: the models and URLs of the replicas.
        """
        found = []
        for model, url in dead:
            try:
                found.append(await self._fetch_captured(model, url, rollout_id, began))
            except Unreachable:
                if not self._outages.was_dead(url, began):
                    raise
        return found

    async def _fetch_captured(self, model: str, replica: str, rollout_id: str, began: float) -> _Captured:
        url = f"{replica}/rollouts/{rollout_id}/segments"
        upstream, opener = {"service": model, "url": url, "status": None}, self._peers.authorization(model)
        try:
            reply = await self._peers.send("GET", url, None, opener, TIMEOUT_S)
            elapsed = time.perf_counter() - began
            if reply.status in NOT_CAPTURED:
                return _Captured([], [], self._doubt(model, replica, problem_of(reply), began))
            if reply.status == 503:
                self._outages.record(model, replica, None)
            if reply.status != 200:
                detail = f"{model} answered {reply.status} to GET {url}"
                raise UpstreamError(detail, failure="model_error", upstream=upstream | {"status": reply.status})
            with suppress(OSError):  # the server also expires them
                await self._peers.send("DELETE", url, None, opener, TIMEOUT_S)
        except OSError as error:
            self._outages.record(model, replica, error)
            detail = f"{model} may have token data of the rollout, and cannot be reached at {url}: {error}"
            raise Unreachable(detail, upstream=upstream) from None
        with Boundary("model_error", f"{model} answered GET {url} with no segments"):
            body: Json = reply.json()
            segments: list[Segment] = body["segments"]
            spans: list[Span] = [("model", round(elapsed - ago, 6), seconds) for ago, seconds in body["spans"]]
            calls = list(zip(spans, body["finish_reasons"], strict=True))
            return _Captured(segments, calls, self._doubt(model, replica, body, began))

    def _doubt(self, model: str, replica: str, answer: Json, began: float) -> _Doubt | None:
        """The doubt about this answer for the captured calls of a rollout, if the server may have lost some."""
        since = self._peers.kept_calls.since(replica, answer)
        is_whole = since <= began and not self._outages.has_died(replica, began)
        return None if is_whole else _Doubt(model, replica, STARTED_AGAIN)

    async def _config(self) -> Any:
        url, opener = f"{self._peers.head_url}/config", self._peers.authorization(None)
        try:
            reply = await self._peers.send("GET", url, None, opener, TIMEOUT_S)
            return reply.json() if reply.status == 200 else None
        except (OSError, orjson.JSONDecodeError):
            return None


def _urls_of(stanza: Any) -> list[str]:
    """The addresses of an external service in its stanza."""
    if not isinstance(stanza, Mapping):
        return []
    return [url for url in (stanza.get("url"), *(stanza.get("urls") or ())) if isinstance(url, str)]


def _check_complete(doubt: _Doubt, answer: Json, calls: int) -> None:
    """Raise Unreachable unless this number of captured calls is that of the trajectory's model turns."""
    turns = _model_turns(answer)
    if calls != turns:
        detail = (
            f"{doubt.model} {doubt.reason.format(url=doubt.url)}, and may have had token data of the rollout: "
            f"{calls} calls are captured, and the trajectory has {turns} model turns"
        )
        raise Unreachable(detail, upstream={"service": doubt.model, "url": doubt.url, "status": None})


def _model_turns(answer: Json) -> int:
    """The number of model turns in the trajectory of an answer that is not checked yet."""
    response = answer.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    return _turns(output) if isinstance(output, list) and _items(output) else 0


def _has_tokens(answer: Json) -> bool:
    """Whether the answer carries token data, or its agent sets `ng.segments` itself."""
    response = answer.get("response")
    if "segments" in answer.get("ng", {}):
        return True
    output = response.get("output") if isinstance(response, dict) else None
    return isinstance(output, list) and any(isinstance(item, dict) and TOKEN_FIELDS[0] in item for item in output)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a planned rollout. started_at: ISO 8601, UTC. number: failed attempts before this one."""

    planned: PlannedRollout
    number: int
    run_id: str
    rollout_id: str
    started_at: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished rollout; `row` is its output row."""

    key: RolloutKey
    row: Json


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed; `row` is its row in `*_failures.jsonl`. `final`: the rollout is given up."""

    key: RolloutKey
    row: Json
    failure: Failure
    final: bool


Outcome = Rollout | FailedAttempt


def tell(span: tracing.Span, attempt: Attempt, outcome: Outcome) -> None:
    """Record the outcome of an attempt in its tracing span."""
    if not span.is_recording:
        return
    span.set("gen_ai.agent.name", attempt.planned.agent)
    span.set("ngym.run.id", attempt.run_id)
    span.set("ngym.task.index", outcome.key.task_index)
    span.set("ngym.rollout.index", outcome.key.rollout_index)
    span.set("ngym.attempt", attempt.number)
    if isinstance(outcome, FailedAttempt):
        span.fail(outcome.failure["class"], outcome.failure["message"])
        return
    span.set("ngym.status", outcome.row["ng"]["status"])
    span.set("ngym.reward", outcome.row["reward"])


def rollout_row(attempt: Attempt, answer: Any, elapsed_s: float, token_format: TokenFormat) -> Rollout:
    """The output row of an agent's answer to /run.

    External agents return no `ng`: the fields that follow from the trajectory are filled in.

    Raises:
        ServiceError: the answer is not a scored rollout; the failure class is set.
    """
    row = _check_answer(attempt, answer)
    planned, response = attempt.planned, row["response"]
    row.setdefault("responses_create_params", planned.row["responses_create_params"])
    row["_ng_task_index"] = planned.key.task_index
    row["_ng_rollout_index"] = planned.key.rollout_index
    row["agent_ref"] = planned.row["agent_ref"]
    row["ng"] = _trace(attempt, row, response, elapsed_s)
    if token_format == "ng":
        response["output"] = without_tokens(response["output"])  # the segments have them
    return Rollout(planned.key, row)


def failure_row(attempt: Attempt, failure: Failure, *, final: bool) -> FailedAttempt:
    """The failure row of an attempt."""
    trace = {"schema_version": SCHEMA_VERSION, "run_id": attempt.run_id, "task_id": attempt.planned.key.task_id}
    task = {name: value for name, value in attempt.planned.row.items() if name != "response"}  # of a stored rollout
    row = {
        **task,
        "attempt": attempt.number,
        "failure": failure,
        "ng": {**trace, "rollout_id": attempt.rollout_id, "started_at": attempt.started_at},
    }
    return FailedAttempt(attempt.planned.key, row, failure, final)


def failure_of(error: ServiceError, agent: str) -> Failure:
    """The failure record of an error of the agent's /run."""
    upstream = error.upstream or {}
    status = upstream.get("status") or (error.status if isinstance(error, UpstreamError) else None)
    kind: FailureClass = error.failure or ("config" if error.status in (404, BadRequest.status) else "agent_error")
    return {
        "class": kind,
        "stage": STAGES.get(kind, "run"),
        "service": upstream.get("service") or agent,
        "http_status": status,
        "message": error.detail[:MESSAGE_CHARS],
        "retryable": error.retryable,
    }


def _check_answer(attempt: Attempt, answer: Any) -> Json:
    """The answer, after checking the types of its fields."""
    agent = attempt.planned.agent
    if not isinstance(answer, dict):
        raise ServiceError(f"{agent} answered /run with {type(answer).__name__}, not an object", failure="agent_error")
    if "_ng_failure_class" in answer or "_ng_no_persist" in answer:
        raise _declared_failure(agent, answer)
    response = answer.get("response")
    if not isinstance(response, dict) or not _items(response.setdefault("output", [])):
        raise ServiceError(
            f"{agent} answered /run without a response whose output is a list of items", failure="agent_error"
        )
    if not isinstance(response.get("usage") or {}, dict):
        raise ServiceError(f"{agent} answered /run with a usage that is not an object", failure="agent_error")
    if "reward" not in answer:
        raise ServiceError(
            f"{agent} answered /run without a reward (null would mean: cannot be scored)", failure="verify_error"
        )
    reward = answer["reward"]
    if reward is not None and not is_reward(reward):
        raise ServiceError(
            f"{agent} answered /run with the reward {reward!r:.60}; it must be null or a number within "
            f"±{LARGEST_REWARD:g}",
            failure="verify_error",
        )
    answer["reward"] = None if reward is None else float(reward)
    trace = answer.get("ng") or {}
    if not isinstance(trace, dict):
        raise ServiceError(f"{agent} answered /run with an `ng` that is not an object", failure="agent_error")
    answer["ng"] = trace = {name: value for name, value in trace.items() if value is not None}
    if problem := _shape_problem(_ANSWER, answer):
        kind: FailureClass = "verify_error" if "reward_components" in problem.partition(" = ")[0] else "agent_error"
        raise ServiceError(f"{agent} answered /run with {problem}", failure=kind)
    return answer


def stored_row_problem(row: Json) -> str | None:
    """The reason why a row is not one of those that the collector writes, or None."""
    return _shape_problem(_FAILURE_ROW if is_failed_attempt(row) else _ROW, row)


def _shape_problem(shape: TypeAdapter[Any], value: Json) -> str | None:
    try:
        shape.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where} = {first['input']!r:.60}: {first['msg']}"
    return None


_Count = Annotated[int, Field(ge=0, le=2**53)]
_Seconds = Annotated[float, Field(ge=0, le=2**53)]
_Number = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
_Components = dict[str, _Number | None]


class _ReportedSegment(TypedDict):
    """The trainer checks the values of `token_ids` and `logprobs`."""

    token_ids: InstanceOf[list[Any]]
    mask: list[list[int]]
    logprobs: InstanceOf[list[Any]]
    policy_version: list[Annotated[list[int], Field(min_length=3, max_length=3)]]


class _Reported(TypedDict, total=False):
    """The fields of an agent's `ng` that are read here."""

    status: str
    policy_version: list[int]
    segments: list[_ReportedSegment]
    reward_components: _Components
    stop_reason: str
    turns: _Count
    finish_reasons: list[str]
    tool_calls: _Count
    tool_errors: _Count
    timings: dict[str, _Seconds]
    spans: list[Any]


class _Answer(TypedDict, total=False):
    ng: _Reported
    reward_components: _Components | None


class _StoredTrace(TypedDict):
    task_id: str
    status: str
    stop_reason: str
    turns: _Count
    tool_calls: _Count
    tool_errors: _Count | None
    timings: dict[str, _Seconds]
    reward_components: NotRequired[_Components | None]


class _TaskTrace(TypedDict):
    task_id: str


class _StoredResponse(TypedDict, total=False):
    usage: dict[str, Any] | None


class _Agent(TypedDict):
    name: str


class _Row(TypedDict):
    agent_ref: _Agent
    ng: _StoredTrace
    response: _StoredResponse
    reward_components: NotRequired[_Components | None]


_FailureClass = TypedDict("_FailureClass", {"class": str})


class _FailureRow(TypedDict):
    agent_ref: _Agent
    ng: _TaskTrace
    attempt: _Count
    failure: _FailureClass


_ANSWER, _ROW, _FAILURE_ROW = TypeAdapter(_Answer), TypeAdapter(_Row), TypeAdapter(_FailureRow)


def _items(output: Any) -> bool:
    return isinstance(output, list) and all(isinstance(item, dict) for item in output)


def _declared_failure(agent: str, answer: Json) -> ServiceError:
    """The error of a failure that a NeMo Gym agent reports with status 200."""
    name = str(answer.get("_ng_failure_class") or "killed")
    kinds: dict[str, FailureClass] = {
        "judge": "judge_error",
        "timeout": "timeout",
        "kill": "cancelled",
        "verif": "verify_error",
    }
    failure: FailureClass = next((kind for part, kind in kinds.items() if part in name), "agent_error")
    details = [
        f"{key.removeprefix('_ng_failure_')}: {value}"
        for key, value in answer.items()
        if key.startswith("_ng_failure_")
    ]
    detail = "; ".join(text for text in details if not text.startswith(("class:", "terminal:"))) or "no reason given"
    terminal = bool(answer.get("_ng_failure_terminal"))
    return ServiceError(f"{agent} reported {name}: {detail}", failure=failure, retryable=not terminal)


def _trace(attempt: Attempt, row: Json, response: Json, elapsed_s: float) -> Json:
    """The agent's `ng` with all missing fields."""
    trace: Json = row["ng"]
    segments = trace.get("segments") or _segments(response["output"])
    finish_reasons = trace.get("finish_reasons") or []
    stop: StopReason = trace.get("stop_reason") or ("length" if response.get("status") == "incomplete" else "answer")
    stop = stop_reason(stop, finish_reasons)
    status: Status = trace.get("status") or ("truncated" if is_cut_off(stop, finish_reasons) else "ok")
    timings = trace.get("timings") or {}
    total_s = timings.get("total_s")
    output = response["output"]
    return {
        **trace,
        "schema_version": SCHEMA_VERSION,
        "run_id": attempt.run_id,
        "task_id": attempt.planned.key.task_id,
        "rollout_id": attempt.rollout_id,
        "attempt": attempt.number,
        "status": "unscored" if row["reward"] is None else status,
        "policy_version": trace.get("policy_version") or versions_in(segments),
        "segments": segments,
        "reward_components": trace.get("reward_components") or row.get("reward_components") or {},
        "stop_reason": stop,
        "turns": trace["turns"] if "turns" in trace else _turns(output),
        "finish_reasons": finish_reasons,
        "tool_calls": trace["tool_calls"] if "tool_calls" in trace else len(list(function_calls(output))),
        "tool_errors": trace.get("tool_errors"),
        # time outside the agent's work on the rollout: its queue, the network, the collector
        "timings": {
            "total_s": round(elapsed_s, 4),
            **timings,
            "queue_s": round(max(0.0, elapsed_s - (total_s or elapsed_s)), 4),
        },
        "started_at": attempt.started_at,
    }


def _segments(output: Iterable[Json]) -> list[Segment]:
    """The segments of a trajectory whose items still carry NeMo Gym's token fields."""
    segments: list[Segment] = []
    for item in output:
        if _TOKEN_DATA.isdisjoint(item):
            continue
        try:
            call = tokens_of({"output": [item]})
        except (ValueError, TypeError) as error:
            raise ServiceError(f"the trajectory's token data is wrong: {error}", failure="agent_error") from None
        if call is not None:
            extend(segments, call)
    return segments


def _turns(output: Iterable[Json]) -> int:
    """Model calls that left something in the trajectory: unbroken stretches of items between tool outputs."""
    turns, inside = 0, False
    for item in output:
        from_model = item.get("type") != "function_call_output" and item.get("role", "assistant") == "assistant"
        turns += from_model and not inside
        inside = from_model
    return turns
