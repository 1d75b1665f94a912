"""openenv: an OpenEnv environment server as a gym server, played turn by turn or through its MCP tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from ngym import ServiceOptions, Session, VerifyRequest
from ngym.errors import ConfigError, Overloaded, ServiceError, boundary
from ngym.grading.answers import fenced
from ngym.rollout import calls_in
from ngym.schema import Json
from ngym.services.base.options import ServiceContext
from ngym.services.gym.step_server import Step, step_server, turns_of
from ngym.services.gym.tools import RESERVED, Tool, offer

from .server import Episode, Refused, Server, asked, shown

OVER = "The episode is over."
NOT_THE_TOOLS = ("transport_error", "timeout")  # error types of OpenEnv that are not the tool's


class Options(ServiceOptions):
    server: str = Field(description="The environment server: http://host:port.")
    headers: dict[str, str] = Field(
        default={}, description='Sent with each request: {Authorization: "Bearer ${oc.env:HF_TOKEN}"}.'
    )
    episodes: int = Field(
        default=1,
        ge=1,
        description="Concurrent episodes: at most the server's max_concurrent_envs, which is 1 by default.",
    )
    wait_s: float = Field(default=600.0, gt=0, description="How long a rollout waits for its episode to begin.")
    timeout_s: float = Field(default=60.0, gt=0, description="For one answer of the environment.")
    idle_s: float = Field(default=900.0, gt=0, description="An episode without a step for this long is closed.")


class Task(VerifyRequest):
    reset: dict[str, Any] = Field(default={}, description="Arguments of the environment's reset(), such as a seed.")


@asynccontextmanager
async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
    options: Options = context.options
    server = await asked(Server(options.server, options.timeout_s, options.headers))
    app.state.server = server
    app.state.places = asyncio.Semaphore(options.episodes)
    for described in server.tools:
        if described["name"] in RESERVED:
            raise ConfigError(f"{options.server} has a tool called {described['name']!r}, a route of every gym server")
        offer(app, Tool(described, partial(call_tool, described["name"])))
    yield


async def reset(task: Task, session: Session) -> str:
    observation = shown(await beginning(task.reset, session))
    server: Server = app.state.server
    return observation if server.tools else f"{server.manual}\n\n{observation}"


async def step(turn: Task, session: Session) -> Step:
    episode: Episode = session["episode"]
    server: Server = app.state.server
    stay(session)
    if server.tools or episode.done:  # the model's answer without tool calls ends the rollout
        return Step(OVER, terminated=True)
    try:
        observation = await episode.act(read_action(turn.text, server))
    except Refused as problem:
        return Step(f"{problem} {server.manual}")
    return Step(shown(observation), episode.rewards[-1] or 0.0, terminated=episode.done)


async def call_tool(name: str, arguments: Json, session: Session, request: Request) -> Response:
    with boundary("tool_error", f"{name} failed", retryable=True):
        said = await called(name, arguments, session)
        return Response(said.encode("utf-8", "replace"), media_type="text/plain")


async def called(name: str, arguments: Json, session: Session) -> str:
    """Call a tool. Returns the text that the model sees."""
    if "beginning" not in session:
        beginning(session["task"].get("reset") or {}, session)
    await asyncio.shield(session["beginning"])  # several first calls may arrive at the same time
    episode: Episode = session["episode"]
    stay(session)
    try:
        async with session["turn"]:  # a connection takes one request at a time
            observation = await episode.act({"type": "call_tool", "tool_name": name, "arguments": arguments})
    except Refused as problem:
        return str(problem)
    if error := observation.get("error"):
        told = error.get("message", "the tool failed")
        if error.get("error_type") in NOT_THE_TOOLS:
            raise ServiceError(f"{name} failed: {told}", failure="tool_error", retryable=True)
        return f"Error: {told}"
    result = observation.get("result")
    said = result["data"] if isinstance(result, dict) and result.get("data") is not None else result
    return said if isinstance(said, str) else orjson.dumps(said).decode()


async def verify(task: Task, session: Session) -> Json:
    try:
        if "episode" not in session:
            await replay(task, session)
        episode: Episode = session["episode"]
        played = {"steps": len(episode.rewards), "over": episode.done}
        if episode.reward is None:
            return {"reward": None, "outcome": "unverifiable", "reason": "the environment gave no reward", **played}
        return {
            "reward": episode.reward,
            "reward_components": {"return": episode.reward},
            "outcome": "scored",
            **played,
        }
    finally:
        session.over()


async def replay(task: Task, session: Session) -> None:
    """Repeat the turns, or the tool calls, of a stored rollout whose session is gone."""
    session["task"] = {"reset": task.reset}
    await reset(task, session)
    if app.state.server.tools:
        names = {tool["name"] for tool in app.state.server.tools}
        for call in calls_in(task.response):
            if call.name in names and call.arguments is not None:
                await called(call.name, call.arguments, session)
        return
    for turn in turns_of(task.response.get("output") or []):
        if session["episode"].done:
            break
        await step(task.model_copy(update={"response": {"output": turn}}), session)


def beginning(arguments: Json, session: Session) -> asyncio.Task[Json]:
    """Start `begin` as a task that the end of the session cancels."""
    session.over()  # ends an earlier episode of this session
    task = session["beginning"] = session.spawn(begin(arguments, session))
    return task


async def begin(arguments: Json, session: Session) -> Json:
    """Begin an episode when a place is free. Returns the first observation; raises Overloaded after wait_s."""
    options: Options = app.state.context.options
    places: asyncio.Semaphore = app.state.places
    try:
        async with asyncio.timeout(options.wait_s):
            await places.acquire()
    except TimeoutError:
        raise Overloaded(
            f"no place became free within {options.wait_s:g} s; `episodes` is {options.episodes}"
        ) from None
    episode = Episode(app.state.server)
    session.when_over(lambda: endings.add(asyncio.create_task(end(episode, places))))
    session.when_over(lambda: session["idle"].cancel())
    stay(session)
    try:
        observation = await episode.reset(arguments)
    except BaseException:
        session.over()
        raise
    session.update(episode=episode, turn=asyncio.Lock())
    return observation


def stay(session: Session) -> None:
    """Restart the idle timer of the episode, which frees the place of a rollout that failed elsewhere."""
    if "idle" in session:
        session["idle"].cancel()
    options: Options = app.state.context.options
    session["idle"] = asyncio.get_running_loop().call_later(options.idle_s, session.over)


async def end(episode: Episode, places: asyncio.Semaphore) -> None:
    try:
        await episode.close()
    finally:
        places.release()
        endings.discard(asyncio.current_task())


def read_action(text: str, server: Server) -> Json:
    """The JSON object in an answer, or the plain value of an action with one field. Raises Refused."""
    said = (fenced(text) or text).strip()
    try:
        action = orjson.loads(said)
    except orjson.JSONDecodeError:
        action = said
    if isinstance(action, dict):
        return action
    if server.single and said:
        return {server.single: said if server.is_text(server.single) else action}
    raise Refused("Your answer is not a JSON object.")


endings: set[Any] = set()  # closing tasks under way: the event loop keeps only weak references
app = step_server(task=Task, reset=reset, step=step, verify=verify, options=Options, lifespan=lifespan)
