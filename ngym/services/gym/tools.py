"""Tools of a gym server: the author's functions or other callables, each as a route and as an MCP tool."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, get_origin, get_type_hints
from warnings import catch_warnings, simplefilter

from fastapi import FastAPI, Request
from fastapi.params import Depends
from pydantic import BaseModel, Field, PydanticUserError, TypeAdapter, create_model
from starlette.responses import Response
from starlette.routing import Match

from ngym.errors import BadRequest, Boundary, ServiceError, ToolError, UpstreamError, source_location
from ngym.net.json_limits import LONG_NUMBER
from ngym.net.request_context import header
from ngym.peers import Peers
from ngym.schema import RESERVED, TOOL_ERRORS_HEADER, Json
from ngym.services.base.app import add_route, context_of, line_of, signature_error
from ngym.services.base.middleware import execute_tool
from ngym.services.base.options import ServiceOptions, check_result
from ngym.services.base.request_bodies import CALL_WEIGHT, in_thread, json_body, off_loop, valid_body
from ngym.services.gym.results import tool_response
from ngym.services.gym.sessions import BEGUN_SESSION, RETRYABLE_STATUSES, Session, session_id_of

ANYTHING: Json = {"description": "Any JSON."}


class Tool(NamedTuple):
    """A tool. definition: in the format of the Responses API. call: returns the response whose body the model sees as
    text.
    """

    definition: Json
    call: Callable[[Json, Session, Request], Awaitable[Response]]
    answers: Json = ANYTHING  # the JSON Schema of its result
    where: str | None = None  # file and line of the author's function
    takes_session: bool = True

    async def answer(self, arguments: Json, session: Session, request: Request) -> Response:
        """Call the tool within its span.

        Raises:
            ToolError: for the model. ServiceError: the environment failed, and the session has no reward.
        """
        with execute_tool(self.definition["name"]) as span:
            span.set_content("gen_ai.tool.call.arguments", arguments)
            try:
                answer = await self.call(arguments, session, request)
                check_result(self.definition["name"], len(answer.body), context_of(request).options, self.where)
            except ServiceError as error:
                raise _failure(error, session, request) from error.__cause__
            if span.is_recording:
                span.set_content("gen_ai.tool.call.result", bytes(answer.body).decode("utf-8", "replace"))
            return answer


class AuthorFunction(NamedTuple):
    """A function of the author's, and the source of each of its parameters.

    body_name: the parameter that gets the body; None: each field of the body is a parameter.
    """

    call: Callable[..., Any]
    body: type[BaseModel]
    body_name: str | None
    description: str
    session: str | None
    options: str | None
    peers: str | None
    is_async: bool

    async def run(self, body: BaseModel, session: Session, request: Request) -> Any:
        context = context_of(request)
        arguments: dict[str, Any] = {self.body_name: body} if self.body_name else dict(body)
        for name, value in ((self.session, session), (self.options, context.options), (self.peers, context.peers)):
            if name:
                arguments[name] = value
        if self.is_async:
            return await self.call(**arguments)
        # a plain function may block, which the event loop must not
        return await in_thread(partial(self.call, **arguments))


def register_tool(app: FastAPI, tool: Tool) -> None:
    """Add a tool to a gym server: in GET /tools, at POST /<its name> and over MCP."""
    name, schema = tool.definition["name"], tool.definition["parameters"]
    app.state.stateless = app.state.stateless and not tool.takes_session
    app.state.tools.append(tool.definition)
    app.state.callable[name] = tool
    handler = app.state.idempotent.once(_route(tool, app))
    add_route(app, "POST", f"/{name}", handler, summary=f"Tool {name}", body=schema, answer=tool.answers)


def _route(tool: Tool, app: FastAPI) -> Callable[[Request], Any]:
    async def call(request: Request) -> Response:
        arguments = await _body(request)
        session_id = session_id_of(request.scope)
        if session_id is not None:
            unseeded = app.state.stateless and session_id not in app.state.sessions
            own_session = Session(session_id) if unseeded else app.state.sessions.get(session_id)
            return await tool.answer(arguments, own_session, request)
        session: Session = app.state.sessions.start()
        try:
            answer = await tool.answer(arguments, session, request)
        except BaseException:
            app.state.sessions.end(session.id)  # no caller learns its id
            raise
        request.scope[BEGUN_SESSION] = session.id
        return answer

    call.__name__ = tool.definition["name"]
    return call


async def _body(request: Request) -> Json:
    """The arguments that the model wrote."""
    try:
        return await json_body(request, CALL_WEIGHT)
    except BadRequest as error:
        raise ToolError(error.detail, status=error.status) from None


async def exact_arguments(arguments: Json, request: Request) -> Json:
    """The arguments with all digits of integers beyond 64 bits, which the request's parser reads as floats."""
    raw = await request.body()
    if not LONG_NUMBER.search(raw) or request.scope["path"].endswith("/mcp"):  # the SDK parses integers of any length
        return arguments
    read: Json = await off_loop(request, json.loads, raw)
    return read


