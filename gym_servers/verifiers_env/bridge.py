"""Connects the gym server's routes with a verifiers environment: session state, replay and scoring of rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import orjson
import verifiers.v1 as vf

from ngym import Session
from ngym.errors import ConfigError, ServiceError
from ngym.rollout import calls_in
from ngym.schema import Json
from ngym.services.gym.step_server import turns_of

from .environment import Environment, Source, items_of, load, prompt_of, record_turn
from .scoring import NotScored, pool, scored
from .toolbox import Toolbox, shared_toolsets_of, toolsets_of
from .turns import Game

Trace: TypeAlias = vf.Trace[Any, Any, Any]


class Begun(NamedTuple):
    """A rollout under way."""

    trace: Trace
    tools: Toolbox


@dataclass(frozen=True)
class Bridge:
    """A served environment. A session has `begun` after its first tool call, `game` after /reset."""

    environment: Environment
    source: Source
    shared: Toolbox
    described: list[Json]
    deadline_s: float

    @classmethod
    @asynccontextmanager
    async def open(cls, source: Source, deadline_s: float) -> AsyncIterator[Bridge]:
        """Load and start the environment. Raises ConfigError if it cannot be served."""
        environment = load(source)
        shared = await Toolbox.open(shared_toolsets_of(environment))
        first = next(iter(environment.tasks.take(1)))
        own = await Toolbox.open(toolsets_of(environment), first.data)  # only to read the names of its tools
        await own.stack.aclose()
        if both := shared.tools.keys() & own.tools.keys():
            raise ConfigError(f"environment {source.environment!r} has two tools called {min(both)!r}")
        async with shared.stack, pool.lifespan():
            await environment.env.start()
            try:
                yield cls(environment, source, shared, shared.described + own.described, deadline_s)
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
        if self.described:
            params["tools"] = self.described
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

    async def call(self, name: str, arguments: Json, session: Session) -> str:
        """Call a tool. Returns its answer."""
        begun = await self._begun(session["task"]["task_data"], session)
        box = begun.tools if name in begun.tools.tools else self.shared
        return await box.call(name, arguments, begun.trace.state)

    async def finished(self, data: Json, response: Json, session: Session) -> Trace:
        """The trace of a rollout with its rewards. A stored rollout, whose session is gone, is replayed.

        Raises:
            NotScored: the environment raised, or its rewards took too long.
        """
        try:
            if self.environment.by_turns:
                return await self._played(data, response, session)
            if "begun" not in session:
                session["task"] = {"task_data": data}
                await self._repeat_calls(response, session)
            trace = (await self._begun(data, session)).trace
            record_turn(trace, response)
            trace.stop("agent_completed")
            trace.ok = True
            await self._score(trace)
            return trace
        finally:
            session.over()

    async def _played(self, data: Json, response: Json, session: Session) -> Trace:
        if "game" not in session:
            await self.reset(data, session)
            for turn in turns_of(response.get("output") or []):
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
        names = {tool["name"] for tool in self.described}
        for call in calls_in(response):
            if call.name in names and call.arguments is not None:
                await self.call(call.name, call.arguments, session)

    async def _begun(self, data: Json, session: Session) -> Begun:
        """What tools and rewards need. Created once per session, also for concurrent first calls."""
        if "begun" not in session:
            session["begun"] = session.spawn(self._begin(data, session))
        begun: Begun = await asyncio.shield(session["begun"])
        return begun

    async def _begin(self, data: Json, session: Session) -> Begun:
        task = self.environment.task(data)
        tools = await Toolbox.open(toolsets_of(self.environment), task.data)
        session.when_over(lambda: asyncio.ensure_future(tools.stack.aclose()))
        game: Game | None = session.get("game")
        return Begun(game.traces[0] if game else await self.environment.begin(task), tools)

    async def _score(self, trace: Trace) -> None:
        await scored(self.source, trace, self.deadline_s)
