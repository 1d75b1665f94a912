"""agent(): a way of driving a model through a task, as an application; `/run` is one whole rollout."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, cast

import orjson
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from ngym import correlation
from ngym.convert import message_item, new_response, output_text
from ngym.errors import BadRequest, PeerTimeout, ServiceError, boundary
from ngym.groups import ROUTE, TIMEOUT_S
from ngym.schema import SCHEMA_VERSION, TOKEN_FORMAT_HEADER, WAITING_HEADER, Json, Segment, StopReason, Trace
from ngym.segments import extend, tokens_of, versions_in, without_tokens
from ngym.services.app import JsonResponse, add_route, context_of, json_body, service_app
from ngym.services.edge import BULK_BYTES, ROW_BYTES
from ngym.services.options import ServiceContext, ServiceName, ServiceOptions
from ngym.services.traced import invoke_agent
from ngym.services.turns import Turns
from ngym.usage import added

MAX_TOOL_ERROR_CHARS = 2000
CALLS_AT_ONCE = 64  # of one rollout: a response may ask for thousands
BEGINNING_CHARS = 1000
METRICS_S = 120.0
ABANDON_S = 10.0
CLOCKS_S = 0.01  # a timer of the event loop's may come so much too early
_ANY: Json = {"type": "object"}


class AgentOptions(ServiceOptions):
    """Which gym server scores, and which model acts."""

    gym: ServiceName
    model: ServiceName
    model_timeout_s: float = 600
    tool_timeout_s: float = 120
    verify_timeout_s: float = 120
    max_tool_calls: int = Field(default=1000, ge=1, description="In one rollout; the model is told of those beyond.")


class RolloutContext:
    """One rollout as its agent sees it: sample from the model, call tools; what happens is recorded on the way.

    state: what the agent's lifespan yielded.
    """

    def __init__(self, context: ServiceContext, rollout_id: str, beginning: str, state: Any = None) -> None:
        self.options = context.options
        self.state = state
        self.row: Json = {}
        self.peers = context.peers
        self.rollout_id = rollout_id
        self.gym = context.peers[self.options.gym].session()
        self.model = context.peers[self.options.model].conversation(beginning)
        self.tools: list[Json] = []
        self.segments: list[Segment] = []
        self.turns = 0
        self.tool_calls = 0
        self.tool_errors = 0
        self.stop_reason: StopReason = "answer"
        self.seconds = {"model_s": 0.0, "tools_s": 0.0, "verify_s": 0.0}
        self.started_at = datetime.now(UTC)
        self._started = time.perf_counter()
        self._usage: Json | None = None
        self._captured_at: str | None = None
        self._called: list[tuple[Json, Json]] = []
        self._declared: set[str] = set()
        self._calling = asyncio.Semaphore(CALLS_AT_ONCE)

    @property
    def model_base_url(self) -> str:
        """What any SDK's client takes as its base_url: what it samples under it becomes this rollout's segments.

        It ends in /v1, as OpenAI's clients want it; Anthropic's put that on themselves: `.removesuffix("/v1")`.
        """
        if self._captured_at is None:
            self._captured_at = f"{self.model.url}/rollouts/{self.rollout_id}"
        return f"{self._captured_at}/v1"

    @property
    def model_api_key(self) -> str:
        """What an SDK's client takes as its api_key beside `model_base_url`."""
        return self.peers.token(self.model.peer.name) or "unused"

    def declare(self, tools: list[Json] | None) -> None:
        """Let `call_tool` call these."""
        self._declared |= {tool["name"] for tool in tools or [] if tool.get("type") == "function" and "name" in tool}

    async def sample(self, request: Json) -> Json:
        """One model call -> its Response. Token data, usage and time are recorded."""
        started = time.perf_counter()
        if self.turns == 0:
            self.declare(request.get("tools"))
        with boundary("model_error", "the model call failed"):
            reply = await self.model.request(
                "/v1/responses", request, timeout=self.options.model_timeout_s, idempotent=True
            )
            response: Json = reply.json()
            call = tokens_of(response)
        if call is not None:
            extend(self.segments, call)
        self.turns += 1
        self._usage = response.get("usage") if self.turns == 1 else added(self._usage, response.get("usage"))
        self.seconds["model_s"] += time.perf_counter() - started
        return response

    async def call_tool(self, call: Json) -> Json:
        """One function_call item -> its function_call_output item. What goes wrong becomes a text that the model sees."""
        started = time.perf_counter()
        self.tool_calls += 1
        if self.tool_calls > self.options.max_tool_calls:
            text, failed = f"Error: no more than {self.options.max_tool_calls} tool calls in a rollout.", True
        else:
            async with self._calling:
                text, failed = await self._tool_text(call)
        self.tool_errors += failed
        self.seconds["tools_s"] += time.perf_counter() - started
        output = {"type": "function_call_output", "call_id": call.get("call_id"), "output": text}
        self._called.append((call, output))
        return output

    async def _tool_text(self, call: Json) -> tuple[str, bool]:
        name = call.get("name")
        if name not in self._declared:  # checked before a name that the model wrote becomes a path
            return f"Error: there is no tool {name!r}. Tools: {', '.join(sorted(self._declared)) or 'none'}.", True
        try:
            arguments = orjson.loads(call.get("arguments") or "{}")
        except orjson.JSONDecodeError as error:
            return f"Error: the arguments of {name} are no JSON: {error}", True
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} must be a JSON object, not {type(arguments).__name__}.", True
        try:
            reply = await self.gym.request(f"/{name}", arguments, timeout=self.options.tool_timeout_s)
        except ServiceError as error:
            if not error.is_for_the_model:
                raise
            return f"Error: {error.detail}"[:MAX_TOOL_ERROR_CHARS], True
        return reply.body.decode("utf-8", "replace"), False

    def answer(self, text: str, stop_reason: StopReason = "answer") -> Json:
        """The last response of a rollout that an SDK drove: the calls that went through `call_tool`, and its final text."""
        stem = secrets.token_hex(12)
        output: list[Json] = []
        for index, (call, result) in enumerate(self._called):
            ids = {"id": f"fc_{stem}_{index}", "call_id": call.get("call_id") or f"call_{stem}_{index}"}
            said = {"name": call["name"], "arguments": call["arguments"], "status": "completed"}
            output += [{"type": "function_call", **ids, **said}, {**result, "call_id": ids["call_id"]}]
        output.append(message_item([output_text(text)], f"msg_{stem}"))
        response = new_response({}, output, response_id=f"resp_{stem}", model=self.options.model)
        return self.finish(response, output, stop_reason)

    async def with_captured(self, response: Json) -> Json:
        """The last response, once what was sampled under `model_base_url` is among what was recorded.

        A model that gives no token data has nothing captured.
        """
        if self._captured_at is None:
            return response
        path = f"/rollouts/{self.rollout_id}/segments"
        with boundary("model_error", "the captured calls could not be fetched"):
            try:
                kept = (await self.model.request(path, None, method="GET", idempotent=True)).json()
            except ServiceError as error:
                lost = not self._captured_at.startswith(self.model.url)  # with the replica that had them
                if error.status != 404 or lost:
                    raise
                return response
            await self.model.request(path, None, method="DELETE", idempotent=True)
        self.segments += kept["segments"]
        self._usage = kept["usage"] if self.turns == 0 else added(self._usage, kept["usage"])
        self.turns += kept["calls"]
        return {**response, "usage": self._usage}

    def finish(self, response: Json, output: list[Json], stop_reason: StopReason) -> Json:
        """The last response with the whole trajectory as its output and the usage of all turns."""
        self.stop_reason = stop_reason
        return {**response, "output": output, "usage": self._usage}

    def trace(self, reward: float | None, components: dict[str, float] | None) -> Trace:
        """The `ng` record of the row (wire.md, section 3)."""
        seconds = {name: round(value, 6) for name, value in self.seconds.items()}
        truncated = self.stop_reason in ("max_steps", "context", "length")
        return Trace(
            schema_version=SCHEMA_VERSION,
            rollout_id=self.rollout_id,
            status="unscored" if reward is None else "truncated" if truncated else "ok",
            policy_version=versions_in(self.segments),
            segments=self.segments,
            reward_components=components or {},
            stop_reason=self.stop_reason,
            turns=self.turns,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            timings={**seconds, "total_s": round(time.perf_counter() - self._started, 6)},
            started_at=self.started_at.isoformat(),
        )


