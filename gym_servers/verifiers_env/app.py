"""verifiers_env: an environment of Prime Intellect's `verifiers` as a gym server, with its own rewards and tools.

The `run` of a turn-based environment is a separate task, which waits for the model's turns:

    run(task, agents)    agents.player.interaction(task).turn("your move")  ->  observation ─┐
                                                     Segment(...)           <-  the turn   <─┘  /reset, /step
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import orjson
import verifiers.v1 as vf
from anyio.to_thread import run_sync
from fastapi import Request
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent
from pydantic import Field, ValidationError
from starlette.responses import Response
from verifiers.v1.dialects import parse_message
from verifiers.v1.types import content_text

from ngym import ServiceOptions, Session, Step, VerifyRequest, step_server
from ngym.errors import BadRequest, Boundary, ConfigError, ServiceError
from ngym.rollout import calls_in
from ngym.schema import RESERVED, Json
from ngym.services.base.app import add_route
from ngym.services.base.options import InputFolder, ServiceContext
from ngym.services.gym.results import Image, has_image, tool_response
from ngym.services.gym.step_server import turns_of
from ngym.services.gym.tools import Tool, describe_tool, register_tool

from .environment import Environment, Source, items_of, load, prompt_of, record_prompt, record_turn
from .scoring import NotScored, pool, score_trace

_state: ContextVar[vf.State] = ContextVar("state")  # state of the rollout whose tool is running
Toolsets = Sequence[vf.Toolset[Any, Any]]
Trace: TypeAlias = vf.Trace[Any, Any, Any]
Score = Callable[[Trace], Awaitable[None]]
PLAIN_RESPONSE: Json = {
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "0"}]}]
}
ROWS = "application/x-ndjson"


@dataclass(frozen=True)
class Toolbox:
    """Toolsets that are ready, with their tools by verifiers' names, `<server>_<tool>`."""

    tools: dict[str, tuple[MCPServer, str]]
    tool_definitions: list[Json]
    stack: AsyncExitStack

    @classmethod
    async def open(cls, toolsets: Toolsets, data: vf.TaskData | None = None) -> Toolbox:
        """Set toolsets up. data: of the task, for the toolsets of one rollout; None for shared ones."""
        box = cls({}, [], AsyncExitStack())
        try:
            for toolset in toolsets:
                await box._take(toolset, data)
        except BaseException:  # for example, the session ends meanwhile
            await box.stack.aclose()
            raise
        return box

    async def call(self, name: str, arguments: Json, state: vf.State) -> str | list[str | Image]:
        """The tool's answer, or its refusal, as the model sees it: a text, or texts and images.

        Raises:
            ServiceError: the answer has something else. Any exception of the tool but MCP's ToolError is raised unchanged.
        """
        server, own_name = self.tools[name]
        token = _state.set(state)
        try:
            result = await server.call_tool(own_name, arguments)
        except ToolError as error:
            if error.__cause__ is None or isinstance(error.__cause__, ToolError | ValidationError):
                return str(error)
            raise error.__cause__ from None  # a crash, which the SDK also wraps in a ToolError
        finally:
            _state.reset(token)
        parts = [_shown(block, name) for block in getattr(result, "content", [])]
        return parts if has_image(parts) else "\n".join(map(str, parts))

    async def _take(self, toolset: vf.Toolset[Any, Any], data: vf.TaskData | None) -> None:
        _bind(toolset)
        await self.stack.enter_async_context(toolset._exit_stack)
        await toolset.setup()
        if data is not None:
            await toolset.setup_task(data)
        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            self._add(f"{toolset.server_name}_{tool.name}".removeprefix("_"), server, tool)

    def _add(self, name: str, server: MCPServer, tool: Any) -> None:
        if name in RESERVED or name in self.tools:
            raise ConfigError(
                f"invalid tool name {name!r}: it is a route of every gym server, or the name of another tool"
            )
        self.tools[name] = (server, tool.name)
        self.tool_definitions.append(describe_tool(name, tool.description, tool.input_schema))