def _failure(error: ServiceError, session: Session, request: Request) -> ServiceError:
    """A tool's exception as its caller sees it: for the model, or as a failure of the environment, which the session
    stores.
    """
    if isinstance(error, ToolError):
        return error
    error.failure = error.failure or "tool_error"
    if error.status in RETRYABLE_STATUSES:
        return error  # the caller retries
    if header(request.scope, TOOL_ERRORS_HEADER) == "show":
        return ToolError(error.detail)
    if error.status < 500 and not error.retryable and not isinstance(error, UpstreamError):
        error.detail += (
            f"{source_location(error)} (the model reads a ToolError; {type(error).__name__} fails the rollout)"
        )
    session.fail(error)
    return error


def tool_of_function(function: Callable[..., Any]) -> Tool:
    """A tool from a function of the author's. SignatureError if it cannot be a tool."""
    name = _tool_name(function)
    author = inspect_function(function, BaseModel, fields=True)

    async def call(arguments: Json, session: Session, request: Request) -> Response:
        try:
            body = await valid_body(request, author.body, await exact_arguments(arguments, request), name)
        except BadRequest as error:
            raise ToolError(error.detail, extra=error.extra) from None
        with Boundary("tool_error", f"{name} failed", places=True, retryable=True):
            result = await author.run(body, session, request)
        return tool_response(result, name, line_of(author.call))

    described_tool, takes_session = _describe(name, author), author.session is not None
    return Tool(described_tool, call, _result_schema(function), line_of(author.call), takes_session)


def _result_schema(function: Callable[..., Any]) -> Json:
    """The JSON Schema of a tool's return type."""
    hint = _hints(function).get("return", Any)
    try:
        return TypeAdapter(hint).json_schema(mode="serialization") or ANYTHING
    except (PydanticUserError, NameError, TypeError):
        return ANYTHING


def inspect_function(function: Callable[..., Any], base: type[BaseModel], *, fields: bool = False) -> AuthorFunction:
    """The parameters that are the body, the session, the options and the peers, by their annotations.

    Args:
        fields: the other parameters may be the fields of the body, instead of one `base` that is all of it.

    Raises:
        SignatureError: a parameter has no type or cannot be filled.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise signature_error(function, "it is a generator; return the value instead of yielding it")
    hints = _hints(function)
    services: dict[str, str] = {}
    others: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        _check_parameter(function, parameter, hints, "" if fields else base.__name__)
        kind = hints[name]
        role = next(
            (role for role, known in _SERVICES.items() if isinstance(kind, type) and issubclass(kind, known)), None
        )
        if role:
            services[role] = name
        else:
            others[name] = parameter
    body, body_name = _body_record(function, others, hints, base, fields)
    return AuthorFunction(
        function,
        body,
        body_name,
        _description(function, others, body_name),
        services.get("session"),
        services.get("options"),
        services.get("peers"),
        inspect.iscoroutinefunction(function),
    )


NO_REWARD = (str, bytes, list, tuple, set)


def check_reward_type(verify: Callable[..., Any]) -> None:
    """Raise SignatureError if the return type of `verify` cannot be a reward."""
    hint = _hints(verify).get("return")
    kind = get_origin(hint) or hint
    if isinstance(kind, type) and issubclass(kind, NO_REWARD) and not hasattr(kind, "_fields"):
        raise signature_error(
            verify, f"it returns {kind.__name__}; a reward is a number, None, or a record with 'reward'"
        )


def check_options_type(functions: Iterable[Callable[..., Any]], options: type[ServiceOptions]) -> None:
    """Raise SignatureError if a function takes options of another type than the gym server has."""
    for function in functions:
        for name, kind in _hints(function).items():
            if isinstance(kind, type) and issubclass(kind, ServiceOptions) and not issubclass(options, kind):
                raise signature_error(
                    function,
                    f"parameter {name!r} is a {kind.__name__}, but the gym server has {options.__name__}: write "
                    f"gym_server(options={kind.__name__}, ...)",
                )


_SERVICES: dict[str, type] = {"session": Session, "options": ServiceOptions, "peers": Peers}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise signature_error(
            function, f"a type hint cannot be read: {error} (import it outside of TYPE_CHECKING)"
        ) from None
    return hints


def _check_parameter(
    function: Callable[..., Any], parameter: inspect.Parameter, hints: dict[str, Any], base: str
) -> None:
    """base: of the one record that it takes; "" for a tool, whose parameters may be anything."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise signature_error(function, f"parameter {name!r} cannot be filled by name: leave out '*', '**' and '/'")
    if name not in hints:
        expected = (
            f"a type: {base}, or a record derived from it" if base else "a type such as `str`, or a pydantic model"
        )
        raise signature_error(function, f"parameter {name!r} needs {expected}; also Session, ServiceOptions or Peers")
    if any(isinstance(mark, Depends) for mark in (parameter.default, *getattr(hints[name], "__metadata__", ()))):
        raise signature_error(
            function,
            f"parameter {name!r}: Depends() works in routes that you add to `app` yourself; here, take Session, "
            "ServiceOptions or Peers, or create the object in `lifespan`",
        )