Respond = Callable[[Json, RolloutContext], Awaitable[Json]]
AgentLifespan = Callable[[ServiceContext], AbstractAsyncContextManager[Any]]


def agent(
    *, respond: Respond, options: type[AgentOptions] = AgentOptions, lifespan: AgentLifespan | None = None
) -> FastAPI:
    """An agent as an application.

    Args:
        respond: `(request, rollout)` -> a Response whose output is the whole trajectory. `request` is a Responses
            create params object; `rollout.sample`, `rollout.call_tool` and `rollout.finish` do the work.
        options: the record of the stanza's own keys; derives from AgentOptions.
        lifespan: `async with lifespan(context) as state` around serving; rollouts find what it yields in `rollout.state`.
    """

    @asynccontextmanager
    async def running(context: ServiceContext) -> AsyncIterator[None]:
        if lifespan is None:
            yield
            return
        async with lifespan(context) as state:
            app.state.agent_state = state
            yield

    app = service_app("agent", options=options, lifespan=running)
    app.state.agent_state = None
    turns = Turns()
    abandoned: set[asyncio.Task[None]] = set()  # asyncio itself keeps no task alive

    async def run(request: Request) -> Response:
        await _turn(turns)
        row = await json_body(request)
        rollout = _rollout(request, _checked(row.get("responses_create_params"), "responses_create_params."))
        rollout.row = row
        try:
            seeded = await _seed(rollout, row)
            response = await _respond(respond, rollout, _params(row, seeded))
            shown = {**response, "output": without_tokens(response["output"])}
            scored = await _verify(rollout, {**row, "response": shown})
        except BaseException:
            ending = asyncio.create_task(_end_session(rollout))
            abandoned.add(ending)
            ending.add_done_callback(abandoned.discard)
            raise
        if request.headers.get(TOKEN_FORMAT_HEADER) != "ng":
            scored["response"] = response
        scored["ng"] = rollout.trace(scored.get("reward"), scored.get("reward_components"))
        return JsonResponse(scored, headers={WAITING_HEADER: str(turns.waiting)})

    async def responses(request: Request) -> Response:
        await _turn(turns)
        params = await json_body(request)
        rollout = _rollout(request, _checked(params))
        rollout.row = {"responses_create_params": params}
        return JsonResponse(await _respond(respond, rollout, params))

    async def aggregate(request: Request) -> Response:
        context = context_of(request)
        peer = context.peers[context.options.gym]
        body = await request.body() if request.method == "POST" else None
        reply = await peer.request(request.method, "/aggregate_metrics", body, timeout=METRICS_S, idempotent=True)
        return JsonResponse(reply.json())

    async def verify_group(request: Request) -> Response:
        context = context_of(request)
        peer = context.peers[context.options.gym]
        return JsonResponse(await peer.post(ROUTE, await request.body(), timeout=TIMEOUT_S, idempotent=True))

    row_schema = {
        "type": "object",
        "required": ["responses_create_params"],
        "properties": {"responses_create_params": {"type": "object"}},
    }
    for path, handler, summary, body, most_bytes in (
        ("/run", invoke_agent(run), "One whole rollout: seed, act, verify", row_schema, ROW_BYTES),
        ("/v1/responses", invoke_agent(responses), "The trajectory, unscored", _ANY, ROW_BYTES),
        ("/aggregate_metrics", aggregate, "Passed to the gym server", _ANY, BULK_BYTES),
        (ROUTE, verify_group, "Passed to the gym server", _ANY, BULK_BYTES),
    ):
        add_route(app, "POST", path, handler, summary=summary, body=body, most_bytes=most_bytes)
    add_route(app, "GET", "/aggregate_metrics", aggregate, summary="Passed to the gym server")
    return app


