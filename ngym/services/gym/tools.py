"""Tools of a gym server: the author's functions or other callables, each as a route and as an MCP tool."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from ngym.errors import BadRequest, ServiceError, ToolError, UpstreamError, boundary, place
from ngym.peers import Peers
from ngym.schema import TOOL_ERRORS_HEADER, Json
from ngym.services.base.app import JsonResponse, add_route, context_of
from ngym.services.base.dispatch import execute_tool
from ngym.services.base.options import ServiceOptions
from ngym.services.base.request_bodies import CALL_WEIGHT, json_body, valid_body
from ngym.services.gym.sessions import BEGUN, Session, session_id_of

RESERVED = frozenset(
    [
        "verify",
        "verify_group",
        "seed_session",
        "aggregate_metrics",
        "tools",
        "session",
        "mcp",
        "reset",
        "step",
        "health",
        "ready",
        "metrics",
        "openapi.json",
        "docs",
        "redoc",
    ]
)


NOT_DONE = (429, 503)


class Tool(NamedTuple):
    """A tool. described: in the format of the Responses API. call: returns the response whose body the model sees as
    text.
    """

    described: Json
    call: Callable[[Json, Session, Request], Awaitable[Response]]

    async def answer(self, arguments: Json, session: Session, request: Request) -> Response:
        """Call the tool within its span.

        Raises:
            ToolError: for the model. ServiceError: the environment failed, and the session has no reward.
        """
        with execute_tool(self.described["name"]) as span:
            span.say("gen_ai.tool.call.arguments", arguments)
            try:
                answer = await self.call(arguments, session, request)
            except ServiceError as error:
                raise _failure(error, session, request) from error.__cause__
            if span.is_told:
                span.say("gen_ai.tool.call.result", bytes(answer.body).decode("utf-8", "replace"))
            return answer


class Author(NamedTuple):
    """A function of the author's, and the source of each of its parameters."""

    call: Callable[..., Any]
    body: type[BaseModel]
    body_name: str
    session: str | None
    options: str | None
    peers: str | None
    is_async: bool

    async def run(self, body: BaseModel, session: Session, request: Request) -> Any:
        context = context_of(request)
        given: dict[str, Any] = {self.body_name: body}
        for name, value in ((self.session, session), (self.options, context.options), (self.peers, context.peers)):
            if name:
                given[name] = value
        if self.is_async:
            return await self.call(**given)
        return await run_sync(lambda: self.call(**given))  # a plain function may block, which the event loop must not


def offer(app: FastAPI, tool: Tool) -> None:
    """Add a tool to a gym server: in GET /tools, at POST /<its name> and over MCP."""
    name, schema = tool.described["name"], tool.described["parameters"]
    app.state.tools.append(tool.described)
    app.state.callable[name] = tool
    add_route(app, "POST", f"/{name}", app.state.repeats.once(_route(tool, app)), summary=f"Tool {name}", body=schema)


def _route(tool: Tool, app: FastAPI) -> Callable[[Request], Any]:
    async def call(request: Request) -> Response:
        arguments = await _body(request)
        session_id = session_id_of(request)
        if session_id is not None:
            return await tool.answer(arguments, app.state.sessions.get(session_id), request)
        session: Session = app.state.sessions.start()
        try:
            answer = await tool.answer(arguments, session, request)
        except BaseException:
            app.state.sessions.end(session.id)  # no caller learns its id
            raise
        request.scope[BEGUN] = session.id
        return answer

    call.__name__ = tool.described["name"]
    return call


async def _body(request: Request) -> Json:
    """The arguments that the model wrote."""
    try:
        return await json_body(request, CALL_WEIGHT)
    except BadRequest as error:
        raise ToolError(error.detail, status=error.status) from None


def _failure(error: ServiceError, session: Session, request: Request) -> ServiceError:
    """A tool's exception as its caller sees it: for the model, or as a failure of the environment, which the session
    stores.
    """
    if isinstance(error, ToolError):
        return error
    error.failure = error.failure or "tool_error"
    if error.status in NOT_DONE:
        return error  # the caller retries
    if request.headers.get(TOOL_ERRORS_HEADER) == "show":
        return ToolError(error.detail)
    if error.status < 500 and not error.retryable and not isinstance(error, UpstreamError):
        error.detail += f"{place(error)} (the model reads a ToolError; {type(error).__name__} fails the rollout)"
    session.failure = copy.copy(error)  # without its traceback, which would keep the request alive
    return error


def of_function(function: Callable[..., Any]) -> Tool:
    """A tool from a function of the author's. TypeError if it cannot be a tool."""
    name = _tool_name(function)
    author = inspected(function, BaseModel)

    async def call(arguments: Json, session: Session, request: Request) -> Response:
        try:
            body = await valid_body(request, author.body, arguments, name)
        except BadRequest as error:
            raise ToolError(error.detail, extra=error.extra) from None
        with boundary("tool_error", f"{name} failed", places=True, retryable=True):
            result = await author.run(body, session, request)
        return _written(result, author, name)

    return Tool(_describe(name, author), call)


def _written(result: Any, author: Author, name: str) -> Response:
    """A tool's return value, as JSON."""
    try:
        return JsonResponse(result)
    except BadRequest as error:  # nested too deeply
        raise ToolError(f"{name}: {error.detail}") from None
    except Exception as error:
        code = getattr(inspect.unwrap(author.call), "__code__", None)
        where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        raise ServiceError(f"{name} returned a value that is not JSON: {error}{where}", failure="tool_error") from error


def inspected(function: Callable[..., Any], base: type[BaseModel]) -> Author:
    """Which parameters are the body, the session, the options and the peers, by their annotations."""
    name = getattr(function, "__name__", repr(function))
    hints = get_type_hints(function)
    hints.pop("return", None)
    found: dict[str, str] = {}
    body: tuple[str, type[BaseModel]] | None = None
    for parameter in inspect.signature(function).parameters:
        kind = hints.get(parameter)
        if not isinstance(kind, type):
            raise TypeError(
                f"{name}: parameter {parameter!r} needs a type: a pydantic model, Session, ServiceOptions or Peers"
            )
        role = next(
            (
                r
                for r, t in (("session", Session), ("options", ServiceOptions), ("peers", Peers))
                if issubclass(kind, t)
            ),
            None,
        )
        if role:
            found[role] = parameter
        elif issubclass(kind, base) and body is None:
            body = (parameter, kind)
        else:
            raise TypeError(
                f"{name}: parameter {parameter!r} is a {kind.__name__}; wanted one {base.__name__}, "
                "Session, ServiceOptions or Peers"
            )
    if body is None:
        raise TypeError(f"{name}: no parameter is a {base.__name__}; its body is where the arguments arrive")
    return Author(
        function,
        body[1],
        body[0],
        found.get("session"),
        found.get("options"),
        found.get("peers"),
        inspect.iscoroutinefunction(function),
    )


def _tool_name(tool: Callable[..., Any]) -> str:
    name = getattr(tool, "__name__", "")
    if name in RESERVED or not name.isidentifier():
        raise TypeError(f"a tool cannot be called {name!r}: that is a route of every gym server, or not a valid name")
    return name


def _describe(name: str, tool: Author) -> Json:
    """The tool in the format of the Responses API."""
    schema = tool.body.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    schema["additionalProperties"] = False
    return described(name, inspect.getdoc(tool.call), schema)


def described(name: str, description: str | None, schema: Json) -> Json:
    """A function tool in the format of the Responses API."""
    text = description or ""
    return {"type": "function", "name": name, "description": text, "parameters": schema, "strict": False}
