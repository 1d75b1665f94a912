"""A verifiers `Env` played turn by turn: its `run` is a separate task, which waits for the model's turns.

run(task, agents)    agents.player.interaction(task).turn("your move")  ->  observation ─┐
                                                 Segment(...)           <-  the turn   <─┘  /reset, /step
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import verifiers.v1 as vf
from verifiers.v1.dialects import parse_message
from verifiers.v1.types import content_text

from ngym.schema import Json

from .environment import Environment, record_prompt, record_turn

Trace: TypeAlias = vf.Trace[Any, Any, Any]
Score = Callable[[Trace], Awaitable[None]]


class Game:
    """One episode."""

    def __init__(self, environment: Environment, task: vf.Task[Any, Any, Any], score: Score) -> None:
        self.environment = environment
        self.task = task
        self.score = score
        self.traces: list[Trace] = []
        self._shown: asyncio.Queue[str | None] = asyncio.Queue()
        self._said: asyncio.Queue[Json | None] = asyncio.Queue()
        self._run = asyncio.create_task(self._play())

    async def observe(self) -> str | None:
        """The next observation, or None when `run` is over. `finish` raises its error, if any."""
        shown = await self._shown.get()
        if shown is None:
            self._shown.put_nowait(None)  # for later calls
        return shown

    @property
    def problem(self) -> str:
        """Why `run` ended early."""
        error = self._run.exception() if self._run.done() else None
        return "it made no move" if error is None else f"{type(error).__name__}: {error}"

    async def say(self, response: Json) -> str | None:
        """Pass on the model's turn. Returns the next observation."""
        self._said.put_nowait(response)
        return await self.observe()

    async def finish(self) -> Trace:
        """The trace with its rewards. An unfinished `run` sees its turn as `terminated`, as at verifiers' limits."""
        self._said.put_nowait(None)
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
            self._shown.put_nowait(None)

    async def turn(self, observation: str) -> Json | None:
        self._shown.put_nowait(observation)
        return await self._said.get()


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
        said = await self._game.turn(self._observation(message))
        if said is None:
            self._over = True
            self.trace.stop("max_turns")
            return vf.Segment(messages=[], terminated=True)
        return vf.Segment(messages=record_turn(self.trace, said))

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
