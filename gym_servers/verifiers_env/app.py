"""verifiers_env: an environment of Prime Intellect's `verifiers` as a gym server, with its own rewards and tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from ngym import ServiceOptions, Session, VerifyRequest
from ngym.errors import BadRequest, boundary
from ngym.schema import Json
from ngym.services.base.app import add_route
from ngym.services.base.options import ServiceContext
from ngym.services.gym.step_server import Step, step_server
from ngym.services.gym.tools import Tool, offer

from .bridge import Bridge
from .environment import Source
from .scoring import NotScored

PLAIN_RESPONSE: Json = {
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "0"}]}]
}
ROWS = "application/x-ndjson"


class Options(ServiceOptions):
    environment: str = Field(description="The id of an installed environment: the name of its package.")
    path: Path | None = Field(default=None, description="Another folder to search for it, relative to the config file.")
    taskset: dict[str, Any] = Field(default={}, description="The environment's own options.")
    deadline_s: float = Field(default=30.0, gt=0, description="CPU seconds for the rewards of one rollout.")


class Task(VerifyRequest):
    task_data: dict[str, Any] = Field(description="The task in the format of verifiers; GET /rows returns such rows.")


@asynccontextmanager
async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
    options: Options = context.options
    path = str((context.root / options.path).resolve()) if options.path else None
    source = Source(environment=options.environment, path=path, taskset=options.taskset)
    async with Bridge.open(source, options.deadline_s) as bridge:
        app.state.bridge = bridge
        for described in bridge.described:
            offer(app, Tool(described, partial(call_tool, described["name"])))
        yield


async def verify(task: Task, session: Session) -> Json:
    bridge: Bridge = app.state.bridge
    try:
        trace = await bridge.finished(task.task_data, task.response, session)
    except NotScored as problem:
        reward = 0.0 if problem.outcome != "infra_error" and await scores_a_plain_answer(bridge, task) else None
        return {"reward": reward, "outcome": problem.outcome, "reason": str(problem)}
    rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    unscored = sorted(name for name, value in rewards.items() if value is None)
    if unscored or not rewards:
        reason = f"the environment gave no {', '.join(unscored) or 'reward'}"
        return {"reward": None, "outcome": "verify_error", "reason": reason}
    return {"reward": trace.reward, "reward_components": rewards, "metrics": trace.metrics, "outcome": "scored"}


async def scores_a_plain_answer(bridge: Bridge, task: Task) -> bool:
    """Whether the rewards work on a plain answer to the task. If so, a failure is the rollout's fault."""
    try:
        await bridge.finished(task.task_data, PLAIN_RESPONSE, Session())
    except NotScored:
        return False
    return True


async def call_tool(name: str, arguments: Json, session: Session, request: Request) -> Response:
    with boundary("tool_error", f"{name} failed", places=True, retryable=True):
        said: str = await app.state.bridge.call(name, arguments, session)
        return Response(said.encode("utf-8", "replace"), media_type="text/plain")


async def reset(task: Task, session: Session) -> str:
    bridge: Bridge = app.state.bridge
    return await bridge.reset(task.task_data, session)


async def step(turn: Task, session: Session) -> Step:
    observation = await session["game"].say(turn.response)
    return Step(observation or "", terminated=observation is None)  # rewards are computed when the episode is over


async def rows(request: Request) -> Response:
    """`?skip=0&limit=100`: tasks as rows, one per line."""
    try:
        skip, limit = (int(request.query_params.get(name, default)) for name, default in (("skip", 0), ("limit", 100)))
    except ValueError:
        raise BadRequest("GET /rows?skip=0&limit=100: both are whole numbers") from None
    with boundary("config", "the tasks cannot be written as rows"):
        lines = await run_sync(app.state.bridge.rows, max(skip, 0), max(limit, 0))
    return Response(b"".join(lines), media_type=ROWS)


app = step_server(task=Task, reset=reset, step=step, verify=verify, options=Options, lifespan=lifespan)
add_route(app, "GET", "/rows", rows, summary="Tasks of the environment as rows, one per line", answers=[ROWS])
