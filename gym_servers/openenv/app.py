"""openenv: an OpenEnv environment server as a gym server, played turn by turn or through its MCP tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import orjson
from fastapi import Request
from openenv.core.client_types import StepResult
from openenv.core.generic_client import GenericEnvClient
from pydantic import Field
from starlette.responses import Response

from ngym import ServiceOptions, Session, Step, VerifyRequest, step_server
from ngym.errors import Boundary, ConfigError, Overloaded, ServiceError
from ngym.grading.answers import fenced
from ngym.rollout import calls_in
from ngym.schema import RESERVED, Json
from ngym.services.base.options import ServiceContext
from ngym.services.gym.step_server import turns_of
from ngym.services.gym.tools import Tool, describe_tool, register_tool

MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # action schemas of a server of MCP tools
OVER = "The episode is over."
NOT_THE_TOOLS = ("transport_error", "timeout")  # error types of OpenEnv that are not the tool's
endings: set[Any] = set()  # closing tasks under way: the event loop keeps only weak references


@dataclass(frozen=True)
class Server:
    """tools: in the format of the Responses API; empty for an environment with its own action type."""

    url: str
    timeout_s: float
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    action: Json = field(default_factory=dict)
    tools: tuple[Json, ...] = ()

    @property
    def single(self) -> str | None:
        """The only required field of an action, if it is a plain value: the value alone is then an action, too."""
        required = self.action.get("required") or []
        if len(required) != 1 or self._kind(required[0]) not in ("string", "integer", "number"):
            return None
        return str(required[0])

    def is_text(self, name: str) -> bool:
        """Whether the field is a string, so that `42` is text there."""
        return self._kind(name) == "string"

    def _kind(self, name: str) -> object:
        return self.action.get("properties", {}).get(name, {}).get("type")

    @property
    def manual(self) -> str:
        """The instruction for the model: how to write an action."""
        own = {name: value for name, value in self.action.get("properties", {}).items() if name != "metadata"}
        schema = orjson.dumps({**self.action, "properties": own}).decode()
        return (
            f"Answer each observation with one action, a JSON object that fits this schema, and nothing else: {schema}"
        )


async def with_schema(server: Server) -> Server:
    """The server with its action schema and tools. ConfigError if it is not reachable or not an OpenEnv server."""
    address = server.url.replace("ws://", "http://", 1).replace("wss://", "https://", 1).rstrip("/")
    try:
        async with httpx.AsyncClient(timeout=server.timeout_s, headers=server.headers) as client:
            answer = await client.get(f"{address}/schema")
            answer.raise_for_status()
            action = answer.json()["action"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"no OpenEnv server answers at {address}/schema: {type(error).__name__} {error}") from error
    if action.get("title") not in MCP_ACTIONS:
        return Server(server.url, server.timeout_s, server.headers, action)
    return Server(server.url, server.timeout_s, server.headers, action, await _tools(server))


async def _tools(server: Server) -> tuple[Json, ...]:
    client = GenericEnvClient(server.url, message_timeout_s=server.timeout_s, headers=server.headers or None)
    try:
        tools = (await client.step({"type": "list_tools"})).observation["tools"]
    except Exception as error:  # client, connection and environment errors have no common base class
        raise ConfigError(f"the tools of {server.url} cannot be listed: {type(error).__name__} {error}") from error
    finally:
        await client.close()
    return tuple(describe_tool(tool["name"], tool["description"], tool["input_schema"]) for tool in tools)


class Refused(Exception):
    """The server refuses this action; the text is for the model."""


class Episode:
    """rewards: one for each step, None if the server gave none."""

    def __init__(self, server: Server) -> None:
        self._client = GenericEnvClient(
            server.url, message_timeout_s=server.timeout_s, headers=server.headers or None, mode="simulation"
        )
        self._connection: object = None
        self.rewards: list[float | None] = []
        self.done = False

    async def reset(self, arguments: Json) -> Json:
        """Begin the episode. Returns the first observation."""
        try:
            await self._client.connect()
        except ConnectionError as error:
            raise ServiceError(str(error), failure="tool_error", retryable=True) from error
        self._connection = self._client._ws
        result = await self._send("reset", lambda: self._client.reset(**arguments))
        self.done = bool(result.done)
        observation: Json = result.observation
        return observation

    async def act(self, action: Json) -> Json:
        """Make one step. Returns the observation; raises Refused for an invalid action."""
        if self.done:
            raise Refused("The episode is over.")
        result = await self._send("step", lambda: self._client.step(action))
        self.rewards.append(None if result.reward is None else float(result.reward))
        self.done = bool(result.done)
        observation: Json = result.observation
        return observation

    async def close(self) -> None:
        await self._client.close()

    @property
    def reward(self) -> float | None:
        """The sum over the steps; None if there were steps but no rewards, which means no verdict."""
        rewards = [reward for reward in self.rewards if reward is not None]
        return sum(rewards) if rewards or not self.rewards else None

    async def _send(self, what: str, send: Callable[[], Awaitable[StepResult[Json]]]) -> StepResult[Json]:
        self._same_connection(what)
        try:
            result = await send()
        except RuntimeError as error:  # the client's form of a server error, with its code in the text
            message = str(error)
            if "(code: VALIDATION_ERROR)" in message:
                raise Refused("The environment does not accept this action.") from error
            if "(code: CAPACITY_REACHED)" in message:
                raise Overloaded(
                    f"{message}; lower `episodes` in the stanza, or raise the server's own limit"
                ) from error
            raise ServiceError(f"{what} failed: {message}", failure="tool_error") from error
        except Exception as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise ServiceError(f"{what} failed: {reason}", failure="tool_error", retryable=True) from error
        self._same_connection(what)
        return result

    def _same_connection(self, what: str) -> None:
        """Fail if the client has reconnected by itself, because it is then in a new episode."""
        if self._client._ws is not self._connection:
            message = f"{what} failed: the connection was lost or closed, and the episode with it"
            raise ServiceError(message, failure="tool_error", retryable=True)


def observation_text(observation: Json) -> str:
    """An observation as text: JSON without empty members, or the plain text if that is the only member."""
    fields = {key: value for key, value in observation.items() if key != "metadata" and value not in (None, "", [], {})}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return orjson.dumps(fields).decode()


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
    server = await with_schema(Server(options.server, options.timeout_s, options.headers))
    app.state.server = server
    app.state.places = asyncio.Semaphore(options.episodes)
    for tool in server.tools:
        if tool["name"] in RESERVED:
            raise ConfigError(f"{options.server} has a tool called {tool['name']!r}, a route of every gym server")
        register_tool(app, Tool(tool, partial(call_tool, tool["name"])))
    yield


async def reset(task: Task, session: Session) -> str:
    observation = observation_text(await spawn_begin(task.reset, session))
    server: Server = app.state.server
    return observation if server.tools else f"{server.manual}\n\n{observation}"


async def step(turn: Task, session: Session) -> Step:
    episode: Episode = session["episode"]
    server: Server = app.state.server
    restart_idle_timer(session)
    if server.tools or episode.done:  # the model's answer without tool calls ends the rollout
        return Step(OVER, terminated=True)
    try:
        observation = await episode.act(read_action(turn.text, server))
    except Refused as problem:
        return Step(f"{problem} {server.manual}")
    return Step(observation_text(observation), episode.rewards[-1] or 0.0, terminated=episode.done)


async def call_tool(name: str, arguments: Json, session: Session, request: Request) -> Response:
    with Boundary("tool_error", f"{name} failed", retryable=True):
        text = await tool_output(name, arguments, session)
        return Response(text.encode("utf-8", "replace"), media_type="text/plain")


async def tool_output(name: str, arguments: Json, session: Session) -> str:
    """Call a tool. Returns the text that the model sees."""
    if "beginning" not in session or found_no_place(session["beginning"]):
        spawn_begin(session["task"].get("reset") or {}, session)
    await asyncio.shield(session["beginning"])  # several first calls may arrive at the same time
    episode: Episode = session["episode"]
    restart_idle_timer(session)
    try:
        async with session["turn"]:  # a connection takes one request at a time
            observation = await episode.act({"type": "call_tool", "tool_name": name, "arguments": arguments})
    except Refused as problem:
        return str(problem)
    if error := observation.get("error"):
        message = error.get("message", "the tool failed")
        if error.get("error_type") in NOT_THE_TOOLS:
            raise ServiceError(f"{name} failed: {message}", failure="tool_error", retryable=True)
        return f"Error: {message}"
    result = observation.get("result")
    output = result["data"] if isinstance(result, dict) and result.get("data") is not None else result
    return output if isinstance(output, str) else orjson.dumps(output).decode()


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
                await tool_output(call.name, call.arguments, session)
        return
    for turn in turns_of(task.response):
        if session["episode"].done:
            break
        await step(task.model_copy(update={"response": {"output": turn}}), session)


def spawn_begin(arguments: Json, session: Session) -> asyncio.Task[Json]:
    """Start `begin` as a task that the end of the session cancels."""
    session.over()  # ends an earlier episode of this session
    task = session["beginning"] = session.spawn(begin(arguments, session))
    return task


def found_no_place(task: asyncio.Task[Json]) -> bool:
    """Whether the episode could not begin because others take all places; it may now."""
    return task.done() and not task.cancelled() and isinstance(task.exception(), Overloaded)


async def begin(arguments: Json, session: Session) -> Json:
    """Begin an episode when a place is free. Returns the first observation; raises Overloaded after wait_s."""
    options: Options = app.state.context.options
    places: asyncio.Semaphore = app.state.places
    try:
        async with asyncio.timeout(options.wait_s):
            await places.acquire()
    except TimeoutError:
        raise Overloaded(
            f"no place became free within {options.wait_s:g} s; `episodes` is {options.episodes}: raise it, or collect "
            "with less --concurrency"
        ) from None
    episode = Episode(app.state.server)
    session.when_over(lambda: endings.add(asyncio.create_task(end(episode, places))))
    session.when_over(lambda: session["idle"].cancel())
    restart_idle_timer(session)
    try:
        observation = await episode.reset(arguments)
    except BaseException:
        session.over()
        raise
    session.update(episode=episode, turn=asyncio.Lock())
    return observation


def restart_idle_timer(session: Session) -> None:
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
    content = (fenced(text) or text).strip()
    try:
        action = orjson.loads(content)
    except orjson.JSONDecodeError:
        action = content
    if isinstance(action, dict):
        return action
    if server.single and content:
        return {server.single: content if server.is_text(server.single) else action}
    raise Refused("Your answer is not a JSON object.")


app = step_server(task=Task, reset=reset, step=step, verify=verify, options=Options, lifespan=lifespan)
