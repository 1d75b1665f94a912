"""What an OpenEnv server is asked once, at the start: the JSON Schema of its actions, or the tools that it offers over MCP."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx
import orjson
from openenv.core.generic_client import GenericEnvClient

from ngym.errors import ConfigError
from ngym.schema import Json

MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # what a server of tools calls its actions


@dataclass(frozen=True)
class Server:
    """tools: as the Responses API wants them; empty for an environment with actions of its own."""

    url: str
    timeout_s: float
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    action: Json = field(default_factory=dict)
    tools: tuple[Json, ...] = ()

    @property
    def single(self) -> str | None:
        """The one field that an action must have, if it is a plain value: then the value alone is an action."""
        required = self.action.get("required") or []
        if len(required) != 1 or self._kind(required[0]) not in ("string", "integer", "number"):
            return None
        return str(required[0])

    def is_text(self, name: str) -> bool:
        """Whether the field is a text, so that `42` is no number there."""
        return self._kind(name) == "string"

    def _kind(self, name: str) -> object:
        return self.action.get("properties", {}).get(name, {}).get("type")

    @property
    def manual(self) -> str:
        """What the model is told about answering."""
        own = {name: value for name, value in self.action.get("properties", {}).items() if name != "metadata"}
        schema = orjson.dumps({**self.action, "properties": own}).decode()
        return (
            f"Answer each observation with one action, a JSON object that fits this schema, and nothing else: {schema}"
        )


async def asked(server: Server) -> Server:
    """The server with what it says about itself. ConfigError when it cannot be reached, or is no OpenEnv server."""
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
    except Exception as error:  # of the client, the connection or the environment: none of them has a base of its own
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
