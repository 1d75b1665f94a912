"""A client of an OpenEnv server: its description, and one episode on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import orjson
from openenv.core.client_types import StepResult
from openenv.core.generic_client import GenericEnvClient

from ngym.errors import ConfigError, Overloaded, ServiceError
from ngym.schema import Json

MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # action schemas of a server of MCP tools


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


async def asked(server: Server) -> Server:
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
        listed = (await client.step({"type": "list_tools"})).observation["tools"]
    except Exception as error:  # client, connection and environment errors have no common base class
        raise ConfigError(f"the tools of {server.url} cannot be listed: {type(error).__name__} {error}") from error
    finally:
        await client.close()
    return tuple(
        {
            "type": "function",
            "name": tool["name"],
            "description": tool["description"],
            "parameters": tool["input_schema"],
            "strict": False,
        }
        for tool in listed
    )


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
        begun = await self._send("reset", lambda: self._client.reset(**arguments))
        self.done = bool(begun.done)
        observation: Json = begun.observation
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
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) if given or not self.rewards else None

    async def _send(self, what: str, send: Callable[[], Awaitable[StepResult[Json]]]) -> StepResult[Json]:
        self._same_connection(what)
        try:
            result = await send()
        except RuntimeError as error:  # the client's form of a server error, with its code in the text
            told = str(error)
            if "(code: VALIDATION_ERROR)" in told:
                raise Refused("The environment does not accept this action.") from error
            if "(code: CAPACITY_REACHED)" in told:
                raise Overloaded(f"{told}; lower `episodes` in the stanza, or raise the server's own limit") from error
            raise ServiceError(f"{what} failed: {told}", failure="tool_error") from error
        except Exception as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise ServiceError(f"{what} failed: {reason}", failure="tool_error", retryable=True) from error
        self._same_connection(what)
        return result

    def _same_connection(self, what: str) -> None:
        """Fail if the client has reconnected by itself, because it is then in a new episode."""
        if self._client._ws is not self._connection:
            told = f"{what} failed: the connection was lost or closed, and the episode with it"
            raise ServiceError(told, failure="tool_error", retryable=True)


def shown(observation: Json) -> str:
    """An observation as text: JSON without empty members, or the plain text if that is the only member."""
    said = {key: value for key, value in observation.items() if key != "metadata" and value not in (None, "", [], {})}
    if len(said) == 1 and isinstance(text := next(iter(said.values())), str):
        return text
    return orjson.dumps(said).decode()
