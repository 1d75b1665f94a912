"""mcp: any MCP server as an environment, with its tools. Scores answer and calls by the row, or by your verify."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx2
import mcp_types as types
import orjson
from fastapi import Request
from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import BaseModel, Field, StrictFloat, StrictInt, ValidationError, field_validator, model_validator
from starlette.responses import Response

from ngym import ServiceContext, ServiceError, ServiceOptions, Session, ToolError, VerifyRequest, gym_server
from ngym.config.import_path import load_file
from ngym.config.shipped_files import shipped_file
from ngym.errors import ConfigError, Overloaded, PeerTimeout, Unreachable, UpstreamError
from ngym.grading.answers import number, same_number, short
from ngym.grading.text_match import exact
from ngym.rollout import calls_in
from ngym.schema import RESERVED
from ngym.services.gym.results import Image, has_image, tool_response
from ngym.services.gym.server import ReferenceText
from ngym.services.gym.tools import Tool, describe_tool, exact_arguments, inspect_function, register_tool

log = logging.getLogger("ngym.mcp")
MAX_TOOLS = 1000
WRITE_S = 1.0  # to send a call; the SDK's timeout starts after that
PLACE_S = 60.0  # a call waits for a place; agents, which wait 120 s by default, then learn why and repeat the call
# The server is broken or gone. Other errors (unknown tool, wrong arguments, its own codes) are answers for the model.
BROKEN = (types.INTERNAL_ERROR, types.INVALID_REQUEST, types.PARSE_ERROR, types.CONNECTION_CLOSED)
MAX_NAME_CHARS = 64  # of a function's name in OpenAI's APIs
MAX_DESCRIPTION_CHARS = 4000
MAX_RESULT_CHARS = 200_000
LARGE = 1 << 63


class Options(ServiceOptions):
    server: str | list[str] = Field(description="The URL of an MCP server, or the command that starts one (stdio).")
    transport: Literal["http", "sse"] = Field(
        default="http", description="For a URL: streamable HTTP, or the older SSE."
    )
    headers: dict[str, str] = Field(default={}, description="Sent to a URL, such as Authorization.")
    env: dict[str, str] = Field(
        default={}, description="Variables for a command, in addition to PATH, HOME and the like."
    )
    shared: bool = Field(default=False, description="One connection for all rollouts; only for servers without state.")
    max_servers: int = Field(default=16, ge=1, description="Most connections (for a command: processes) at a time.")
    start_timeout_s: float = Field(
        default=120,
        gt=0,
        description="To start a server, and for the list of its tools. A call waits no longer than this, and at most a "
        "minute, until one of max_servers is free; the caller then repeats it.",
    )
    timeout_s: float = Field(default=60, gt=0, description="For one call.")
    idle_s: float = Field(default=900, gt=0, description="A rollout's server without a call for this long is stopped.")
    show_images: bool = Field(
        default=False, description="The model sees the images in results. Only for models that read images."
    )
    verify: str | None = Field(default=None, description="A Python file with your own `verify`.")

    @field_validator("server")
    @classmethod
    def _is_one(cls, server: str | list[str]) -> str | list[str]:
        if not server or (isinstance(server, str) and not server.startswith(("http://", "https://"))):
            raise ValueError("must be a URL (http://...) or a command as a list ([npx, -y, some-server])")
        return server


class Connections:
    """All connections to one MCP server; they end with the block."""

    def __init__(self, options: Options, root: Path) -> None:
        self.options = options
        self.root = root
        self._places = asyncio.Semaphore(options.max_servers)
        self._alive: set[Connection] = set()
        self._shared: Connection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._alive:
            connection.end()
        await asyncio.gather(*(connection.task for connection in self._alive), return_exceptions=True)

    async def list_tools(self) -> list[types.Tool]:
        """The server's tools. Raises ConfigError if a command does not start, Unreachable if a URL does not answer."""
        connection = self._connect()
        try:
            return await connection.list_tools()
        except ServiceError as error:
            if isinstance(self.options.server, str):
                raise
            command = " ".join(" ".join(self.options.server).split())
            raise ConfigError(f"server: {command}: {error.detail} (its own output is above)") from error
        finally:
            if self.options.shared:
                self._shared = connection
            else:
                connection.end()

    async def call(self, session: Session, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        return await (await self._connection_of(session)).call(tool, arguments)

    async def _connection_of(self, session: Session) -> Connection:
        if self.options.shared:
            if self._shared is not None:
                await self._shared.wait_for_check()
            if self._shared is None or self._shared.is_over:
                self._shared = self._connect()
            return self._shared
        if "mcp" not in session or session["mcp"].found_no_place:
            connection = self._connect()
            session["mcp"] = connection
            session.when_over(connection.end)
        own: Connection = session["mcp"]
        return own

    def _connect(self) -> Connection:
        connection = Connection(self.options, self.root, self._places)
        self._alive.add(connection)
        connection.task.add_done_callback(lambda _: self._alive.discard(connection))
        return connection


class Connection:
    """One MCP session in its own task, because the SDK's scopes must end in the task that began them."""

    def __init__(self, options: Options, root: Path, places: asyncio.Semaphore) -> None:
        self._options = options
        self._places = places
        self._over = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._calls = 0
        self._answers = 0
        self._check: asyncio.Task[None] | None = None
        self._used = time.monotonic()
        self.task = asyncio.create_task(self._run_session(root))

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def found_no_place(self) -> bool:
        """Whether it could not start because others take all places; another one may now."""
        ended = self._client.done() and not self._client.cancelled()
        return ended and isinstance(self._client.exception(), Overloaded)

    def end(self) -> None:
        """Have its task close it; cancel the task if the server has not started yet."""
        self._over.set()
        if not self._client.done():
            self.task.cancel()

    async def call(self, tool: str, arguments: dict[str, Any] | None = None) -> types.CallToolResult:
        """The tool's answer, which may be an error result.

        Raises:
            ToolError: the server refuses the call.
            ServiceError: the server is dead, hangs or sends an invalid result.
        """
        timeout_s = self._options.timeout_s
        try:
            async with self._track_call():
                client = await self._ready()
                async with asyncio.timeout(timeout_s + WRITE_S):
                    result = await client.call_tool(tool, arguments or {}, read_timeout_seconds=timeout_s)
                self._answers += 1
                return result
        except TimeoutError:  # the server has stopped reading, so its pipe is full
            self._end_or_check()
            raise PeerTimeout(
                f"{tool}: the MCP server read nothing within {timeout_s:g} s (timeout_s) and {WRITE_S:g} s more"
            ) from None
        except MCPError as error:
            raise self._failure(error, tool, "timeout_s") from error
        except (RuntimeError, ValidationError) as error:
            raise UpstreamError(f"{tool}: the MCP server's result is invalid: {error}") from error

    async def list_tools(self) -> list[types.Tool]:
        tools: list[types.Tool] = []
        try:
            async with self._track_call():
                client, cursor = await self._ready(), None
                async with asyncio.timeout(self._options.start_timeout_s):
                    while len(tools) <= MAX_TOOLS:
                        page = await client.list_tools(cursor=cursor)
                        tools += page.tools
                        cursor = page.next_cursor
                        if not cursor:
                            return tools
        except MCPError as error:
            raise self._failure(error, "tools/list", "start_timeout_s") from error
        except TimeoutError:
            raise self._timeout_error("tools/list", "start_timeout_s") from None
        raise ConfigError(f"server: it lists more than {MAX_TOOLS} tools")

    async def _ready(self) -> Client:
        if self._over.is_set():
            raise Unreachable("this rollout's MCP server is gone: it died, hung, or was idle for too long")
        return await asyncio.shield(self._client)

    async def wait_for_check(self) -> None:
        """Wait for the check that follows a failed call, so that no further call goes to a broken server."""
        if self._check is not None:
            await asyncio.wait([self._check])

    def _end_or_check(self) -> None:
        """End a server that failed a call; a shared one only if it fails other calls, too."""
        if not self._options.shared:
            self.end()
        elif self._check is None or self._check.done():
            self._check = asyncio.create_task(self._end_if_unresponsive())

    async def _end_if_unresponsive(self) -> None:
        before = self._answers
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await (await self._ready()).list_tools()
            return
        except (TimeoutError, MCPError) as error:
            if isinstance(error, MCPError) and error.code not in (types.REQUEST_TIMEOUT, *BROKEN):
                return
        except (ServiceError, RuntimeError, ValidationError):
            return
        if self._answers == before:
            log.warning("the shared MCP server does not answer; the next call starts another one")
            self.end()

    async def _run_session(self, root: Path) -> None:
        try:
            async with self._place():
                limit = asyncio.get_running_loop().call_later(self._options.start_timeout_s, self._give_up_start)
                async with _client(self._options, root) as client:
                    limit.cancel()
                    self._client.set_result(client)
                    await self._wait_until_over()
        except Exception as error:  # noqa: BLE001  (reported to the waiting caller, or logged)
            if not self._client.done():
                self._fail(_connection_error(error))
            elif not self._over.is_set():
                log.warning("a connection to the MCP server broke: %s", _connection_error(error))
        finally:
            self._over.set()
            if self._check is not None:
                self._check.cancel()
            if not self._client.done():
                self._fail(Unreachable("the MCP server was stopped before it had started"))

    def _give_up_start(self) -> None:
        if not self._client.done():
            self._over.set()
            limit_s = self._options.start_timeout_s
            self._fail(PeerTimeout(f"the MCP server did not start within {limit_s:g} s (start_timeout_s)"))
            self.task.cancel()

    def _fail(self, error: ServiceError) -> None:
        self._client.set_exception(error)
        self._client.exception()  # marks it as retrieved: perhaps no caller waits any more

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of max_servers places. Raises Overloaded if none is free in time."""
        try:
            async with asyncio.timeout(min(PLACE_S, self._options.start_timeout_s)):
                await self._places.acquire()
        except TimeoutError:
            raise Overloaded(
                f"max_servers: {self._options.max_servers} MCP servers run for other rollouts; raise it, or collect "
                "with less --concurrency"
            ) from None
        try:
            yield
        finally:
            self._places.release()

    async def _wait_until_over(self) -> None:
        while not self._over.is_set():
            remaining_s = self._options.idle_s - (time.monotonic() - self._used)
            if remaining_s <= 0 and not self._calls and not self._options.shared:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), max(remaining_s, 1.0))

    @asynccontextmanager
    async def _track_call(self) -> AsyncIterator[None]:
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._used = time.monotonic()

    def _failure(self, error: MCPError, tool: str, limit: Literal["timeout_s", "start_timeout_s"]) -> ServiceError:
        """The error of a request. limit: the option that bounds its answer."""
        if error.code == types.REQUEST_TIMEOUT:
            self._end_or_check()
            return self._timeout_error(tool, limit)
        if error.code in BROKEN:
            self._end_or_check()
            return Unreachable(f"{tool}: the MCP server failed: {error.message}")
        self._answers += 1
        return ToolError(error.message)

    def _timeout_error(self, tool: str, limit: Literal["timeout_s", "start_timeout_s"]) -> ServiceError:
        limit_s = getattr(self._options, limit)
        return PeerTimeout(f"{tool}: the MCP server did not answer within {limit_s:g} s ({limit})")


@asynccontextmanager
async def _client(options: Options, root: Path) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        transport: Any
        if not isinstance(options.server, str):
            program, *arguments = options.server
            program = sys.executable if program == "python" else program
            parameters = StdioServerParameters(command=program, args=arguments, env=options.env, cwd=root)
            transport = stdio_client(parameters)
        elif options.transport == "sse":
            transport = sse_client(options.server, headers=options.headers)
        else:
            read_s = max(options.start_timeout_s, options.timeout_s)
            http = httpx2.AsyncClient(headers=options.headers, timeout=httpx2.Timeout(30, read=read_s))
            transport = streamable_http_client(options.server, http_client=await stack.enter_async_context(http))
        yield await stack.enter_async_context(
            # No cache: each call goes to the server.
            Client(transport, read_timeout_seconds=options.start_timeout_s, cache=None)
        )


def _connection_error(error: BaseException) -> ServiceError:
    """The reason of a failed connection. The SDK wraps one failure in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ServiceError):
        return error
    reason = " ".join(str(error).split())[:300]  # pydantic's has several lines
    return Unreachable(f"the MCP server cannot be reached: {type(error).__name__}: {reason}")


