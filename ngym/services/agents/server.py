"""agent(): a way of driving a model through a task, as an application. `/run` is one whole rollout.

Rollouts start in order of arrival, a few in each turn of the event loop. Without this, thousands of rollouts that
arrive together move in step: all seed, then all ask the model, then all verify. Each wave opens one connection per
rollout, and the next service idles until the wave is over. Rollouts that wait for a slow peer do not block the others.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, cast

import orjson
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from ngym.errors import BadRequest, Boundary, NotFound, PeerTimeout, ServiceError, shorten
from ngym.grading.answers import response_problem
from ngym.grading.group_rewards import ROUTE, TIMEOUT_S
from ngym.net import request_context
from ngym.net.json_limits import LOOP_BYTES, ROW_BYTES, by_size, serialize
from ngym.net.request_context import header
from ngym.peer_answers import parse_large
from ngym.peers import PeerSession, ToolErrors, given_up
from ngym.rollout import without_tokens
from ngym.runtime.event_loop import run_endlessly
from ngym.schema import APPLIED_HEADER, MINIMAL, TOKEN_FORMAT_HEADER, WAITING_HEADER, Json
from ngym.services.agents.rollout_context import RolloutContext
from ngym.services.base.app import (
    OBJECT,
    JsonResponse,
    add_route,
    check_async,
    check_settings,
    context_of,
    object_of,
    service_app,
)
from ngym.services.base.middleware import invoke_agent
from ngym.services.base.options import GymServerName, ModelName, ServiceContext, ServiceOptions
from ngym.services.base.request_bodies import json_body, off_loop

STARTS_PER_TURN = 8  # rollouts that begin in one turn of the event loop
PROMPT_DIGEST_CHARS = 1000
MAX_SHOWN = 500  # running rollouts in one answer
SHOWN_CHARS = 200
METRICS_S = 120.0
END_SESSION_TIMEOUT_S = 10.0
HEAD_POLL_S = 5.0  # between two questions to the head
STATELESS_S = 30.0  # for which rows are not sent again to a gym server that has accepted them and needs no session
MAX_ACCEPTED = 100_000  # remembered rows, of 16 bytes each
TIMER_SLACK_S = 0.01  # timers of the event loop may fire this much too early
_ANY: Json = OBJECT
_TRAJECTORY = object_of({"output": {"type": "array", "items": OBJECT}})
Respond = Callable[[Json, RolloutContext], Awaitable[Json]]
AgentLifespan = Callable[[ServiceContext], AbstractAsyncContextManager[Any]]


class AdmissionQueue:
    """First come, first served. One per process and event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def wait(self) -> None:
        """Wait until the caller may begin."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._next)
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        started = 0
        while self._waiting and started < STARTS_PER_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                started += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class AgentOptions(ServiceOptions):
    """The gym server that scores, and the model that acts."""

    gym: GymServerName = Field(description="The gym server that offers the tools and scores.")
    model: ModelName = Field(description="The model that acts.")
    model_timeout_s: float = Field(default=600, description="Timeout of one model call, in seconds.")
    tool_timeout_s: float = Field(default=120, description="Timeout of one tool call, in seconds.")
    verify_timeout_s: float = Field(default=120, description="Timeout of `/verify`, in seconds.")
    tool_errors: ToolErrors = Field(
        default="fail",
        description="What a crash of a tool does to the rollout. fail: the rollout fails. show: the model reads the "
        "error, as with NeMo Gym; also a 4xx or 500 of a third-party gym server.",
    )
    max_tool_calls: int = Field(
        default=1000, ge=1, description="Limit per rollout; further calls get an error that the model reads."
    )


def agent(
    *,
    respond: Respond,
    options: type[AgentOptions] = AgentOptions,
    lifespan: AgentLifespan | None = None,
    seeds: bool = True,
) -> FastAPI:
    """An agent as an application.

    Args:
        respond: `async (request, rollout)` -> a Response whose output is the whole trajectory. `request` is a Responses
            create params object; `rollout.sample`, `rollout.call_tool` and `rollout.finish` do the work.
        options: the record of the stanza's own keys; derives from AgentOptions.
        lifespan: `async with lifespan(context) as state` around serving; rollouts find what it yields in
            `rollout.state`.
        seeds: begin the session with /seed_session. False: `respond` begins it (agents/gymnasium: /reset).

    Raises:
        SignatureError: `respond` is not async, or cannot be called with these arguments.
    """
    check_settings("agent", options, AgentOptions, lifespan=lifespan)
    check_async(respond, "respond(request, rollout)")

    @asynccontextmanager
    async def running(context: ServiceContext) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if context.peers.head_url is not None:
                watching = run_endlessly(partial(_watch_needed, app, context), "the watch of the services it needs")
                watch = asyncio.create_task(watching)
                stack.callback(watch.cancel)
            if lifespan is not None:
                app.state.agent_state = await stack.enter_async_context(lifespan(context))
            yield

    app = service_app("agent", options=options, lifespan=running)
    app.state.agent_state = None
    turns = AdmissionQueue()
    running_now: dict[str, RolloutContext] = {}
    stateless = _Stateless()
    abandoned: set[asyncio.Task[None]] = set()  # asyncio itself holds only weak references to tasks

    async def run(request: Request) -> Response:
        await _turn(turns)
        row = await json_body(request)
        params = _check_row(row)
        rollout = _rollout(request, params, len(await request.body()))
        rollout.row = row
        running_now[rollout.rollout_id] = rollout
        try:
            seeded = await stateless.earlier_answer(rollout) if seeds else {}
            rollout.stateless = seeds and seeded is not None
            if seeded is None:
                try:
                    seeded = await _seed(rollout, await request.body())
                    stateless.remember(rollout, seeded)
                finally:
                    stateless.release_waiting(rollout)
            rollout.missing_tools = [str(name) for name in seeded.get("missing_tools") or ()]
            response = await _respond(respond, rollout, _params(row, seeded))
            visible = {**response, "output": without_tokens(response["output"])}
            result = {**row, "response": visible}
            scored = await _verify(rollout, result) if rollout.scored is None else {**result, **rollout.scored}
        except BaseException:
            if not rollout.stateless or rollout.tool_calls:  # a tool may still run
                ending = asyncio.create_task(_end_session(rollout))
                abandoned.add(ending)
                ending.add_done_callback(abandoned.discard)
            if rollout.stateless and rollout.doing != "model":
                stateless.forget()  # another server may have taken its place
            raise
        finally:
            running_now.pop(rollout.rollout_id, None)
        if header(request.scope, TOKEN_FORMAT_HEADER) != "ng":
            scored["response"] = response
        scored["ng"] = rollout.trace(scored.get("reward"), scored.get("reward_components"))
        headers = {WAITING_HEADER: str(turns.waiting)}
        return await off_loop(request, partial(JsonResponse, headers=headers), scored)

    async def responses(request: Request) -> Response:
        await _turn(turns)
        params = await json_body(request)
        rollout = _rollout(request, _check_params(params), len(await request.body()))
        rollout.row = {"responses_create_params": params}
        return await off_loop(request, JsonResponse, await _respond(respond, rollout, params))

    async def list_running(request: Request) -> Response:
        some = [rollout.progress() for rollout in islice(running_now.values(), MAX_SHOWN)]
        return JsonResponse({"count": len(running_now), "rollouts": some})

    async def show_running(request: Request) -> Response:
        rollout = running_now.get(request.path_params["rollout_id"])
        if rollout is None:
            raise NotFound("no rollout with this id runs here now: it has ended, or another replica runs it")
        row = {
            name: rollout.row.get(name) for name in ("responses_create_params", "_ng_task_index", "_ng_rollout_index")
        }
        return JsonResponse(
            {**row, "response": {"output": without_tokens(rollout.so_far)}, "running": rollout.progress()}
        )

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
    scored = object_of({"reward": {"type": ["number", "null"]}, "response": _TRAJECTORY, "ng": OBJECT})
    for path, handler, summary, body, answer, most_bytes in (
        ("/run", invoke_agent(run), "One whole rollout: seed, act, verify", row_schema, scored, ROW_BYTES),
        ("/v1/responses", invoke_agent(responses), "The trajectory, unscored", _ANY, _TRAJECTORY, ROW_BYTES),
        ("/aggregate_metrics", aggregate, "Passed to the gym server", _ANY, _ANY, ROW_BYTES),
        (ROUTE, verify_group, "Passed to the gym server", _ANY, _ANY, ROW_BYTES),
    ):
        add_route(app, "POST", path, handler, summary=summary, body=body, answer=answer, most_bytes=most_bytes)
    add_route(app, "GET", "/running", list_running, summary="The rollouts that run here now")
    add_route(app, "GET", "/running/{rollout_id}", show_running, summary="One of them, as far as it is: as a row")
    add_route(app, "GET", "/aggregate_metrics", aggregate, summary="Passed to the gym server")
    return app


async def _watch_needed(app: FastAPI, context: ServiceContext) -> None:
    """Keep /ready true to what the head knows: a service that the options name may be one that cannot be started."""
    names = {value for value in vars(context.options).values() if isinstance(value, str)}
    while True:
        records = await context.peers.fetch_servers()
        if records is not None:  # else the head did not answer
            lost = [each for each in records if each["name"] in names and _is_lost(each)]
            app.state.not_ready = next((given_up(each["name"], each.get("detail", "")) for each in lost), None)
        await asyncio.sleep(HEAD_POLL_S)


def _is_lost(record: Json) -> bool:
    """Whether none of its replicas can be started."""
    return record.get("status") == "failed" and not any(record.get("pids") or [])


async def _turn(turns: AdmissionQueue) -> None:
    """Wait until the rollout may begin; the wait counts towards its deadline."""
    try:
        await turns.wait()
    except asyncio.CancelledError:
        remaining_s = request_context.current.get().remaining_s()
        if remaining_s is None or remaining_s > TIMER_SLACK_S:
            raise  # the caller hung up
        raise PeerTimeout(
            f"the rollout's deadline passed before it could start ({turns.waiting} more wait at this agent): "
            "collect with less --concurrency, or give the agent replicas"
        ) from None


def _check_row(row: Json) -> Any:
    """The checked create params of a row. An error names the row, so that the collector can show its file and line."""
    try:
        return _check_params(row.get("responses_create_params"), "responses_create_params.")
    except BadRequest as error:
        if isinstance(index := row.get("_ng_task_index"), int):
            error.detail = f"row {index}: {error.detail}"
        raise


def _check_params(params: Any, where: str = "") -> Any:
    """Check what every agent relies on; the model server checks the rest."""
    if params is None:
        return None
    if not isinstance(params, dict):
        raise BadRequest(f"field '{where.removesuffix('.')}': must be an object, not {type(params).__name__}")
    items, tools = params.get("input"), params.get("tools") or []
    if not (items is None or isinstance(items, str) or _are_objects(items)):
        raise BadRequest(f"field '{where}input': must be a string or a list of items")
    if not _are_tools(tools):
        raise BadRequest(f"field '{where}tools': must be a list of objects, each with its name")
    if params.get("stream"):
        raise BadRequest(f"field '{where}stream': agents do not stream; leave it out")
    return params


def _are_tools(value: Any) -> bool:
    return _are_objects(value) and all(isinstance(tool.get("name", ""), str) for tool in value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _rollout(request: Request, params: Any, request_bytes: int) -> RolloutContext:
    context = context_of(request)
    here = request_context.current.get()
    if here.rollout_id is None:
        here = request_context.new_correlation(secrets.token_hex(16))._replace(deadline=here.deadline)
        request_context.current.set(here)
    state = request.app.state.agent_state
    return RolloutContext(context, cast(str, here.rollout_id), _affinity_key(params, context), state, request_bytes)


def _affinity_key(params: Any, context: ServiceContext) -> str:
    """A key shared by conversations with the same beginning, so that one replica has it in its prefix cache. "" with a
    single replica.
    """
    if len(context.peers.urls.get(context.options.model, ())) < 2:
        return ""
    match params:
        case {"input": [first, *_]} | {"input": first}:
            return repr((params.get("instructions"), first))[:PROMPT_DIGEST_CHARS]
    return ""


class _Stateless:
    """The rows that a gym server accepted which needs no sessions: their further rollouts need no /seed_session.

    They are forgotten STATELESS_S after the last one was added, when the server's addresses change, and when it fails.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._urls: tuple[str, ...] = ()  # of a server that needs no sessions; empty: it is not known
        self._rows: dict[bytes, Json] = {}  # their digests, and what the server answered
        self._last: Json = {}  # the last of these answers: most are equal
        self._session: PeerSession | None = None  # of the last rollout that was seeded
        self._pending_of_rollout: dict[str, tuple[bytes, asyncio.Future[None]]] = {}
        self._pending: dict[bytes, asyncio.Future[None]] = {}  # of the /seed_session calls in progress, by row

    async def earlier_answer(self, rollout: RolloutContext) -> Json | None:
        """The server's earlier answer to this row, after waiting for a call in progress. None: call /seed_session."""
        if time.monotonic() >= self._until or not self._urls or _gym_urls(rollout) != self._urls:
            self.forget()
            return None
        if rollout.request_bytes > LOOP_BYTES:
            return None
        digest = _digest(rollout.row)
        while (pending := self._pending.get(digest)) is not None:
            await asyncio.wait([pending])
        seeded = self._rows.get(digest)
        if seeded is not None:
            if self._session is not None:
                rollout.gym.copy_expectations(self._session)
            return seeded
        self._pending[digest] = asyncio.get_running_loop().create_future()
        self._pending_of_rollout[rollout.rollout_id] = digest, self._pending[digest]
        return None

    def remember(self, rollout: RolloutContext, seeded: Json) -> None:
        """Remember the server's answer to the rollout's row."""
        is_stateless = seeded.get("stateless") is True
        if not is_stateless or _gym_urls(rollout) != self._urls or len(self._rows) >= MAX_ACCEPTED:
            self.forget()
        if not is_stateless or rollout.request_bytes > LOOP_BYTES:
            return
        self._urls = _gym_urls(rollout)
        self._until = time.monotonic() + STATELESS_S
        answer = {name: seeded.get(name) for name in ("tools", "missing_tools")}
        self._last = self._last if self._last == answer else answer
        self._session = rollout.gym
        self._rows[_digest(rollout.row)] = self._last

    def release_waiting(self, rollout: RolloutContext) -> None:
        """Wake the other rollouts of the row: the server has answered, or failed."""
        if rollout.rollout_id in self._pending_of_rollout:
            digest, pending = self._pending_of_rollout.pop(rollout.rollout_id)
            del self._pending[digest]
            pending.set_result(None)

    def forget(self) -> None:
        self._rows.clear()
        self._urls = ()