async def _turn(turns: Turns) -> None:
    """Returns when the rollout may begin; its waiting counts into its deadline."""
    try:
        await turns.mine()
    except asyncio.CancelledError:
        remaining_s = correlation.current.get().remaining_s()
        if remaining_s is None or remaining_s > CLOCKS_S:
            raise  # the caller hung up
        raise PeerTimeout(
            f"the rollout's time was over before its turn came ({turns.waiting} more wait at this agent): collect with less "
            "--concurrency, or give the agent replicas"
        ) from None


def _checked(params: Any, where: str = "") -> Any:
    """What every agent relies on; the rest is the model server's to check."""
    if params is None:
        return None
    if not isinstance(params, dict):
        raise BadRequest(f"field '{where.removesuffix('.')}': must be an object, not {type(params).__name__}")
    asked, tools = params.get("input"), params.get("tools") or []
    if not (isinstance(asked, str | None) or _are_objects(asked)):
        raise BadRequest(f"field '{where}input': must be a string or a list of items")
    if not (_are_objects(tools) and all(isinstance(tool.get("name", ""), str) for tool in tools)):
        raise BadRequest(f"field '{where}tools': must be a list of objects, each with its name")
    if params.get("stream"):
        raise BadRequest(f"field '{where}stream': an agent answers when all is done; leave it out")
    return params


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _rollout(request: Request, params: Any) -> RolloutContext:
    context = context_of(request)
    here = correlation.current.get()
    if here.rollout_id is None:
        here = correlation.begin(secrets.token_hex(16))._replace(deadline=here.deadline)
        correlation.current.set(here)
    state = request.app.state.agent_state
    return RolloutContext(context, cast(str, here.rollout_id), _beginning(params, context), state)