def callable_tools(tools: Sequence[types.Tool], server: Connections) -> Iterator[Tool]:
    """The server's tools as ours. A tool whose schema cannot be written as JSON is left out and logged."""
    used_names: set[str] = set()
    for tool in tools:
        name = function_name(tool.name, used_names)
        used_names.add(name)
        if name != tool.name:
            log.warning("the MCP server's tool %.100r is called %r here", tool.name, name)
        try:
            schema = {"properties": {}} | orjson.loads(json.dumps(tool.input_schema)) | {"type": "object"}
        except ValueError as error:
            log.warning("the MCP server's tool %.100r is left out: its schema is not JSON: %s", tool.name, error)
            continue
        description = _utf8((tool.description or "")[:MAX_DESCRIPTION_CHARS]).decode()
        yield Tool(describe_tool(name, description, schema), _caller(server, tool.name))


def function_name(server_name: str, used_names: set[str]) -> str:
    """A unique, valid function name that is not a route: verify -> verify_tool, browser.click -> browser_click."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", server_name)[: MAX_NAME_CHARS - 5]
    if name in RESERVED or not name.strip("_-"):
        name = f"{name.strip('_-')}_tool".lstrip("_")
    number = 2
    plain = name
    while name in used_names:
        name, number = f"{plain}_{number}", number + 1
    return name


def _caller(server: Connections, tool: str) -> Any:
    async def call(arguments: dict[str, Any], session: Session, request: Request) -> Response:
        result = await server.call(session, tool, await exact_arguments(arguments, request))
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or f"{tool} failed")
        if server.options.show_images and has_image(parts := [_shown(part) for part in result.content]):
            return tool_response(parts, tool, "")
        return Response(as_json(text), media_type="application/json")

    return call


def as_json(text: str) -> bytes:
    """The body of a tool's answer: text that is JSON goes unchanged, other text as a JSON string."""
    plain_text = _utf8(text)
    try:
        orjson.loads(plain_text)
    except orjson.JSONDecodeError:
        return orjson.dumps(plain_text.decode())
    return plain_text