def _shown(block: Any, tool: str) -> str | Image:
    match block:
        case TextContent():
            return str(block.text)
        case ImageContent():
            with suppress(ValueError):
                return Image(base64.b64decode(block.data))
    raise ServiceError(f"tool {tool!r} answered with more than text and images", failure="tool_error")


def toolsets_of(environment: Environment) -> Toolsets:
    """New toolsets for one rollout."""
    toolsets: Toolsets = environment.task_type.toolsets(environment.tasks.config.task)
    return toolsets


def _bind(toolset: vf.Toolset[Any, Any]) -> None:
    """Give the toolset the rollout's state itself; verifiers would copy it before and after each call."""

    async def pull() -> vf.State:
        return _state.get()

    async def push(before: bytes) -> None:
        return None

    toolset._pull_state = pull
    toolset._push_state = push


class Game:
    """One episode."""

    def __init__(self, environment: Environment, task: vf.Task[Any, Any, Any], score: Score) -> None:
        self.environment = environment
        self.task = task
        self.score = score
        self.traces: list[Trace] = []
        self._observations: asyncio.Queue[str | None] = asyncio.Queue()
        self._answers: asyncio.Queue[Json | None] = asyncio.Queue()
        self._run = asyncio.create_task(self._play())

    async def observe(self) -> str | None:
        """The next observation, or None when `run` is over. `finish` raises its error, if any."""
        observation = await self._observations.get()
        if observation is None:
            self._observations.put_nowait(None)  # for later calls
        return observation

    @property
    def problem(self) -> str:
        """The reason why `run` ended early."""
        error = self._run.exception() if self._run.done() else None
        return "it made no move" if error is None else f"{type(error).__name__}: {error}"

    async def say(self, response: Json) -> str | None:
        """Pass on the model's turn. Returns the next observation."""
        self._answers.put_nowait(response)
        return await self.observe()

    async def finish(self) -> Trace:
        """The trace with its rewards. An unfinished `run` sees its turn as `terminated`, as at verifiers' limits."""
        self._answers.put_nowait(None)
        await self._run
        return self.traces[0]

    def abandon(self) -> None:
        self._run.cancel()

    async def _play(self) -> None:
        env = self.environment.env
        agents: Any = vf.Agents(env.config, lambda name, spec: _Player(self))
        try:
            await env.setup(agents)
            await env.run(self.task, agents)
            if not self.traces:
                raise ValueError(f"{type(env).__name__}.run() ran no agent")
            trace = self.traces[0]
            await env.finalize(self.task, vf.Episode(task=trace.task, traces=[trace], ok=True))
        finally:
            self._observations.put_nowait(None)

    async def turn(self, observation: str) -> Json | None:
        self._observations.put_nowait(observation)
        return await self._answers.get()


class _Player:
    """Replaces the agent of a role that `run` expects."""

    trainable = True

    def __init__(self, game: Game) -> None:
        self._game = game

    async def run(self, task: vf.Task[Any, Any, Any]) -> Trace:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task[Any, Any, Any]) -> AsyncIterator[_Interaction]:
        if self._game.traces:
            raise ValueError("run() begins a second conversation with its agent; a rollout has only one")
        interaction = _Interaction(self._game, await self._game.environment.begin(task))
        self._game.traces.append(interaction.trace)
        yield interaction
        interaction.trace.stop("user_closed")
        interaction.trace.ok = True
        await self._game.score(interaction.trace)


