"""Limits of server connections: heads and bodies must make progress, answers must be read, and their number is bounded.

Time is counted in seconds in which the server's event loop runs, so a blocked loop cuts no connection off. There is no
limit on the time of an answer, or of a body that makes progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

import httptools
import orjson
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from ngym.errors import NotReady, ServiceError

KEEPALIVE_S = 75  # longer than most clients keep an idle connection, so that it is not closed under a request
HEAD_S = 10  # from the connection, or from the first byte of a further request, to the end of its head
MAX_HEAD_BYTES = 64 << 10
BODY_S = 10  # the period in which BODY_BYTES of a body must arrive, on average: lines that many share are not fair
BODY_BYTES = 10 << 10
MAX_PAUSE_S = 60  # without a byte of a body, however much came before
LINGER_S = 5  # the rest of a refused request is discarded for this time; then the connection is closed
WRITE_TIMEOUT_S = 600  # limit of an answer that is not read; a trainer's event loop may block for minutes
LIMITS_OWN_BODY = "ngym.own_pace"  # in the scope of a request whose handler limits the body itself

RESERVED_DESCRIPTORS = 64  # descriptors other than connections: the log, the listening sockets, the pipes of workers
MAX_REFUSALS = 32  # connections over the limit that get an error answer; further ones are closed at once
OPEN_PATHS = ("/health", "/")
JOINED_BYTES = 16 << 10  # a larger body is not copied behind its head
_PLAIN_PATH = re.compile(rb"/[A-Za-z0-9/._~-]*")
_NAMES: dict[bytes, bytes] = {}  # valid names of headers -> the beginning of the header's line
MAX_NAMES = 256


class Exchange(RequestResponseCycle):
    """A request and its answer: as uvicorn's, but the head of an answer is sent together with its body, which saves a
    system call here and two in the client, and nothing is made for a request that it may not need.
    """

    def __init__(self, connection: Connection, scope: Any, *, keep_alive: bool, expects: bool) -> None:
        # not uvicorn's __init__: these are all of its attributes, and `parts` in place of its `body`
        self.scope = scope
        self.transport = connection  # type: ignore[assignment]  # for its write, writelines, close and is_closing
        self.flow = connection.flow
        self.logger = connection.logger
        self.on_response = connection.on_response_complete
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects
        self.parts: list[bytes] = []  # of the body, not yet received
        self.bytes = 0
        self.more_body = True
        self.response_started = self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0
        self.head: bytes | None = None  # of the answer, whose body is not there yet
        self.task: asyncio.Task[None] | None = None
        self._tasks = connection.tasks
        self._first_headers = connection.server_state.default_headers
        self._news = False  # there is something to receive
        self._awaited: asyncio.Event | None = None

    @property
    def message_event(self) -> Exchange:  # type: ignore[override]
        """The event that uvicorn sets when the client is gone."""
        return self

    def set(self) -> None:
        """Wake `receive`."""
        self._news = True
        if self._awaited is not None:
            self._awaited.set()

    async def run_asgi(self, app: Any) -> None:
        try:
            await super().run_asgi(app)
        finally:
            self._tasks.discard(self.task)
            self.task = None  # it refers to this object

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self._news:
                self._awaited = self._awaited or asyncio.Event()
                await self._awaited.wait()
            self._news = False
            if self._awaited is not None:
                self._awaited.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        parts = self.parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self.parts, self.bytes = [], 0
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if not self.response_started and kind == "http.response.start":
            self.head = self._head_bytes(message["status"], message.get("headers", ()))
            if not self.expected_content_length or self.scope["method"] == "HEAD":
                self.flush()
        elif self.response_started and not self.response_complete and kind == "http.response.body":
            self._write(message.get("body", b""), last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"Unexpected ASGI message {kind!r}.")

    async def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | memoryview) -> None:
        """Send a whole answer."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self.head = self._head_bytes(status, headers)
            self._write(body, last=True)

    def flush(self) -> None:
        """Write a head whose body does not come now."""
        head, self.head = self.head, None
        if head is not None:
            self.transport.write(head)

    def _head_bytes(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The head of the answer."""
        self.response_started = True
        self.waiting_for_100_continue = False
        content, values = [STATUS_LINE[status]], []
        closes = False
        for name, value in (*self._first_headers, *headers) if self._first_headers else headers:
            known = _NAMES.get(name) or _check_name(name)
            values.append(value)
            if known == b"content-length: ":
                if self.chunked_encoding is None:
                    self.expected_content_length = int(value)
                    self.chunked_encoding = False
            elif known == b"transfer-encoding: ":
                if value.lower() == b"chunked":
                    self.expected_content_length = 0
                    self.chunked_encoding = True
            elif known == b"connection: " and b"close" in [token.strip() for token in value.lower().split(b",")]:
                self.keep_alive = False
                closes = True
            content += (known, value, b"\r\n")
        if HEADER_VALUE_RE.search(b"".join(values)):
            raise RuntimeError("Invalid HTTP header value.")
        if not self.keep_alive and not closes:
            content.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            content.append(b"transfer-encoding: chunked\r\n")
        content.append(b"\r\n")
        return b"".join(content)

    def _write(self, body: bytes | memoryview, *, last: bool) -> None:
        """Write the body, or a part of it."""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            body = b""
        elif self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), bytes(body)) if body else b"") + (b"0\r\n\r\n" if last else b"")
        else:
            if len(body) > self.expected_content_length:
                raise RuntimeError("Response content longer than Content-Length")
            self.expected_content_length -= len(body)
        head, self.head = self.head, None
        if head is None:
            self.transport.write(body)
        elif len(body) < JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        if last:
            if self.expected_content_length != 0:
                raise RuntimeError("Response content shorter than Content-Length")
            self.response_complete = True
            self.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


def _check_name(name: bytes) -> bytes:
    """The beginning of a header's line. RuntimeError if it is not a valid name."""
    if HEADER_RE.search(name):
        raise RuntimeError("Invalid HTTP header name.")
    line = name.lower() + b": "
    if len(_NAMES) < MAX_NAMES:
        _NAMES[name] = line
    return line


class Connection(HttpToolsProtocol):
    """One client's connection; `second` is called once a second."""

    cycle: Exchange

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._service = self.app
        self._room = self.limit_concurrency
        self._asgi: Any = {"version": self.asgi_version, "spec_version": "2.3"}
        self._scheme: Literal["http", "https"] = "https" if config.is_ssl else "http"
        self._waits_for: Literal["head", "body", "nothing", "end"] = "head"
        self._seconds = 0  # since the state began
        self._bytes = 0  # of the head, or of the body since the last second
        self._pause_s: float = BODY_S  # how long the rest of a body may stay away
        self._unread_s = self._unwanted_s = self._idle_s = 0
        self._last_exchange: Exchange | None = None  # the exchange whose answer is being made, or was made last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if self._room is not None and len(self.connections) > self._room + MAX_REFUSALS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        HttpToolsProtocol.connection_lost(self, exc)
        self.pipeline.clear()
        self.app = self._service
        for exchange in (self.cycle, self._last_exchange):
            if exchange is not None:
                exchange.head = None
                exchange.transport = self.transport  # breaks a reference cycle
        self._last_exchange = None

    def data_received(self, data: bytes) -> None:
        if self._waits_for == "end":
            return
        if self._waits_for == "head":  # a head that begins later in this data is counted from the next call on
            self._bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self._refuse(400, "Invalid HTTP request received.")
        except httptools.HttpParserUpgrade:
            pass  # a requested upgrade is ignored (RFC 9110, 7.8)
        if self._waits_for == "head" and self._bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES >> 10} KiB")

    # The following methods are called for every request, so they must be cheap.

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        if self._waits_for == "nothing":  # else it is the connection's first request, whose time already runs
            self._waits_for = "head"
            self._seconds = self._bytes = 0

    def on_headers_complete(self) -> None:
        self._waits_for = "body"
        self._bytes = self._unwanted_s = 0
        self._pause_s = BODY_S
        parser, app = self.parser, self.app
        if self._room is not None and len(self.connections) > self._room:
            app = self._full
        version, raw_path, query = parser.get_http_version(), self.url, b""
        if not _PLAIN_PATH.fullmatch(raw_path):
            parsed = httptools.parse_url(raw_path)
            raw_path, query = parsed.path, parsed.query or b""
        path = raw_path.decode("ascii")
        self.scope = {
            "type": "http",
            "asgi": self._asgi,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self._scheme,
            "method": parser.get_method().decode("ascii"),
            "root_path": self.root_path,
            "path": self.root_path + (unquote(path) if "%" in path else path),
            "raw_path": self.root_path.encode("ascii") + raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        keeps = version != "1.0" and parser.should_keep_alive()
        before = self.cycle
        self.cycle = exchange = Exchange(self, self.scope, keep_alive=keeps, expects=self.expect_100_continue)
        if before is None or before.response_complete:
            self._start_asgi_task(exchange, app)
        else:  # the client did not wait for the answer
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._last_exchange = cycle
        cycle.task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(cycle.task)

    def on_body(self, body: bytes) -> None:
        self._bytes += len(body)
        exchange = self.cycle
        if not exchange.response_complete:
            exchange.parts.append(body)
            exchange.bytes += len(body)
            if exchange.bytes > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            exchange.set()

    def on_message_complete(self) -> None:
        self._waits_for = "nothing"
        exchange = self.cycle
        if not exchange.response_complete:
            exchange.more_body = False
            exchange.set()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_s = 0

    def write(self, data: bytes | memoryview) -> None:
        if data and self._waits_for != "end":  # else it answers a pipelined request before the refused one
            self.transport.write(data)

    def writelines(self, data: Iterable[bytes | memoryview]) -> None:
        if self._waits_for != "end":
            self.transport.writelines(data)

    def is_closing(self) -> bool:
        return self._waits_for == "end" or self.transport.is_closing()

    def close(self) -> None:
        self._flush()
        if self._waits_for == "nothing":
            self.transport.close()
        else:
            self._close_when_read()

    def _flush(self) -> None:
        if self._last_exchange is not None:
            self._last_exchange.flush()

    def second(self) -> None:
        """Check the limits; called every second."""
        self._seconds += 1
        self._unread_s = self._unread_s + 1 if self.flow.write_paused else 0
        if self._unread_s > WRITE_TIMEOUT_S:
            self.transport.abort()
        elif self._waits_for == "head":
            self._tick_head()
        elif self._waits_for == "body":
            self._tick_body()
        elif self._waits_for == "end":
            if self._seconds > LINGER_S:
                self.transport.close()
        elif self.cycle.response_complete:
            self._idle_s += 1
            if self._idle_s > self.timeout_keep_alive:
                self.transport.close()

    def shutdown(self) -> None:
        if self._waits_for == "end":
            self.transport.close()
        HttpToolsProtocol.shutdown(self)

    def _tick_head(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._seconds > HEAD_S:
            self._refuse(408, f"the head of the request did not come within {HEAD_S} s")

    def _tick_body(self) -> None:
        if self.cycle.response_complete:
            self._unwanted_s += 1
            if self._unwanted_s > LINGER_S:
                self.transport.close()
        elif self._is_waiting_for_us():
            self._pause_s = max(self._pause_s, BODY_S)
        else:
            self._pause_s = min(self._pause_s + self._bytes * BODY_S / BODY_BYTES, MAX_PAUSE_S) - 1
            if self._pause_s < 0:
                self._refuse(408, f"of the body less than {BODY_BYTES >> 10} KiB came in {BODY_S} s")
        self._bytes = 0

    def _is_waiting_for_us(self) -> bool:
        return self.flow.read_paused or self.cycle.waiting_for_100_continue or LIMITS_OWN_BODY in self.scope

    def _refuse(self, status: int, detail: str) -> None:
        """Send an error, if no answer has begun, and close the connection."""
        if self.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_error_bytes(ServiceError(detail, status=status, retryable=status == 408)))
        if cycle is not None:
            cycle.disconnected = True  # discards further output of its handler
            cycle.message_event.set()
        self._close_when_read()

    def _close_when_read(self) -> None:
        """Close the connection once the client has read the answer.

        Closing a socket while data still arrives resets the connection, and the client's system then discards what the
        client has not read (RFC 9112, 9.6).
        """
        if self.is_closing():
            return
        self._flush()
        self._waits_for = "end"
        self._seconds = 0
        self.pipeline.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    async def _full(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in OPEN_PATHS or len(self.connections) <= (self._room or 0):
            await self._service(scope, receive, send)
            return
        error = NotReady(f"{self._room} connections are open here, which is the limit; try again")
        headers = [(b"content-type", b"application/problem+json"), (b"retry-after", b"1"), (b"connection", b"close")]
        body = orjson.dumps(error.problem())
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def server_config(app: Any, **own: Any) -> uvicorn.Config:
    """The settings that all servers share: limited connections on a running loop, no websockets, no access log."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="none",
        limit_concurrency=max_connections(),
        access_log=False,
        timeout_keep_alive=KEEPALIVE_S,
        server_header=False,
        **own,
    )


class Server(uvicorn.Server):
    """A server that leaves signals to its caller: uvicorn re-raises SIGTERM after serving, and no `finally` runs."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with a time limit for TLS handshakes."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        protocol: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        connection = partial(protocol, self.config, self.server_state, self.lifespan.state)
        tls, backlog, loop = self.config.ssl, self.config.backlog, asyncio.get_running_loop()
        patience_s = HEAD_S if tls else None
        self.servers = [
            await loop.create_server(connection, sock=one, ssl=tls, backlog=backlog, ssl_handshake_timeout=patience_s)
            for one in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # every second
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.second()
        return await super().on_tick(counter)


def max_connections() -> int:
    """The number of connections that this process can hold; each may need a second, outgoing one."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (files - RESERVED_DESCRIPTORS) // 2)


def _error_bytes(error: ServiceError) -> bytes:
    body = orjson.dumps(error.problem())
    head = (
        f"HTTP/1.1 {error.status} {error.title}",
        "content-type: application/problem+json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
