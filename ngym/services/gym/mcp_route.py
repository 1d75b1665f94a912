"""/mcp: a gym server's tools over MCP, each call in a rollout's session. The SDK is imported on the first request.

A caller names its session by X-NG-Session (what `/seed_session` returns under `mcp`), by our cookie, or by the MCP
session id: all three are the same id, and the session ends as every session does. Without one, `initialize` or the
first call begins a session; the response has its id as header and cookie, that of a handshake as Mcp-Session-Id.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
from anyio.to_thread import run_sync
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ngym.errors import BadRequest, ServiceError
from ngym.runtime.event_loop import log_error
from ngym.schema import SESSION_HEADER, Json
from ngym.services.base.app import JsonResponse, Lifespan
from ngym.services.base.options import ServiceContext
from ngym.services.base.request_bodies import CALL_WEIGHT, is_light, off_loop
from ngym.services.gym.sessions import Session, begin_session, session_id_of

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

PATH = "/mcp"
MCP_SESSION_HEADER = "mcp-session-id"
BEGIN_A_SESSION = ("initialize", "tools/call")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
INVALID_REQUEST, PARSE_ERROR = -32600, -32700  # JSON-RPC
INSTALLED = importlib.util.find_spec("mcp") is not None


class McpRoute:
    """The ASGI application behind the route."""

    _manager: asyncio.Task[StreamableHTTPSessionManager] | None
    _serving: asyncio.Task[None] | None
    _stop: asyncio.Event

    def wrap_lifespan(self, lifespan: Lifespan | None) -> Lifespan:
        """The service's lifespan, at whose end all MCP tasks have stopped."""

        @asynccontextmanager
        async def running(context: ServiceContext) -> AsyncIterator[None]:
            self._manager, self._serving, self._stop = None, None, asyncio.Event()
            try:
                if lifespan is None:
                    yield
                    return
                async with lifespan(context):
                    yield
            finally:
                self._stop.set()
                if self._serving is not None:
                    await self._serving

        return running

    def seed_answer(self, app: FastAPI, session: Session) -> Json:
        """The answer of `/seed_session` for an agent with its own MCP client."""
        if not INSTALLED or not app.state.callable:
            return {}
        name = app.state.context.name
        headers = {SESSION_HEADER: session.id}
        return {"mcp": {"server_name": name, "url_path": PATH, "transport": "http", "headers": headers}}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method != "POST":
            # Nothing to stream, and /verify ends it.
            await JsonResponse({}, 405, {"allow": "POST"})(scope, receive, send)
            return
        try:
            # refuse pages of other hosts: a page elsewhere must not drive a server that its reader's browser can
            # reach
            origin = request.headers.get("origin")
            if origin is not None and not _is_here(origin):
                raise ServiceError(f"a page of {origin} may not call this server", status=403)
            body = await request.body()
            method = await off_loop(request, _method, body)
            session = _session(request, method)
            manager = await self._ready(scope["app"])
        except orjson.JSONDecodeError as error:
            await _refusal(PARSE_ERROR, f"the body is not JSON: {error}", 400)(scope, receive, send)
            return
        except ServiceError as error:
            await _refusal(INVALID_REQUEST, error.detail, error.status)(scope, receive, send)
            return
        request.state.session = session
        headers = {MCP_SESSION_HEADER: session.id} if session is not None and method == "initialize" else {}
        await manager.handle_request(scope, _replay_body(body, receive), _with_headers(send, headers))

    async def _ready(self, app: FastAPI) -> StreamableHTTPSessionManager:
        if self._manager is None:
            self._manager = asyncio.create_task(self._begin(app))
        return await asyncio.shield(self._manager)

    async def _begin(self, app: FastAPI) -> StreamableHTTPSessionManager:
        if not INSTALLED:
            raise ServiceError("this gym server cannot speak MCP: pip install 'ngym[mcp]'", status=501)
        # Takes 0.5 s, so not on the loop.
        sdk = await run_sync(importlib.import_module, "ngym.services.gym.mcp_sdk_server")
        manager: StreamableHTTPSessionManager = sdk.manager(app.state.context.name, app.state.callable)
        ready = asyncio.Event()

        async def serve() -> None:
            async with manager.run():
                ready.set()
                await self._stop.wait()

        self._serving = asyncio.create_task(serve(), name="the MCP server")
        self._serving.add_done_callback(log_error)
        self._serving.add_done_callback(lambda _: ready.set())
        await ready.wait()
        if self._serving.done():
            self._serving.result()
        return manager


def _is_here(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in LOOPBACK
    except ValueError:
        return False


def _refusal(code: int, message: str, status: int) -> JsonResponse:
    return JsonResponse({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}, status)


def _method(body: bytes) -> str | None:
    """The JSON-RPC method.

    Raises:
        BadRequest: the SDK would need too long to parse the body.
        orjson.JSONDecodeError: it is not JSON, or, as with NaN, only the SDK would read it: its call would have no session.
    """
    if not is_light(body, CALL_WEIGHT):
        raise BadRequest(f"the JSON has too many values: its weight is more than {CALL_WEIGHT:,}", status=413)
    message: Any = orjson.loads(body)
    return message.get("method") if isinstance(message, dict) else None


def _session(request: Request, method: str | None) -> Session | None:
    """The caller's session, or one that begins here. NotFound for a session that has ended: state is never silently
    reset.
    """
    store = request.app.state.sessions
    session_id = session_id_of(request.scope) or request.headers.get(MCP_SESSION_HEADER)
    if session_id is not None:
        session: Session = store.get(session_id)
        return session
    return begin_session(store, request) if method in BEGIN_A_SESSION else None


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """`receive` for a request whose body was read."""
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return send_with_headers