class _Interaction:
    """Replaces the conversation that `run` expects, with the same errors as in verifiers."""

    def __init__(self, game: Game, trace: Trace) -> None:
        self.trace = trace
        self._game = game
        self._prompted = trace.task.data.prompt is not None
        self._over = False

    async def turn(self, message: str | vf.Messages | None = None) -> vf.Segment:
        if self._over:
            raise RuntimeError("the exchange is over (the run ended); read interaction.trace")
        if (message is None) != self._prompted:
            raise ValueError("a prompted task opens with a bare turn(); every other turn takes a message")
        response = await self._game.turn(self._observation(message))
        if response is None:
            self._over = True
            self.trace.stop("max_turns")
            return vf.Segment(messages=[], terminated=True)
        return vf.Segment(messages=record_turn(self.trace, response))

    def _observation(self, message: str | vf.Messages | None) -> str:
        """The text for the model: the message, or the last message of the prompt."""
        if message is None:
            self._prompted = False
            last: str = content_text(self.trace.messages[-1].content)
            return last
        if isinstance(message, str):
            messages: vf.Messages = [vf.UserMessage(content=message)]
        else:
            messages = [parse_message(each) if isinstance(each, dict) else each for each in message]
        record_prompt(self.trace, messages)
        return "\n\n".join(content_text(each.content) for each in messages)


class ActiveRollout(NamedTuple):
    """A rollout under way."""

    trace: Trace
    tools: Toolbox


@dataclass(frozen=True)
class Bridge:
    """A served environment. A session has `begun` after its first tool call, `game` after /reset."""

    environment: Environment
    source: Source
    shared: Toolbox
    tool_definitions: list[Json]
    deadline_s: float

    @classmethod
    @asynccontextmanager
    async def open(cls, source: Source, deadline_s: float) -> AsyncIterator[Bridge]:
        """Load and start the environment. Raises ConfigError if it cannot be served."""
        environment = load(source)
        shared = await Toolbox.open(type(environment.tasks).toolsets(environment.tasks.config))
        first = next(iter(environment.tasks.take(1)))
        own = await Toolbox.open(toolsets_of(environment), first.data)  # only to read the names of its tools
        await own.stack.aclose()
        if both := shared.tools.keys() & own.tools.keys():
            raise ConfigError(f"environment {source.environment!r} has two tools called {min(both)!r}")
        async with shared.stack, pool.lifespan():
            await environment.env.start()
            try:
                yield cls(environment, source, shared, shared.tool_definitions + own.tool_definitions, deadline_s)
            finally:
                await environment.env.stop()

    def rows(self, skip: int, limit: int) -> list[bytes]:
        """Tasks as rows. A turn-based environment shows the last prompt message as its first observation."""
        return [orjson.dumps(self._row(task)) + b"\n" for task in self.environment.tasks.skip(skip).take(limit)]

    def _row(self, task: vf.Task[Any, Any, Any]) -> Json:
        prompt = prompt_of(task.data)
        if self.environment.by_turns and task.data.prompt is not None:
            prompt = prompt[:-1]
        params: Json = {"input": items_of(prompt)}
        if self.tool_definitions:
            params["tools"] = self.tool_definitions
        return {
            "responses_create_params": params,
            "task_data": task.data.model_dump(mode="json", exclude_defaults=True),
        }

    async def reset(self, data: Json, session: Session) -> str:
        """Begin an episode. Returns the first observation."""
        if not self.environment.by_turns:
            raise ServiceError(f"{self.source.environment!r} is not turn-based; use agents/simple", status=409)
        game = session["game"] = Game(self.environment, self.environment.task(data), self._score)
        session.when_over(game.abandon)
        observation = await game.observe()
        if observation is None:
            raise ServiceError(
                f"the environment was over before the model's first turn: {game.problem}", failure="tool_error"
            )
        return observation

    async def call(self, name: str, arguments: Json, session: Session) -> str | list[str | Image]:
        """Call a tool. Returns its answer."""
        rollout = await self._rollout_of(session["task"]["task_data"], session)
        box = rollout.tools if name in rollout.tools.tools else self.shared
        return await box.call(name, arguments, rollout.trace.state)

    async def finish(self, data: Json, response: Json, session: Session) -> Trace:
        """The trace of a rollout with its rewards. A stored rollout, whose session is gone, is replayed.

        Raises:
            NotScored: the environment raised, or its rewards took too long.
        """
        try:
            if self.environment.by_turns:
                return await self._play_game(data, response, session)
            if "begun" not in session:
                session["task"] = {"task_data": data}
                await self._repeat_calls(response, session)
            trace = (await self._rollout_of(data, session)).trace
            record_turn(trace, response)
            trace.stop("agent_completed")
            trace.ok = True
            await self._score(trace)
            return trace
        finally:
            session.over()

    async def _play_game(self, data: Json, response: Json, session: Session) -> Trace:
        if "game" not in session:
            await self.reset(data, session)
            for turn in turns_of(response):
                if await session["game"].say({**response, "output": turn}) is None:
                    break
        game: Game = session["game"]
        try:
            return await game.finish()
        except NotScored:
            raise
        except Exception as error:  # `run` is code of the environment's author
            raise NotScored("verify_error", f"{type(error).__name__}: {error}") from error

    async def _repeat_calls(self, response: Json, session: Session) -> None:
        """Repeat the tool calls, because the rewards read the state that they change."""
        names = {tool["name"] for tool in self.tool_definitions}
        for call in calls_in(response):
            if call.name in names and call.arguments is not None:
                await self.call(call.name, call.arguments, session)

    async def _rollout_of(self, data: Json, session: Session) -> ActiveRollout:
        """The input of tools and rewards. Created once per session, also for concurrent first calls; again after a
        failure.
        """
        if "begun" not in session:
            session["begun"] = session.spawn(self._begin(data, session))
        task: asyncio.Task[ActiveRollout] = session["begun"]
        try:
            return await asyncio.shield(task)
        except Exception:
            if session.get("begun") is task:
                del session["begun"]
            raise

    async def _begin(self, data: Json, session: Session) -> ActiveRollout:
        task = self.environment.task(data)
        tools = await Toolbox.open(toolsets_of(self.environment), task.data)
        try:
            game: Game | None = session.get("game")
            trace = game.traces[0] if game else await self.environment.begin(task)
        except BaseException:
            await tools.stack.aclose()
            raise
        session.when_over(tools.stack.aclose)
        return ActiveRollout(trace, tools)

    async def _score(self, trace: Trace) -> None:
        await score_trace(self.source, trace, self.deadline_s)