def text_of(result: types.CallToolResult) -> str:
    """The texts of a result; other parts are only named. A result with structured content only is shown as JSON."""
    text = "\n".join(_part_text(part) for part in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[{len(text) - MAX_RESULT_CHARS} more characters are not shown]"
    return text


def _shown(part: types.ContentBlock) -> str | Image:
    """An image of a format that models read; the text of another part."""
    if isinstance(part, types.ImageContent):
        with contextlib.suppress(ValueError):
            return Image(base64.b64decode(part.data))
    return _utf8(_part_text(part)[:MAX_RESULT_CHARS]).decode()


def _part_text(part: types.ContentBlock) -> str:
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
        if isinstance(self.expected_answer, str) and not self.expected_answer.strip():
            raise ValueError("expected_answer is empty")
        known_names = app.state.callable.keys()
        if unknown := sorted({call.name for call in self.expected_tool_calls or ()} - known_names):
            raise ValueError(f"expected_tool_calls: the MCP server has no tool {unknown[0]!r}")
        return self


async def verify(task: Task) -> dict[str, Any]:
    """1 if the final answer and the calls are the expected ones; checks only what the row has."""
    answered = None if task.expected_answer is None else _is_answer(task.text, task.expected_answer)
    called = None if task.expected_tool_calls is None else _calls_match(task.response, task.expected_tool_calls)
    return {"reward": float(answered is not False and called is not False), "answered": answered, "called": called}


def _is_answer(text: str, expected: str | float) -> bool:
    try:
        expected_number = Decimal(str(expected))
    except InvalidOperation:
        expected_number = None
    if expected_number is None or not expected_number.is_finite():  # `Infinity` and `NaN` are words
        return exact(short(text) or "", [str(expected)])
    number_in_text = number(text)
    return number_in_text is not None and same_number(number_in_text, expected_number)


def _calls_match(response: dict[str, Any], expected: list[Call]) -> bool:
    """Whether the expected tools got exactly the expected calls, in any order. [] allows no call at all."""
    names = {call.name for call in expected}
    relevant = [call for call in calls_in(response, exact=True) if call.name in names or not expected]
    rounds = any(_is_rounded(call.arguments) for call in expected)
    made = Counter(_normalized(call.name, call.arguments, rounds) for call in relevant)
    return made == Counter(_normalized(call.name, call.arguments, rounds) for call in expected)


def _normalized(name: str, arguments: dict[str, Any] | None, rounds: bool) -> str:
    """A key that is equal for equal JSON: 3 is 3.0, and 1 is not true. rounds: integers beyond 64 bits, to floats."""
    return f"{name} {json.dumps(_plain(arguments, rounds), sort_keys=True)}"


def _plain(value: Any, rounds: bool) -> Any:
    match value:
        case dict():
            return {key: _plain(each, rounds) for key, each in value.items()}
        case list():
            return [_plain(each, rounds) for each in value]
        case float() if value.is_integer():
            return int(value)
        case int() if rounds and abs(value) >= LARGE:
            return int(float(value))
    return value


def _is_rounded(value: Any) -> bool:
    """Whether a number in a row's arguments may have lost digits: services read an integer beyond 64 bits as a float."""
    if isinstance(value, dict | list):
        return any(map(_is_rounded, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and abs(value) >= LARGE


@asynccontextmanager
async def serving(context: ServiceContext) -> AsyncIterator[None]:
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request
    options: Options = context.options
    if options.verify is not None:
        file = shipped_file(options.verify, context.root, "verify")
        app.state.verifier = inspect_function(_verify_in(file), VerifyRequest)
    async with Connections(options, context.root) as connections:
        for tool in callable_tools(await connections.list_tools(), connections):
            register_tool(app, tool)
        yield


def _verify_in(file: Path) -> Any:
    module = load_file(file)
    if not hasattr(module, "verify"):
        raise ConfigError(f"verify: {file} has no function `verify(task: <a VerifyRequest>, [session: Session])`")
    return module.verify


app = gym_server(verify=verify, options=Options, lifespan=serving)
