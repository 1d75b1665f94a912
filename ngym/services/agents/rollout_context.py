"""One rollout of an agent: its calls of the model and of tools, and the loop over both."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple, TypeGuard, cast, get_args
from urllib.parse import quote

import orjson

from ngym.convert import finish_reason, message_item, new_response, output_text, overflow_response, unfinished
from ngym.errors import Boundary, PeerTimeout, ServiceError, Unreachable, UpstreamError
from ngym.net.json_limits import LONG_NUMBER, MAX_DEPTH, by_size, is_deep, serialize
from ngym.net.load_balancer import SessionReplica
from ngym.peer_answers import SHOWN_BYTES, problem_of
from ngym.rollout import add_usage, extend, tokens_of, versions_in, with_latest_tokens
from ngym.schema import (
    PARTS,
    RESERVED,
    ROUTED_EXPERTS,
    SCHEMA_VERSION,
    TOOL_OUTPUT_HEADER,
    FinishReason,
    Json,
    Segment,
    Span,
    StopReason,
    Trace,
    is_cut_off,
    stop_reason,
)
from ngym.services.base.options import ServiceContext, check_result, most_result_bytes

log = logging.getLogger("ngym.services")
HEALTH_TIMEOUT_S = 5.0
MAX_TOOL_ERROR_CHARS = 2000
CALLS_AT_ONCE = 64  # of one rollout: a response may ask for thousands
STOP_REASONS = get_args(StopReason)


class RolloutContext:
    """Samples from the model and calls tools on behalf of one rollout, and records both.

    state: what the agent's lifespan yielded.
    request_bytes: size of the request that the rollout began with.
    """

    def __init__(
        self, context: ServiceContext, rollout_id: str, beginning: str, state: Any = None, request_bytes: int = 0
    ) -> None:
        self.options = context.options
        self.state = state
        self.row: Json = {}
        self.scored: Json | None = None  # by the environment's steps; then /verify is not called
        self.stateless = False  # the gym server has no session for it
        self.missing_tools: list[str] = []  # that the row declares and the gym server says it does not have
        self.doing = "seed"  # what it waits for: seed, model, tool:NAME or verify
        self.so_far: list[Json] = []  # the items that it sampled and got from tools
        self.request_bytes = request_bytes
        self.peers = context.peers
        self.rollout_id = rollout_id
        self.gym = context.peers[self.options.gym].session(tool_errors=self.options.tool_errors)
        self.model = context.peers[self.options.model].conversation(beginning)
        self.tools: list[Json] = []
        self.segments: list[Segment] = []
        self.turns = 0
        self.finish_reasons: list[FinishReason] = []
        self.tool_calls = 0
        self.tool_errors = 0
        self.stop_reason: StopReason = "answer"
        # An error of the environment: the rollout failed, whatever the agent does with it.
        self.failure: ServiceError | None = None
        self.seconds = {"model_s": 0.0, "tools_s": 0.0, "verify_s": 0.0}
        self.spans: list[Span] = []
        self.started_at = datetime.now(UTC)
        self._started = time.perf_counter()
        self._usage: Json | None = None
        self._captured_at: str | None = None
        self._captured_since = 0.0
        self._tool_results: list[tuple[Json, Json]] = []
        self._result_bytes = 0
        self._has_left_out = False
        self._declared: set[str] = set()
        self._calling = asyncio.Semaphore(CALLS_AT_ONCE)

    @property
    def model_base_url(self) -> str:
        """The base_url for any SDK's client: what it samples there becomes this rollout's segments.

        The URL ends in /v1, as OpenAI's clients expect. Anthropic's clients add that: use `.removesuffix("/v1")`.
        """
        if self._captured_at is None:
            self._captured_at = f"{self.model.url}/rollouts/{self.rollout_id}"
            self._captured_since = time.perf_counter()
        return f"{self._captured_at}/v1"

    @property
    def model_api_key(self) -> str:
        """The api_key for an SDK's client, next to `model_base_url`."""
        return self.peers.token(self.model.peer.name) or "unused"

    def took(self, name: str, started: float, part: str | None = None) -> None:
        """Add the seconds since `started` (time.perf_counter()) to a part of the timings."""
        seconds = time.perf_counter() - started
        self.spans.append((name, _microseconds(started - self._started), _microseconds(seconds)))
        if part is not None:
            self.seconds[part] += seconds

    def declare(self, tools: list[Json] | None) -> None:
        """Allow `call_tool` to call these tools; a row may not declare the gym server's other routes as tools."""
        names = {tool["name"] for tool in tools or [] if tool.get("type") == "function" and "name" in tool}
        self._declared |= names - RESERVED

    def require_tools(self) -> None:
        """
        Raises:
            ServiceError: the row declares a tool that the gym server does not have, so every call of it would fail.
        """
        if self.missing_tools:
            self.failure = self._missing_tool(self.missing_tools[0])
            raise self.failure

    def _missing_tool(self, name: str) -> ServiceError:
        gym = self.options.gym
        detail = (
            f"{gym} has no tool {name!r:.80}, which the row declares in responses_create_params.tools; leave it out of "
            "the row, or name the gym server that has it as `gym` of the agent (agents/simple can also end rollouts at "
            "a call: execute_tools: false)"
        )
        upstream = {"service": gym, "url": None, "status": None}
        return ServiceError(detail, status=422, failure="config", upstream=upstream)

    async def sample(self, request: Json) -> Json:
        """One model call: returns its Response and records token data, usage and time."""
        started = time.perf_counter()
        self.doing = "model"
        if self.turns == 0:
            self.declare(request.get("tools"))
        with Boundary("model_error", "the model call failed"):
            response = self._check_answer(await self._call_model(request))
            try:
                call = tokens_of(response)
            except ValueError as error:
                raise self._unusable(f"with wrong token data: {error}") from None
        if call is not None:
            extend(self.segments, call)
            if call.experts is not None:  # the segments have them
                response["ng"] = {name: value for name, value in response["ng"].items() if name != ROUTED_EXPERTS}
        self.turns += 1
        self.so_far += response["output"]
        self.finish_reasons.append(finish_reason(response))
        self._usage = response.get("usage") if self.turns == 1 else add_usage(self._usage, response.get("usage"))
        self.took("model", started, "model_s")
        return response

    async def _call_model(self, request: Json) -> Any:
        timeout_s = self.options.model_timeout_s
        try:
            raw = await by_size(self.request_bytes, serialize, request)
            return await self.model.post("/v1/responses", raw, timeout=timeout_s, idempotent=True)
        except ServiceError as error:
            if error.failure != "context_length":
                raise
            # Third-party endpoints refuse a request that does not fit; our model servers return an empty answer.
            return overflow_response({}, response_id=f"resp_{secrets.token_hex(12)}", model=self.options.model)

    def _check_answer(self, answer: Any) -> Json:
        """The answer, checked to be a usable Response."""
        items = answer.get("output") if isinstance(answer, dict) else None
        if isinstance(items, list) and all(isinstance(item, dict) for item in items):
            if not isinstance(answer.get("usage"), dict | None):
                raise self._unusable(f"with a usage that is not an object: {answer['usage']!r:.60}")
            if (problem := unfinished(answer)) is None:
                return cast(Json, answer)
            raise self._unusable(f"with {problem}", retryable=True)
        excerpt = orjson.dumps(answer)[:SHOWN_BYTES].decode("utf-8", "replace")
        raise self._unusable(f"without an output that is a list of items: {excerpt}")

    def _unusable(self, how: str, *, retryable: bool = False) -> ServiceError:
        name = self.model.peer.name
        upstream = {"service": name, "url": None, "status": None}
        return ServiceError(f"{name} answered /v1/responses {how}", upstream=upstream, retryable=retryable)

    async def call_tool(self, call: Json) -> Json:
        """One function_call item -> its function_call_output item. The model's own mistakes become a text that it
        reads.

        Raises:
            ServiceError: the environment failed, and with it the rollout.
        """
        started = time.perf_counter()
        self.doing = f"tool:{call['name']}" if self._is_declared(call) else "tool"
        self.tool_calls += 1
        if self.tool_calls > self.options.max_tool_calls:
            result: str | list[Json] = f"Error: no more than {self.options.max_tool_calls} tool calls in a rollout."
            failed = True
        else:
            async with self._calling:
                result, failed = await self._tool_result(call)
        self.tool_errors += failed
        self.took(f"tool:{call['name']}" if self._is_declared(call) else "tool", started, "tools_s")
        self.doing = "model"
        output = {"type": "function_call_output", "call_id": call.get("call_id"), "output": result}
        self._tool_results.append((call, output))
        self.so_far.append(output)
        return output

    def _is_declared(self, call: Json) -> bool:
        name = call.get("name")
        return isinstance(name, str) and name in self._declared

    async def _tool_result(self, call: Json) -> tuple[str | list[Json], bool]:
        """What the model sees of a call, and whether it is an error."""
        name = call.get("name")
        if not self._is_declared(call):  # checked before a name that the model wrote becomes a path
            return f"Error: there is no tool {name!r}. Tools: {', '.join(sorted(self._declared)) or 'none'}.", True
        text = call.get("arguments") or "{}"
        try:
            arguments = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return f"Error: the arguments of {name} are not JSON: {error}", True
        raw = text.encode()
        if is_deep(raw, arguments):
            return f"Error: the arguments of {name} are nested deeper than {MAX_DEPTH} levels.", True
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} must be a JSON object, not {type(arguments).__name__}.", True
        try:
            body = raw if LONG_NUMBER.search(raw) else arguments  # with all digits
            reply = await self.gym.request(f"/{quote(str(name), safe='')}", body, timeout=self.options.tool_timeout_s)
            check_result(str(name), len(reply.body), self.options)
            has_parts = reply.headers.get(TOOL_OUTPUT_HEADER) == PARTS
            result = _parts_in(reply.body, str(name)) if has_parts else reply.body.decode("utf-8", "replace")
        except ServiceError as error:
            if error.is_for_the_model:
                return f"Error: {error.detail}"[:MAX_TOOL_ERROR_CHARS], True
            self.failure = self.failure or self._environment_failure(error, str(name))
            raise self.failure from error.__cause__
        size, most = len(orjson.dumps(result)), most_result_bytes(self.options)
        if self._result_bytes + size > most:
            limit = f"limited to {most >> 20} MiB"
            if not self._has_left_out:
                self._has_left_out = True
                log.warning(
                    "rollout %s: the results of its tool calls are %s; the model reads that %s's is left out "
                    "(max_body_mib of the agent and of the model raises the limit)",
                    self.rollout_id,
                    limit,
                    name,
                )
            return f"Error: the results of this rollout's tool calls are {limit}; this one is left out.", True
        self._result_bytes += size
        return result, False

    def _environment_failure(self, error: ServiceError, tool: str) -> ServiceError:
        """The error of a tool call that is not for the model, as the rollout's failure."""
        if _is_missing_route(error):
            return self._missing_tool(tool)
        if error.failure in (None, "timeout"):
            error.failure = "tool_error"
        if isinstance(error, UpstreamError) and self.gym.is_showable(error):
            error.detail += " (if that is how it answers to a model's mistake: tool_errors: show in the agent's stanza)"
        return error

    def answer(self, text: str, stop_reason: StopReason = "answer") -> Json:
        """The last response of a rollout that an SDK drove: the calls made through `call_tool`, and its final text."""
        stem = secrets.token_hex(12)
        output: list[Json] = []
        for index, (call, result) in enumerate(self._tool_results):
            ids = {"id": f"fc_{stem}_{index}", "call_id": call.get("call_id") or f"call_{stem}_{index}"}
            fields = {"name": call["name"], "arguments": call["arguments"], "status": "completed"}
            output += [{"type": "function_call", **ids, **fields}, {**result, "call_id": ids["call_id"]}]
        output.append(message_item([output_text(text)], f"msg_{stem}"))
        response = new_response({}, output, response_id=f"resp_{stem}", model=self.options.model)
        return self.finish(response, output, stop_reason)

    async def check_replica(self) -> None:
        """Record whether the replica of `model_base_url` is up, after the agent has failed: only the agent calls it, and
        later rollouts shall go to another one.

        Raises:
            Unreachable: it is not.
        """
        if self._captured_at is None:
            return
        with suppress(UpstreamError, PeerTimeout):  # a server of another make may have no /health
            await self.model.request("/health", None, method="GET", timeout=HEALTH_TIMEOUT_S, idempotent=True)
        if not self._captured_at.startswith(f"{self.model.url}/"):
            raise self._unreachable("cannot be reached at {url}, where the agent called it")

    async def with_captured(self, response: Json) -> Json:
        """The last response, after the calls sampled under `model_base_url` are added to the record.

        A model that returns no token data has no captured calls.

        Raises:
            Unreachable: calls may be lost, so the rollout has to run again.
        """
        if self._captured_at is None:
            return response
        path, model = f"/rollouts/{self.rollout_id}/segments", self.model.peer
        replica = SessionReplica(self.rollout_id, self._captured_at.rpartition("/rollouts/")[0])
        with Boundary("model_error", "the captured calls could not be fetched"):
            reply = await model.request("GET", path, None, idempotent=True, affinity=replica, accepts=[404])
            captured: Json = problem_of(reply) if reply.status == 404 else reply.json()
            if not self._captured_at.startswith(f"{replica.url}/"):
                raise self._unreachable("is no longer served at {url}, which has the captured calls")
            if self.peers.kept_calls.since(str(replica.url), captured) > self._captured_since:
                raise self._unreachable(
                    "at {url} started again, or dropped calls (captured_tokens), during the rollout"
                )
            if reply.status == 404:
                return response
            with suppress(ServiceError):  # the server also expires them
                await model.request("DELETE", path, None, idempotent=True, affinity=replica)
        elapsed = time.perf_counter() - self._started
        for ago, seconds in captured["spans"]:
            self.spans.append(("model", round(elapsed - ago, 6), seconds))
            self.seconds["model_s"] += seconds
        self.spans.sort(key=itemgetter(1))
        self.segments += captured["segments"]
        self._usage = captured["usage"] if self.turns == 0 else add_usage(self._usage, captured["usage"])
        self.turns += captured["calls"]
        self.finish_reasons += captured["finish_reasons"]
        return {**response, "usage": self._usage}

    def _unreachable(self, what: str) -> Unreachable:
        """The error of the replica where the agent called the model. what: the text, with a place for its URL."""
        name, url = self.model.peer.name, str(self._captured_at).rpartition("/rollouts/")[0]
        return Unreachable(f"{name} {what.format(url=url)}", upstream={"service": name, "url": url, "status": None})

    def finish(self, response: Json, output: list[Json], stop_reason: StopReason) -> Json:
        """The last response with the whole trajectory as its output and the usage of all turns.

        Raises:
            ValueError: an unknown stop reason.
        """
        if stop_reason not in STOP_REASONS:
            raise ValueError(f"the stop reason {stop_reason!r} is not one of {', '.join(STOP_REASONS)}")
        self.stop_reason = stop_reason
        return {**response, "output": output, "usage": self._usage}

    def progress(self) -> Json:
        """A line of GET /running: which rollout it is, and how far."""
        row = self.row
        return {
            "rollout_id": self.rollout_id,
            "task": row.get("_ng_task_index"),
            "rollout": row.get("_ng_rollout_index"),
            "doing": self.doing,
            "seconds": round(time.perf_counter() - self._started, 3),
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
        }

    def trace(self, reward: float | None, components: dict[str, float] | None) -> Trace:
        """The `ng` record of the row (reference/rows.md)."""
        seconds = {name: _microseconds(value) for name, value in self.seconds.items()}
        stopped = stop_reason(self.stop_reason, self.finish_reasons)
        truncated = is_cut_off(stopped, self.finish_reasons)
        return Trace(
            schema_version=SCHEMA_VERSION,
            rollout_id=self.rollout_id,
            status="unscored" if reward is None else "truncated" if truncated else "ok",
            policy_version=versions_in(self.segments),
            segments=self.segments,
            reward_components=components or {},
            stop_reason=stopped,
            turns=self.turns,
            finish_reasons=self.finish_reasons,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            timings={**seconds, "total_s": _microseconds(time.perf_counter() - self._started)},
            spans=self.spans,
            started_at=self.started_at.isoformat(),
        )


