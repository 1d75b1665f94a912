"""The tools of a gym server through the MCP SDK, in stateless mode: state is in the rollout's session, not the SDK's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import mcp_types as types
import orjson
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.requests import Request

from ngym.errors import ServiceError
from ngym.schema import PARTS, TOOL_OUTPUT_HEADER, Json
from ngym.services.gym.tools import Tool

Context = ServerRequestContext[Any, Request]

MAX_BODY_BYTES = 16 * 1024 * 1024

logging.getLogger("mcp").setLevel(logging.WARNING)  # it logs each request


def manager(name: str, tools: Mapping[str, Tool]) -> StreamableHTTPSessionManager:
    """The handler of MCP requests for all protocol versions of the SDK; each answer is one JSON document.

    Args:
        name: of the service.
        tools: name -> tool; read again for each request.
    """

    async def list_tools(context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_describe(tool.definition) for tool in tools.values()])

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = tools.get(params.name)
        if tool is None:
            return _text_result(
                f"there is no tool {params.name!r}. Tools: {', '.join(tools) or 'none'}.", is_error=True
            )
        request = context.request
        assert request is not None  # it came over HTTP
        try:
            answer = await tool.answer(params.arguments or {}, request.state.session, request)
        except ServiceError as error:
            if not error.is_for_the_model:
                raise MCPError(types.INTERNAL_ERROR, error.detail, error.problem()) from error
            return _text_result(error.detail, is_error=True)
        if answer.headers.get(TOOL_OUTPUT_HEADER) == PARTS:
            return types.CallToolResult(content=[_content(part) for part in orjson.loads(answer.body)])
        return _text_result(bytes(answer.body).decode("utf-8", "replace"))

    server = Server(name, version=version("ngym"), on_list_tools=list_tools, on_call_tool=call_tool)
    return StreamableHTTPSessionManager(
        server, json_response=True, stateless=True, max_request_body_size=MAX_BODY_BYTES
    )


def _describe(tool: Json) -> types.Tool:
    return types.Tool(name=tool["name"], description=tool["description"], input_schema=tool["parameters"])


def _text_result(text: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=is_error)


def _content(part: Json) -> types.ContentBlock:
    if part["type"] == "input_text":
        return types.TextContent(text=part["text"])
    begin, _, data = part["image_url"].partition(";base64,")
    return types.ImageContent(data=data, mime_type=begin.removeprefix("data:"))