def _digest(row: Json) -> bytes:
    """The same for all rollouts of a row, which differ by index and by seed (in the metadata's extra_body)."""
    params = row.get("responses_create_params") or {}
    metadata = {**(params.get("metadata") or {}), "extra_body": None}
    same = {**row, "_ng_rollout_index": None, "responses_create_params": {**params, "metadata": metadata}}
    return blake2b(orjson.dumps(same), digest_size=16).digest()


def _gym_urls(rollout: RolloutContext) -> tuple[str, ...]:
    return tuple(rollout.peers.urls.get(rollout.options.gym, ()))


async def _seed(rollout: RolloutContext, row: bytes) -> Json:
    started = time.perf_counter()
    with Boundary("config", "the task could not be started"):
        seeded = await rollout.gym.post("/seed_session", row, timeout=rollout.options.tool_timeout_s, idempotent=True)
    rollout.took("seed", started)
    if not isinstance(seeded, dict):
        return {}
    if not _are_tools(seeded.get("tools") or []):
        gym = rollout.options.gym
        raise ServiceError(
            f"{gym} answered /seed_session with tools that are not a list of objects, each with its name",
            failure="config",
        )
    if seeded.get("only_by_steps"):
        raise ServiceError(
            f"{rollout.options.gym} is played turn by turn (/reset, /step): give this agent `app: agents/gymnasium`, or an "
            "app whose `respond` plays so and which is agent(seeds=False)",
            failure="config",
        )
    return seeded