def _parts_in(body: bytes, tool: str) -> list[Json]:
    """The parts of a tool's answer.

    Raises:
        ServiceError: it is not a list of texts and images.
    """
    with suppress(orjson.JSONDecodeError):
        if is_content(parts := orjson.loads(body)):
            return parts
    raise ServiceError(
        f"{tool} answered with {TOOL_OUTPUT_HEADER}: {PARTS}, but not with a list of input_text and input_image parts"
    )


def is_content(value: Any) -> TypeGuard[list[Json]]:
    """Whether a value is a list of texts and images, as in the Responses API."""
    return isinstance(value, list) and bool(value) and all(map(_is_part, value))


def _is_part(value: Any) -> bool:
    match value:
        case {"type": "input_text", "text": str()} | {"type": "input_image", "image_url": str()}:
            return True
    return False


def _is_missing_route(error: ServiceError) -> bool:
    """Whether this is the answer of FastAPI and Starlette to a path without a route, not a 404 of a tool's own."""
    is_404 = isinstance(error, UpstreamError) and (error.upstream or {}).get("status") == 404
    return is_404 and not error.retryable and error.detail.endswith("Not Found")


def _microseconds(seconds: float) -> float:
    """The seconds to 6 digits; `round` takes four times as long."""
    return int(seconds * 1e6) / 1e6


