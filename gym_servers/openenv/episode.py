"""One episode on an OpenEnv server: a WebSocket connection, which is the server's session, from reset to the last step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from openenv.core.client_types import StepResult
from openenv.core.generic_client import GenericEnvClient

from ngym.errors import Overloaded, ServiceError
from ngym.schema import Json

from .server import Server


class Refused(Exception):
    """The server does not take this action; the text is for the model."""


class Episode:
    """rewards: those that the server gave, a number a step; None where it gave none."""

    def __init__(self, server: Server) -> None:
        self._client = GenericEnvClient(
            server.url, message_timeout_s=server.timeout_s, headers=server.headers or None, mode="simulation"
        )
        self._connection: object = None
        self.rewards: list[float | None] = []
        self.done = False

    async def reset(self, arguments: Json) -> Json:
        """Begin -> the first observation."""
        try:
            await self._client.connect()
        except ConnectionError as error:
            raise ServiceError(str(error), failure="tool_error", retryable=True) from error
        self._connection = self._client._ws
        begun = await self._send("reset", lambda: self._client.reset(**arguments))
        self.done = bool(begun.done)
        observation: Json = begun.observation
        return observation

    async def act(self, action: Json) -> Json:
        """One step -> what was observed. Refused for an action that is not of the server's kind."""
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
        """The sum over the steps; None when steps were made and none was rewarded, which is no verdict."""
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) if given or not self.rewards else None

    async def _send(self, what: str, send: Callable[[], Awaitable[StepResult[Json]]]) -> StepResult[Json]:
        self._same_connection(what)
        try:
            result = await send()
        except RuntimeError as error:  # how the client tells an error message of the server's, its code within the text
            told = str(error)
            if "(code: VALIDATION_ERROR)" in told:
                raise Refused("This is no action that the environment takes.") from error
            if "(code: CAPACITY_REACHED)" in told:
                raise Overloaded(f"{told}; lower `episodes` in the stanza, or raise the server's own limit") from error
            raise ServiceError(f"{what} failed: {told}", failure="tool_error") from error
        except Exception as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise ServiceError(f"{what} failed: {reason}", failure="tool_error", retryable=True) from error
        self._same_connection(what)
        return result

    def _same_connection(self, what: str) -> None:
        """The client connects anew by itself when a connection is lost, and is then in another, fresh episode."""
        if self._client._ws is not self._connection:
            told = f"{what} failed: the connection was lost or closed, and the episode with it"
            raise ServiceError(told, failure="tool_error", retryable=True)


def shown(observation: Json) -> str:
    """An observation as text: JSON without what is empty, or the text itself where there is nothing else."""
    said = {key: value for key, value in observation.items() if key != "metadata" and value not in (None, "", [], {})}
    if len(said) == 1 and isinstance(text := next(iter(said.values())), str):
        return text
    return orjson.dumps(said).decode()
