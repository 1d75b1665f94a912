"""An environment's toolsets in this process; verifiers would start a server for each toolset and rollout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import ValidationError

from ngym.errors import ConfigError, ServiceError
from ngym.schema import Json
from ngym.services.gym.tools import RESERVED

from .environment import Environment

_state: ContextVar[vf.State] = ContextVar("state")  # state of the rollout whose tool is running
Toolsets = Sequence[vf.Toolset[Any, Any]]


@dataclass(frozen=True)
class Toolbox:
    """Toolsets that are ready, with their tools by verifiers' names, `<server>_<tool>`."""

    tools: dict[str, tuple[MCPServer, str]]
    described: list[Json]
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

    async def call(self, name: str, arguments: Json, state: vf.State) -> str:
        """The tool's answer, or its refusal, as the text that the model sees.

        Raises:
            ServiceError: the answer is not text. Any exception of the tool but MCP's ToolError is raised unchanged.
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
        texts = [getattr(block, "text", None) for block in getattr(result, "content", [])]
        if not all(isinstance(text, str) for text in texts):
            raise ServiceError(f"tool {name!r} answered with more than text", failure="tool_error")
        return "\n".join(str(text) for text in texts)

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
        self.described.append(
            {
                "type": "function",
                "name": name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
                "strict": False,
            }
        )


def toolsets_of(environment: Environment) -> Toolsets:
    """New toolsets for one rollout."""
    toolsets: Toolsets = environment.task_type.toolsets(environment.tasks.config.task)
    return toolsets


def shared_toolsets_of(environment: Environment) -> Toolsets:
    """New toolsets that all rollouts share."""
    toolsets: Toolsets = type(environment.tasks).toolsets(environment.tasks.config)
    return toolsets


def _bind(toolset: vf.Toolset[Any, Any]) -> None:
    """Give the toolset the rollout's state itself; verifiers would copy it before and after each call."""

    async def pull() -> vf.State:
        return _state.get()

    async def push(before: bytes) -> None:
        return None

    toolset._pull_state = pull
    toolset._push_state = push
