"""Limits of server connections: heads and bodies must make progress, answers must be read, and their number is bounded.

Time is counted in seconds in which the server's event loop runs, so a blocked loop cuts no connection off. There is no
limit on the time of an answer, or of a body that makes progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import orjson
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ngym.errors import NotReady, ServiceError

KEEPALIVE_S = 75  # longer than most clients keep an idle connection, so that it is not closed under a request
HEAD_S = 10  # from the connection, or from the first byte of a further request, to the end of its head
MAX_HEAD_BYTES = 64 << 10
BODY_S = 10  # the period in which BODY_BYTES of a body must arrive
BODY_BYTES = 10 << 10
LINGER_S = 5  # the rest of a refused request is discarded for this time; then the connection is closed
UNREAD_S = 600  # limit of an answer that is not read; a trainer's event loop may block for minutes
OWN_PACE = "ngym.own_pace"  # in the scope of a request whose handler limits the body itself

KEPT_FILES = 64  # descriptors other than connections: the log, the listening sockets, the pipes of workers
TURNED_AWAY = 32  # connections over the limit that get an error answer; further ones are closed at once
OPEN = ("/health", "/")


class Connection(HttpToolsProtocol):
    """One client's connection; `second` is called once a second."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._served = self.app
        self._room = self.limit_concurrency
        self.limit_concurrency = None  # uvicorn would also refuse health checks, with plain text
        self._awaits: Literal["head", "body", "nothing", "end"] = "head"
        self._seconds = 0  # since the state began, or since the body last made progress
        self._bytes = 0
        self._unread_s = self._unwanted_s = 0
        self._head: bytes | None = None  # of an answer whose body is not written yet
        self._begun: RequestResponseCycle | None = None  # the cycle whose head was held last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if self._room is not None and len(self.connections) > self._room + TURNED_AWAY:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        HttpToolsProtocol.connection_lost(self, exc)
        self._unset_keepalive_if_required()  # uvicorn keeps it if the client resets the connection
        self.pipeline.clear()
        self._head = None
        self.app = self._served
        if self.cycle is not None:
            self.cycle.transport = self.transport  # breaks a reference cycle

    def data_received(self, data: bytes) -> None:
        if self._awaits == "end":
            return
        if self._awaits == "head":  # a head that begins later in this data is counted from the next call on
            self._bytes += len(data)
        HttpToolsProtocol.data_received(self, data)
        if self._awaits == "head" and self._bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES >> 10} KiB")

    # The following methods are called for every request, so they must be cheap.

    def on_message_begin(self) -> None:
        HttpToolsProtocol.on_message_begin(self)
        if self._awaits == "nothing":  # else it is the connection's first request, whose time already runs
            self._awaits = "head"
            self._seconds = self._bytes = 0

    def on_headers_complete(self) -> None:
        self._awaits = "body"
        self._seconds = self._bytes = self._unwanted_s = 0
        if self._room is not None and len(self.connections) > self._room:
            self.app = self._full
        HttpToolsProtocol.on_headers_complete(self)
        self.cycle.transport = self  # type: ignore[assignment]  # it calls the three methods below

    def write(self, data: bytes) -> None:
        """Write the head together with the body, which saves a system call here and two in the client."""
        if self._head is not None:
            head, self._head = self._head, None
            self.transport.writelines((head, data))
        elif self._awaits == "end":
            return  # a pipelined request before the refused one
        elif (
            (cycle := self.cycle) is not self._begun
            and cycle.expected_content_length
            and cycle.scope["method"] != "HEAD"
        ):
            self._begun = cycle
            self._head = data
        else:
            self.transport.write(data)

    def _write_head(self) -> None:
        """Write a held head whose body does not come."""
        if self._head is not None:
            self.transport.write(self._head)
            self._head = None

    def is_closing(self) -> bool:
        return self._awaits == "end" or self.transport.is_closing()

    def close(self) -> None:
        self._write_head()
        if self._awaits == "nothing":
            self.transport.close()
        else:
            self._leave()

    def on_body(self, body: bytes) -> None:
        HttpToolsProtocol.on_body(self, body)
        self._bytes += len(body)

    def on_message_complete(self) -> None:
        HttpToolsProtocol.on_message_complete(self)
        self._awaits = "nothing"

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore a requested upgrade (RFC 9110, 7.8) without uvicorn's advice to install packages."""

    def second(self) -> None:
        """Check the limits; called every second."""
        self._seconds += 1
        self._unread_s = self._unread_s + 1 if self.flow.write_paused else 0
        if self._unread_s > UNREAD_S:
            self.transport.abort()
        elif self._awaits == "head":
            self._second_of_a_head()
        elif self._awaits == "body":
            self._second_of_a_body()
        elif self._awaits == "end" and self._seconds > LINGER_S:
            self.transport.close()

    def shutdown(self) -> None:
        if self._awaits == "end":
            self.transport.close()
        HttpToolsProtocol.shutdown(self)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _second_of_a_head(self) -> None:
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self._seconds > HEAD_S:
            self._refuse(408, f"the head of the request did not come within {HEAD_S} s")

    def _second_of_a_body(self) -> None:
        if self.cycle.response_complete:
            self._unwanted_s += 1
            if self._unwanted_s > LINGER_S:
                self.transport.close()
        elif self._bytes >= BODY_BYTES or self._waits_for_us():
            self._seconds = self._bytes = 0
        elif self._seconds > BODY_S:
            self._refuse(408, f"of the body less than {BODY_BYTES >> 10} KiB came in {BODY_S} s")

    def _waits_for_us(self) -> bool:
        return self.flow.read_paused or self.cycle.waiting_for_100_continue or OWN_PACE in self.scope

    def _refuse(self, status: int, detail: str) -> None:
        """Send an error, if no answer has begun, and close the connection."""
        if self.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_written(ServiceError(detail, status=status, retryable=status == 408)))
        if cycle is not None:
            cycle.disconnected = True  # discards further output of its handler
            cycle.message_event.set()
        self._leave()

    def _leave(self) -> None:
        """Close the connection once the client has read the answer.

        Closing a socket while data still arrives resets the connection, and the client's system then discards what the
        client has not read (RFC 9112, 9.6).
        """
        if self.is_closing():
            return
        self._write_head()
        self._awaits = "end"
        self._seconds = 0
        self.pipeline.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    async def _full(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in OPEN or len(self.connections) <= (self._room or 0):
            await self._served(scope, receive, send)
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
        limit_concurrency=room(),
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


def room() -> int:
    """The number of connections that this process can hold; each may need a second, outgoing one."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (files - KEPT_FILES) // 2)


def _written(error: ServiceError) -> bytes:
    body = orjson.dumps(error.problem())
    head = (
        f"HTTP/1.1 {error.status} {error.title}",
        "content-type: application/problem+json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