def _beginning(params: Any, context: ServiceContext) -> str:
    """What conversations have in common that begin alike: a replica has it in its prefix cache. "" where there is but one."""
    if len(context.peers.urls.get(context.options.model, ())) < 2:
        return ""
    match params:
        case {"input": [first, *_]} | {"input": first}:
            return repr((params.get("instructions"), first))[:BEGINNING_CHARS]
    return ""


async def _seed(rollout: RolloutContext, row: Json) -> Json:
    with boundary("config", "the task could not be started"):
        reply = await rollout.gym.request("/seed_session", row, timeout=rollout.options.tool_timeout_s, idempotent=True)
        seeded = reply.json()
    return seeded if isinstance(seeded, dict) else {}


def _params(row: Json, seeded: Json) -> Json:
    """The row's create params; the gym server's own tools when the row declares none."""
    params: Json = row.get("responses_create_params") or {}
    if not params.get("tools") and seeded.get("tools"):
        return {**params, "tools": seeded["tools"]}
    return params


async def _respond(respond: Respond, rollout: RolloutContext, params: Json) -> Json:
    with boundary("agent_error", "the agent failed"):
        rollout.declare(params.get("tools"))
        response = await respond(params, rollout)
    return await rollout.with_captured(response)


async def _end_session(rollout: RolloutContext) -> None:
    """Nobody goes on with a rollout that failed or was given up: its state, and what still runs for it, need not wait to expire."""
    correlation.current.set(correlation.current.get()._replace(deadline=None))  # it may be over
    with suppress(ServiceError):  # the server may be gone, or know no sessions; then they expire
        await rollout.gym.request("/session", None, method="DELETE", timeout=ABANDON_S, idempotent=True)


async def _verify(rollout: RolloutContext, body: Json) -> Json:
    started = time.perf_counter()
    with boundary("verify_error", "the rollout could not be verified"):
        scored: Json = (await rollout.gym.request("/verify", body, timeout=rollout.options.verify_timeout_s)).json()
    if not isinstance(scored, dict) or "reward" not in scored:
        raise ServiceError("the gym server's /verify answered without a reward", failure="verify_error")
    rollout.seconds["verify_s"] += time.perf_counter() - started
    return scored
