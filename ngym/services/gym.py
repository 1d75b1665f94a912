"""gym_server(): an environment from the functions that its author wrote: `verify`, and tools if it has any."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from ngym.answers import last_text
from ngym.errors import ServiceError, boundary
from ngym.peers import Peers
from ngym.schema import SESSION_COOKIE, SESSION_HEADER, Json
from ngym.services.aggregate import aggregate
from ngym.services.app import JsonResponse, Lifespan, add_route, context_of, json_body, service_app, validated
from ngym.services.options import ServiceOptions
from ngym.services.sessions import Session, SessionStore

RESERVED = frozenset(
    [
        "verify",
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
EMPTY_RESPONSE: Json = {"output": []}


class VerifyRequest(BaseModel):
    """What a verifier gets: the row (its own fields are attributes) and the policy's response. Derive and add fields."""

    model_config = ConfigDict(extra="allow")
    responses_create_params: dict[str, Any]
    response: dict[str, Any]

    @property
    def text(self) -> str:
        """The text of the last assistant message; empty when there is none."""
        return last_text(self.response)


class _Author(NamedTuple):
    """A function of the author's and where each of its parameters comes from."""

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
        return await run_sync(lambda: self.call(**given))  # a plain function may block; the event loop may not


def gym_server(
    *,
    verify: Callable[..., Any],
    tools: Sequence[Callable[..., Any]] = (),
    options: type[ServiceOptions] = ServiceOptions,
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """An environment as an application.

    Args:
        verify: `(task: <a VerifyRequest>, [session: Session], [options], [peers: Peers])` -> the reward: a float, None
            (could not be scored), or a record with `reward`, optionally `reward_components`, and fields of its own.
        tools: functions `(body: <a BaseModel>, [session], [options], [peers])` -> any JSON. The name and the docstring
            are what the model sees. A ServiceError's text, too. Plain functions run in a thread.
        options: the record of the stanza's own keys.
        lifespan: async context manager around serving, given the ServiceContext.
    """
    verifier = _inspect(verify, VerifyRequest)
    store = SessionStore()
    app = service_app("gym_server", options=options, lifespan=lifespan)
    app.state.sessions = store
    by_name = {_tool_name(tool): _inspect(tool, BaseModel) for tool in tools}
    app.state.tools = [_describe(name, tool) for name, tool in by_name.items()]

    async def seed_session(request: Request) -> Response:
        row = await json_body(request)
        validated(verifier.body, {**row, "response": EMPTY_RESPONSE}, _row_name(row))
        session = store.start(request.headers.get(SESSION_HEADER))
        session["task"] = row
        return with_session(JsonResponse({"tools": app.state.tools} if by_name else {}), session)

    async def verify_route(request: Request) -> Response:
        raw = await json_body(request)
        task = validated(verifier.body, raw, _row_name(raw))
        session = session_for(store, request)
        try:
            with boundary("verify_error", "verify failed"):
                outcome = _reward_fields(await verifier.run(task, session, request))
        finally:
            store.end(session.id)
        return JsonResponse({**raw, **outcome})

    async def list_tools(request: Request) -> Response:
        return JsonResponse(app.state.tools)

    async def end_session(request: Request) -> Response:
        return JsonResponse({"ended": store.end(_session_id(request) or "")})

    async def aggregate_route(request: Request) -> Response:
        body = await json_body(request)
        return JsonResponse(aggregate(body.get("verify_responses") or []))

    add_route(
        app, "POST", "/seed_session", seed_session, summary="Start a rollout's session", body=_row_schema(verifier.body)
    )
    add_route(app, "POST", "/verify", verify_route, summary="Score a rollout", body=verifier.body.model_json_schema())
    add_route(app, "GET", "/tools", list_tools, summary="The tools as Responses-API function tools")
    add_route(app, "DELETE", "/session", end_session, summary="End a session")
    add_route(
        app,
        "POST",
        "/aggregate_metrics",
        aggregate_route,
        summary="Metrics over verify responses",
        body={"type": "object"},
    )
    for name, tool in by_name.items():
        add_route(
            app,
            "POST",
            f"/{name}",
            _tool_route(name, tool, store),
            summary=f"Tool {name}",
            body=tool.body.model_json_schema(),
        )
    return app


def _tool_route(name: str, tool: _Author, store: SessionStore) -> Callable[[Request], Any]:
    async def call(request: Request) -> Response:
        body = validated(tool.body, await json_body(request), name)
        has_id = _session_id(request) is not None
        session = session_for(store, request) if has_id else store.start()
        with boundary("tool_error", f"{name} failed"):
            result = await tool.run(body, session, request)
        response = JsonResponse(result)
        return response if has_id else with_session(response, session)

    call.__name__ = name
    return call


def _inspect(function: Callable[..., Any], base: type[BaseModel]) -> _Author:
    """Which parameter is the body, the session, the options, the peers: told by their annotations."""
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
                f"{name}: parameter {parameter!r} is a {kind.__name__}; wanted one {base.__name__}, Session, ServiceOptions or Peers"
            )
    if body is None:
        raise TypeError(f"{name}: no parameter is a {base.__name__}; its body is where the arguments arrive")
    return _Author(
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
        raise TypeError(f"a tool cannot be called {name!r}: that is a route of every gym server, or no name")
    return name


def _describe(name: str, tool: _Author) -> Json:
    """The tool as the Responses API wants it."""
    schema = tool.body.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    schema["additionalProperties"] = False
    description = inspect.getdoc(tool.call) or ""
    return {"type": "function", "name": name, "description": description, "parameters": schema, "strict": False}


def _reward_fields(outcome: Any) -> Json:
    """What `verify` returned, as the fields that are added to the row."""
    if outcome is None or isinstance(outcome, bool | int | float):
        outcome = {"reward": outcome}
    elif isinstance(outcome, BaseModel):
        outcome = outcome.model_dump()
    if not isinstance(outcome, Mapping) or "reward" not in outcome:
        raise ServiceError("verify must return a number, None, or a record with 'reward'", failure="verify_error")
    fields = dict(outcome)
    fields["reward"] = _finite(fields["reward"], "reward")
    components = fields.get("reward_components")
    if components is not None:
        components = {name: _finite(value, f"reward component {name!r}") for name, value in components.items()}
        total = math.fsum(value for value in components.values() if value is not None)
        if fields["reward"] is not None and not math.isclose(total, fields["reward"], abs_tol=1e-6):
            raise ServiceError(
                f"reward_components sum to {total}, not to the reward {fields['reward']}", failure="verify_error"
            )
        fields["reward_components"] = components
    return fields


def _finite(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise ServiceError(
            f"verify returned {value!r} as {what}; it must be a finite number or None", failure="verify_error"
        )
    return float(value)


def _row_schema(model: type[BaseModel]) -> Json:
    schema = model.model_json_schema()
    schema["required"] = [name for name in schema.get("required", []) if name != "response"]
    return schema


def _row_name(row: Json) -> str:
    index = row.get("_ng_task_index")
    return "the row" if index is None else f"row {index}"


def _session_id(request: Request) -> str | None:
    return request.headers.get(SESSION_HEADER) or request.cookies.get(SESSION_COOKIE)


def session_for(store: SessionStore, request: Request, *, start: bool = False) -> Session:
    """The caller's session; one that is not kept when the caller never started any (a bare POST to /verify).

    start: who has none yet gets one that is kept, under the caller's own id when it sent one.
    """
    session_id = _session_id(request)
    if start and (session_id is None or session_id not in store):
        return store.start(session_id)
    return Session() if session_id is None else store.get(session_id)


def with_session(response: Response, session: Session) -> Response:
    response.headers[SESSION_HEADER] = session.id
    response.headers["set-cookie"] = f"{SESSION_COOKIE}={session.id}; HttpOnly; Path=/; SameSite=strict"
    return response