def _body_record(
    function: Callable[..., Any],
    others: dict[str, inspect.Parameter],
    hints: dict[str, Any],
    base: type[BaseModel],
    fields: bool,
) -> tuple[type[BaseModel], str | None]:
    """The record of the body, and the parameter that gets it."""
    if len(others) == 1:
        (name,) = others
        kind = hints[name]
        if isinstance(kind, type) and issubclass(kind, base):
            return kind, name
    if not fields:
        expected = f"{base.__name__}, or a record derived from it"
        if not others:
            raise signature_error(function, f"no parameter is a {expected}; it receives the row and the response")
        name = next(name for name in [*list(others)[1:], *others] if not _is_a(hints[name], base))
        type_name = getattr(hints[name], "__name__", str(hints[name]))
        raise signature_error(
            function, f"parameter {name!r} is of type {type_name}; take one parameter of type {expected}"
        )
    if "body" in others and (get_origin(hints["body"]) or hints["body"]) is dict:
        raise signature_error(
            function,
            "a dict has no schema that a model could follow: write a parameter for each argument (`word: str, limit: "
            "int = 5`), or give 'body' a pydantic model",
        )
    return _fields_of(function, others, hints), None


def _is_a(kind: Any, base: type[BaseModel]) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _fields_of(
    function: Callable[..., Any], others: dict[str, inspect.Parameter], hints: dict[str, Any]
) -> type[BaseModel]:
    """The parameters as a record, described by the docstring's `Args:`."""
    described = read_docstring(inspect.getdoc(function) or "")[1]
    unknown = next((name for name in described if name not in inspect.signature(function).parameters), None)
    if unknown is not None:
        raise signature_error(function, f"its docstring describes {unknown!r}, which is not a parameter")
    fields: dict[str, Any] = {}
    for name, parameter in others.items():
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=described[name]) if name in described else default)
    try:
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # a parameter called `json` or `copy` hides a method of the record
            model: type[BaseModel] = create_model(function.__name__, **fields)
        model.model_json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise signature_error(function, f"its parameters cannot be arguments of a tool: {reason}") from None
    return model


def _description(function: Callable[..., Any], others: dict[str, inspect.Parameter], body_name: str | None) -> str:
    whole = inspect.getdoc(function) or ""
    return whole if body_name else read_docstring(whole)[0]


def _tool_name(tool: Callable[..., Any]) -> str:
    name = getattr(tool, "__name__", "")
    if name in RESERVED or not name.isidentifier():
        raise signature_error(
            tool, f"a tool cannot be called {name!r}: that is a route of every gym server, or not a valid name"
        )
    return name


def _describe(name: str, tool: AuthorFunction) -> Json:
    """The tool in the format of the Responses API."""
    schema = tool.body.model_json_schema()
    schema.pop("title", None)
    if tool.body_name is None:
        schema.setdefault("properties", {})
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    schema["additionalProperties"] = False
    return describe_tool(name, tool.description, schema)


def describe_tool(name: str, description: str | None, schema: Json) -> Json:
    """A function tool in the format of the Responses API."""
    text = description or ""
    return {"type": "function", "name": name, "description": text, "parameters": schema, "strict": False}


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^()]*\))?:\s*(.*)")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's description, and the description of each parameter of its Google-style `Args:`.

    The description has no `Args:`, `Returns:` and `Raises:` sections: those are for readers of the code.

    Args:
        text: without the common indentation (`inspect.getdoc`).
    """
    described: dict[str, str] = {}
    text_lines: list[str] = []
    section, name, indent = "", "", None
    for line in text.splitlines():
        section_match = _SECTION.match(line)
        if section_match:
            section, name, indent = section_match[1], "", None
        elif line.strip() and not line.startswith((" ", "\t")):
            section = ""
        if section in ("Args", "Arguments", "Parameters") and not section_match and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            argument = _ARGUMENT.match(line.strip()) if depth <= indent else None
            if argument:
                name = argument[1]
                described[name] = argument[2]
            elif name:
                described[name] = f"{described[name]} {line.strip()}".strip()
        elif section in ("", "Example", "Examples", "Note", "Notes"):
            text_lines.append(line)
    return "\n".join(text_lines).strip(), described


def missing_tools(app: FastAPI, row: Json) -> list[str]:
    """The function tools that a row declares and this server has no route for."""
    tools = (row.get("responses_create_params") or {}).get("tools") or []
    names = [tool.get("name") for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
    return [name for name in names if isinstance(name, str) and name not in RESERVED and not _has_route(app, name)]


def _has_route(app: FastAPI, name: str) -> bool:
    if name in app.state.callable:
        return True
    scope = {"type": "http", "method": "POST", "path": f"/{name}", "root_path": "", "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)