class ModelTurn(NamedTuple):
    """The model's last response and the turn's stop reason; any reason but "answer" ends the rollout."""

    response: Json
    stop_reason: StopReason


async def act(
    request: Json, rollout: RolloutContext, output: list[Json], *, max_steps: int, execute_tools: bool = True
) -> ModelTurn:
    """Run one turn and add the items of the model and the tools to `output`, in order.

    Args:
        request: create params; its input comes before `output`.
        max_steps: model calls of the whole rollout.
        execute_tools: if false, a response that calls tools ends the turn as an answer.

    Raises:
        ServiceError: a call failed, or the gym server does not have a tool of the row.
    """
    if execute_tools:
        rollout.require_tools()
    prompt = as_items(request.get("input"))
    parallel = request.get("parallel_tool_calls") is not False
    while True:
        response = await rollout.sample({**request, "input": prompt + with_latest_tokens(output)})
        output += response["output"]
        stopped = turn_stop_reason(response)
        if stopped != "answer":  # its calls, whole or not, are not run
            return ModelTurn(response, stopped)
        calls = [item for item in response["output"] if item.get("type") == "function_call"]
        if not calls or not execute_tools:
            return ModelTurn(response, "answer")
        if rollout.turns >= max_steps:
            return ModelTurn(response, "max_steps")
        if parallel and len(calls) > 1:
            output += await asyncio.gather(*(rollout.call_tool(call) for call in calls))
        else:
            output += [await rollout.call_tool(call) for call in calls]


def turn_stop_reason(response: Json) -> StopReason:
    """The stop reason of a response: an answer, or a cut-off turn that ends the rollout."""
    if response.get("status") != "incomplete":
        return "answer"
    return "context" if finish_reason(response) == "context" else "length"


def as_items(prompt: Any) -> list[Json]:
    """A request's `input` as items."""
    return [user(prompt)] if isinstance(prompt, str) else list(prompt or [])


def user(content: str | list[Json]) -> Json:
    """A user message."""
    return {"role": "user", "content": content}
