"""mcp: any MCP server as an environment, with its tools. Scores answer and calls by the row, or by your verify."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Protocol, Self

import mcp_types as types
import orjson
from fastapi import Request
from pydantic import BaseModel, StrictFloat, StrictInt, field_validator, model_validator
from starlette.responses import Response

from ngym import ServiceContext, Session, ToolError, VerifyRequest, gym_server
from ngym.config.shipped_files import shipped_file
from ngym.errors import ConfigError
from ngym.grading.answers import number, same_number, short
from ngym.grading.text_match import exact
from ngym.rollout import calls_in
from ngym.services.gym.server import ReferenceText
from ngym.services.gym.tools import RESERVED, Tool, inspected, offer

from .connection import Connections, Options

log = logging.getLogger("ngym.mcp")
MAX_NAME_CHARS = 64  # of a function's name in OpenAI's APIs
MAX_DESCRIPTION_CHARS = 4000
MAX_RESULT_CHARS = 200_000


class Calls(Protocol):
    async def call(self, session: Session, tool: str, arguments: dict[str, Any]) -> types.CallToolResult: ...


def offered(tools: Sequence[types.Tool], server: Calls) -> Iterator[Tool]:
    """The server's tools as ours. A tool whose schema cannot be written as JSON is left out and logged."""
    taken: set[str] = set()
    for tool in tools:
        name = named(tool.name, taken)
        taken.add(name)
        if name != tool.name:
            log.warning("the MCP server's tool %.100r is called %r here", tool.name, name)
        try:
            schema = {"properties": {}} | orjson.loads(json.dumps(tool.input_schema)) | {"type": "object"}
        except ValueError as error:
            log.warning("the MCP server's tool %.100r is left out: its schema is not JSON: %s", tool.name, error)
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
    """A unique, valid function name that is not a route: verify -> verify_tool, browser.click -> browser_click."""
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
    """The body of a tool's answer: text that is JSON goes unchanged, other text as a JSON string."""
    said = _utf8(text)
    try:
        orjson.loads(said)
    except orjson.JSONDecodeError:
        return orjson.dumps(said.decode())
    return said


def text_of(result: types.CallToolResult) -> str:
    """The texts of a result; other parts are only named. A result with structured content only is shown as JSON."""
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


class Call(BaseModel):
    name: str
    arguments: dict[str, Any] = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_object(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value


class Task(VerifyRequest):
    expected_answer: ReferenceText | StrictInt | StrictFloat | None = None
    expected_tool_calls: list[Call] | None = None

    @model_validator(mode="after")
    def _says_what_is_right(self) -> Self:
        if self.expected_answer is None and self.expected_tool_calls is None:
            raise ValueError("needs expected_answer or expected_tool_calls, or your own `verify` in the stanza")
        return self


async def verify(task: Task) -> dict[str, Any]:
    """1 if the final answer and the calls are the expected ones; checks only what the row has."""
    answered = None if task.expected_answer is None else _is(task.text, task.expected_answer)
    called = None if task.expected_tool_calls is None else _called(task.response, task.expected_tool_calls)
    return {"reward": float(answered is not False and called is not False), "answered": answered, "called": called}


def _is(text: str, expected: str | float) -> bool:
    try:
        wanted = Decimal(str(expected))
    except InvalidOperation:
        return exact(short(text) or "", [str(expected)])
    found = number(text)
    return found is not None and same_number(found, wanted)


def _called(response: dict[str, Any], expected: list[Call]) -> bool:
    """Whether the expected tools got exactly the expected calls, in any order. [] allows no call at all."""
    names = {call.name for call in expected}
    counted = [call for call in calls_in(response) if call.name in names or not expected]
    made = Counter(_spelled(call.name, call.arguments) for call in counted)
    return made == Counter(_spelled(call.name, call.arguments) for call in expected)


def _spelled(name: str, arguments: dict[str, Any] | None) -> str:
    """A key that is equal for equal JSON: 3 is 3.0, and 1 is not true."""
    return f"{name} {json.dumps(_plain(arguments), sort_keys=True)}"


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case float() if value.is_integer():
            return int(value)
    return value


@asynccontextmanager
async def serving(context: ServiceContext) -> AsyncIterator[None]:
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request
    options: Options = context.options
    if options.verify is not None:
        file = shipped_file(options.verify, context.root, "verify")
        app.state.verifier = inspected(_verify_in(file), VerifyRequest)
    async with Connections(options, context.root) as connections:
        for tool in offered(await connections.list_tools(), connections):
            offer(app, tool)
        yield


def _verify_in(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_ngym_mcp_verify", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"verify: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "verify"):
        raise ConfigError(f"verify: {file} has no function `verify(task: <a VerifyRequest>, [session: Session])`")
    return module.verify


app = gym_server(verify=verify, options=Options, lifespan=serving)
