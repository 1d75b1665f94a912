"""What may one connection cost a server? Heads and bodies must make progress, answers must be read, and there is room for so many.

Time is counted in seconds in which the server's event loop turned: one that stood still for a minute cuts nobody off.
An answer may take as long as it takes, and so may a body that keeps coming.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Literal

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ngym.errors import NotReady, ServiceError

HEAD_S = 10  # from the connection, or from the first byte of a further request, to the end of its head
MAX_HEAD_BYTES = 64 << 10
BODY_S = 10  # in each of which so much of a body must come:
BODY_BYTES = 10 << 10
LINGER_S = 5  # for so long, what comes of a body that nobody wants is thrown away; then the connection is closed
UNREAD_S = 600  # an answer of which nothing is read; a trainer's event loop may stand still for minutes
OWN_PACE = "ngym.own_pace"  # in the scope of a request whose handler itself watches how its body comes

KEPT_FILES = 64  # descriptors that are no connection's: the log, the listening sockets, the pipes of workers
TURNED_AWAY = 32  # connections over the room that are still told so; those over that are closed at once
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
        self.limit_concurrency = None  # uvicorn would refuse health checks, too, and with a text
        self._awaits: Literal["head", "body", "nothing"] = "head"
        self._seconds = 0  # since it awaits that, or since the body last made progress
        self._bytes = 0
        self._unread_s = self._unwanted_s = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if self._room is not None and len(self.connections) > self._room + TURNED_AWAY:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        HttpToolsProtocol.data_received(self, data)
        if self._awaits == "head":
            self._bytes += len(data)
            if self._bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES >> 10} KiB")

    # Each of these is called for every request: they are written to cost next to nothing.

    def on_message_begin(self) -> None:
        HttpToolsProtocol.on_message_begin(self)
        if self._awaits == "nothing":  # else it is the connection's first, whose time runs
            self._awaits = "head"
            self._seconds = self._bytes = 0

    def on_headers_complete(self) -> None:
        self._awaits = "body"
        self._seconds = self._bytes = 0
        if self._room is not None and len(self.connections) > self._room:
            self.app = self._full
        HttpToolsProtocol.on_headers_complete(self)

    def on_body(self, body: bytes) -> None:
        HttpToolsProtocol.on_body(self, body)
        self._bytes += len(body)

    def on_message_complete(self) -> None:
        HttpToolsProtocol.on_message_complete(self)
        self._awaits = "nothing"

    def second(self) -> None:
        """Another second has passed."""
        self._seconds += 1
        self._unread_s = self._unread_s + 1 if self.flow.write_paused else 0
        if self._unread_s > UNREAD_S:
            self.transport.abort()
        elif self._awaits == "head":
            self._second_of_a_head()
        elif self._awaits == "body":
            self._second_of_a_body()

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
        """Say what is wrong, if no answer has begun, and hang up."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            error = ServiceError(detail, status=status, retryable=status == 408)
            error.title = HTTPStatus(status).phrase
            self.transport.write(_written(error))
        if cycle is not None:
            cycle.disconnected = True  # what its handler still says goes nowhere
            cycle.message_event.set()
        self.transport.close()

    async def _full(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in OPEN or len(self.connections) <= (self._room or 0):
            await self._served(scope, receive, send)
            return
        error = NotReady(f"{self._room} connections are open here, and there is room for no more; come again")
        headers = [(b"content-type", b"application/problem+json"), (b"retry-after", b"1"), (b"connection", b"close")]
        body = orjson.dumps(error.problem())
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Server(uvicorn.Server):
    """Serves where signals are somebody else's affair: uvicorn re-raises SIGTERM after serving, so that nobody's `finally` runs."""

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
    """How many connections this process can hold: each may need another one outwards."""
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
