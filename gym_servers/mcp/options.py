"""What a stanza says of its MCP server: where it is, or how it is started, and its limits."""

from typing import Literal

from pydantic import Field, field_validator

from ngym import ServiceOptions


class Options(ServiceOptions):
    server: str | list[str] = Field(description="The URL of an MCP server, or the command that starts one (stdio).")
    transport: Literal["http", "sse"] = Field(
        default="http", description="Of a URL: streamable HTTP, or the older SSE."
    )
    headers: dict[str, str] = Field(default={}, description="Sent to a URL, such as Authorization.")
    env: dict[str, str] = Field(default={}, description="A command's environment, beside PATH, HOME and the like.")
    shared: bool = Field(default=False, description="One connection for all rollouts: only for servers without state.")
    max_servers: int = Field(default=16, ge=1, description="Connections (of a command: processes) at a time.")
    start_timeout_s: float = Field(default=120, gt=0, description="To start one, and to wait for a place.")
    timeout_s: float = Field(default=60, gt=0, description="Of a call.")
    idle_s: float = Field(
        default=900, gt=0, description="A rollout's server that nobody asks anything so long is stopped."
    )
    verify: str | None = Field(default=None, description="A Python file with a `verify` of yours.")

    @field_validator("server")
    @classmethod
    def _is_one(cls, server: str | list[str]) -> str | list[str]:
        if not server or (isinstance(server, str) and not server.startswith(("http://", "https://"))):
            raise ValueError("must be a URL (http://...) or a command as a list ([npx, -y, some-server])")
        return server