class Options(ServiceOptions):
    environment: str = Field(description="The id of an installed environment: the name of its package.")
    path: InputFolder | None = Field(
        default=None, description="Another folder to search for it, relative to the config file."
    )
    taskset: dict[str, Any] = Field(default={}, description="The environment's own options.")
    deadline_s: float = Field(default=30.0, gt=0, description="CPU seconds for the rewards of one rollout.")


class Task(VerifyRequest):
    task_data: dict[str, Any] = Field(description="The task in the format of verifiers; GET /rows returns such rows.")


@asynccontextmanager
async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
    options: Options = context.options
    path = str(options.path.resolve()) if options.path else None
    source = Source(environment=options.environment, path=path, taskset=options.taskset)
    async with Bridge.open(source, options.deadline_s) as bridge:
        app.state.bridge = bridge
        for described in bridge.tool_definitions:
            register_tool(app, Tool(described, partial(call_tool, described["name"])))
        yield


async def verify(task: Task, session: Session) -> Json:
    bridge: Bridge = app.state.bridge
    try:
        trace = await bridge.finish(task.task_data, task.response, session)
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
        await bridge.finish(task.task_data, PLAIN_RESPONSE, Session())
    except NotScored:
        return False
    return True


async def call_tool(name: str, arguments: Json, session: Session, request: Request) -> Response:
    with Boundary("tool_error", f"{name} failed", places=True, retryable=True):
        answer: str | list[str | Image] = await app.state.bridge.call(name, arguments, session)
        if isinstance(answer, str):
            return Response(answer.encode("utf-8", "replace"), media_type="text/plain")
        return tool_response(answer, name, "")


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
    with Boundary("config", "the tasks cannot be written as rows"):
        lines = await run_sync(app.state.bridge.rows, max(skip, 0), max(limit, 0))
    return Response(b"".join(lines), media_type=ROWS)


app = step_server(task=Task, reset=reset, step=step, verify=verify, options=Options, lifespan=lifespan)
add_route(app, "GET", "/rows", rows, summary="Tasks of the environment as rows, one per line", answers=[ROWS])