def _params(row: Json, seeded: Json) -> Json:
    """The row's create params, with the gym server's tools if the row declares none."""
    params: Json = row.get("responses_create_params") or {}
    if not params.get("tools") and seeded.get("tools"):
        return {**params, "tools": seeded["tools"]}
    return params


async def _respond(respond: Respond, rollout: RolloutContext, params: Json) -> Json:
    try:
        with Boundary("agent_error", "the agent failed", places=True):
            rollout.declare(params.get("tools"))
            response = await respond(params, rollout)
        if rollout.failure is not None:
            raise rollout.failure
        _check_response(response)
    except ServiceError as error:
        if rollout.failure is None:
            await rollout.check_replica()
        raise rollout.failure or error from error.__cause__  # an SDK may have wrapped it in another error
    finally:
        rollout.failure = None  # its traceback holds the rollout: a circle that would keep the row alive
    return await rollout.with_captured(response)


def _check_response(response: Any) -> None:
    """Raise ServiceError if a verifier could not read this Response."""
    if not isinstance(response, dict) or "output" not in response:
        problem = "a Response has `output`, a list of items; `rollout.finish` and `rollout.answer` make one"
    else:
        problem = response_problem(response) or ""
    if problem:
        raise ServiceError(
            f"the agent's respond returned {shorten(repr(response), SHOWN_CHARS)}: {problem}", failure="agent_error"
        )


