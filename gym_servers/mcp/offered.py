"""An MCP server's tools as ours: names that a model and a route can have, and what it answers as the text that a model sees."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mcp_types as types
import orjson
from fastapi import Request
from starlette.responses import Response

from ngym import Session, ToolError
from ngym.services.gym.tools import RESERVED, Tool

log = logging.getLogger("ngym.mcp")

MAX_NAME_CHARS = 64  # of a function's name in OpenAI's APIs
MAX_DESCRIPTION_CHARS = 4000
MAX_RESULT_CHARS = 200_000


class Calls(Protocol):
    async def call(self, session: Session, tool: str, arguments: dict[str, Any]) -> types.CallToolResult: ...


def offered(tools: Sequence[types.Tool], server: Calls) -> Iterator[Tool]:
    """Each of them; what cannot be written as JSON is left out, with a line in the log."""
    taken: set[str] = set()
    for tool in tools:
        name = named(tool.name, taken)
        taken.add(name)
        if name != tool.name:
            log.warning("the MCP server's tool %.100r is called %r here", tool.name, name)
        try:
            schema = {"properties": {}} | orjson.loads(json.dumps(tool.input_schema)) | {"type": "object"}
        except ValueError as error:
            log.warning("the MCP server's tool %.100r is left out: its schema is no JSON: %s", tool.name, error)
            continue
        description = _utf8((tool.description or "")[:MAX_DESCRIPTION_CHARS]).decode()
        described = {
            "type": "function",
            "name": name,
            "description": description,
            "parameters": schema,
            "strict": False,
        }
        yield Tool(described, _asking(server, tool.name))


def named(theirs: str, taken: set[str]) -> str:
    """`verify` is a route of every gym server, and `browser.click` no function's name: verify_tool, browser_click."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", theirs)[: MAX_NAME_CHARS - 5]
    if name in RESERVED or not name.strip("_-"):
        name = f"{name.strip('_-')}_tool".lstrip("_")
    number = 2
    plain = name
    while name in taken:
        name, number = f"{plain}_{number}", number + 1
    return name


def _asking(server: Calls, tool: str) -> Any:
    async def call(arguments: dict[str, Any], session: Session, request: Request) -> Response:
        result = await server.call(session, tool, arguments)
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or f"{tool} failed")
        return Response(as_json(text), media_type="application/json")

    return call


def as_json(text: str) -> bytes:
    """A tool's answer is JSON on our wire: a text that is JSON goes as it is, another as a string."""
    said = _utf8(text)
    try:
        orjson.loads(said)
    except orjson.JSONDecodeError:
        return orjson.dumps(said.decode())
    return said


def text_of(result: types.CallToolResult) -> str:
    """Its texts; what is no text is named. A result that is structured alone is shown as JSON."""
    text = "\n".join(_shown(part) for part in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[{len(text) - MAX_RESULT_CHARS} more characters are not shown]"
    return text


def _shown(part: types.ContentBlock) -> str:
    match part:
        case types.TextContent():
            return part.text
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.EmbeddedResource():
            return f"[a file that is not shown: {part.resource.uri}, {part.resource.mime_type}]"
        case types.ResourceLink():
            return f"[a link: {part.name}, {part.uri}]"
    return f"[{part.type} that is not shown: {part.mime_type}, {len(part.data) * 3 // 4:,} bytes]"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")