async def _end_session(rollout: RolloutContext) -> None:
    """End the session of a rollout that failed or was given up, instead of waiting for it to expire."""
    request_context.current.set(request_context.current.get()._replace(deadline=None))  # it may be over
    with suppress(ServiceError):  # the server may be gone or have no sessions; then they expire
        await rollout.gym.request("/session", None, method="DELETE", timeout=END_SESSION_TIMEOUT_S, idempotent=True)


async def _verify(rollout: RolloutContext, body: Json) -> Json:
    started = time.perf_counter()
    rollout.doing = "verify"
    with Boundary("verify_error", "the rollout could not be verified"):
        raw = await by_size(rollout.request_bytes, serialize, body)
        timeout_s = rollout.options.verify_timeout_s
        once_more = rollout.stateless  # a call that is lost may be made again
        reply = await rollout.gym.request("/verify", raw, timeout=timeout_s, prefer=MINIMAL, idempotent=once_more)
        scored: Json = await parse_large(reply, rollout.gym.peer.name, "/verify")
    if not isinstance(scored, dict) or "reward" not in scored:
        raise ServiceError("the gym server's /verify answered without a reward", failure="verify_error")
    rollout.took("verify", started, "verify_s")
    return {**body, **scored} if reply.headers.get(APPLIED_HEADER) == MINIMAL else scored
