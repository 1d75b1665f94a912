"""One HTTP/1.1 connection over asyncio streams, and the tunnel of a proxy."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import SplitResult, unquote

import httptools
import orjson

_MAX_HEAD = 1 << 16
MAX_ANSWER_BYTES = 256 << 20  # head and body of an answer in memory: the largest that a service of ngym accepts
MAX_BUFFERED_BYTES = 1 << 16  # of a streamed body; beyond it the server has to wait
KEEPALIVE_S = 4.0  # below uvicorn's 5 s and the 75 s of ngym's servers, so that no connection is closed under a request


class _Opening(asyncio.Protocol):
    """Reads the proxy's answer to CONNECT, up to the empty line."""

    def __init__(self) -> None:
        self.status: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if not self.status.done() and (b"\r\n\r\n" in self._head or len(self._head) > _MAX_HEAD):
            self.status.set_result(self._head.partition(b"\r\n")[0])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.status.done():
            self.status.set_exception(ConnectionRefusedError("the proxy closed the connection"))


async def tunnel(
    proxy: SplitResult, target: str, server_name: str, tls: ssl.SSLContext, protocol: asyncio.Protocol
) -> None:
    """Connect `protocol` to `target` (host:port) by TLS through a proxy.

    Raises:
        OSError: the proxy cannot be reached or refuses, or the server's certificate is wrong.
    """
    loop = asyncio.get_running_loop()
    transport, opening = await loop.create_connection(_Opening, proxy.hostname or "", proxy.port or 80)
    try:
        transport.write(f"CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n{_authorization(proxy)}\r\n".encode("latin-1"))
        status = await opening.status
        if status.split(b" ")[1:2] != [b"200"]:
            told = status.decode("latin-1")
            raise ConnectionRefusedError(f"the proxy {proxy.hostname} did not connect to {target}: {told}")
        inner = await loop.start_tls(transport, protocol, tls, server_hostname=server_name)
    except BaseException:
        transport.abort()
        raise
    protocol.connection_made(cast(asyncio.Transport, inner))


def _authorization(proxy: SplitResult) -> str:
    if proxy.username is None:
        return ""
    user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return f"proxy-authorization: Basic {base64.b64encode(user.encode()).decode()}\r\n"


class Reply(NamedTuple):
    """Status, headers (lower case) and body of an answer. cookies: those that it set, without attributes."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cookies: Mapping[str, str]

    def json(self) -> Any:
        return orjson.loads(self.body)


class Body:
    """A streamed body: `async for part in body`. A reader that stops before the end must call `close`.

    Raises (while read):
        ConnectionResetError: the connection broke. TimeoutError: the rest did not come in time.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._end: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> bytes:
        while not self._parts:
            if self._end is not None:
                raise self._end
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._size = [], 0
        if self._end is None:
            self._connection.hold(False)
        return part

    def close(self) -> None:
        if not isinstance(self._end, StopAsyncIteration):
            self._connection.close()  # the rest of the answer has no reader

    def take(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > MAX_BUFFERED_BYTES:
            self._connection.hold(True)
        self._wake()

    def end(self, reason: Exception) -> None:
        """End the body; the reason of a complete one is StopAsyncIteration."""
        self._end = self._end or reason
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class Streamed(NamedTuple):
    """Status and headers (lower case) of an answer whose body is not read yet."""

    status: int
    headers: Mapping[str, str]
    body: Body


class Owner(Protocol):
    """The owner of the connections to one server."""

    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...
    def give_back(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """HTTP/1.1 as far as JSON services need it: answers of any framing, at most one request at a time."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Reply] | None = None
        self._head: asyncio.Future[Streamed] | None = None  # instead of `_answer`, for a streamed body
        self._body: Body | None = None
        self._received = 0  # bytes since the request was sent
        self.idle_since = 0.0
        self._begin()

    def is_fresh(self) -> bool:
        """Whether a request may be sent on it: it is open and has not been idle for long."""
        return self._transport is not None and self._loop.time() - self.idle_since < KEEPALIVE_S

    async def exchange(self, request: bytes) -> Reply:
        """Send a request (head and body) and return its answer. The connection is given back when that is complete.

        Raises:
            ConnectionRefusedError: it was not sent.
            ConnectionResetError: the connection broke, or the answer is not HTTP or too long.
        """
        if self._transport is None:
            raise ConnectionRefusedError("the connection was closed before the request was sent")
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._answer, self._received = answer, 0
        self._transport.write(request)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._answer is answer:  # else the answer has come, and the connection serves another request
                self.close()  # the pending answer has no reader
            raise

    async def begin(self, request: bytes) -> Streamed:
        """As `exchange`, but returns with the head; the connection is given back when the body is complete."""
        if self._transport is None:
            raise ConnectionRefusedError("the connection was closed before the request was sent")
        head: asyncio.Future[Streamed] = self._loop.create_future()
        body = Body(self)
        self._head, self._body, self._received = head, body, 0
        self._transport.write(request)
        try:
            return await head
        except asyncio.CancelledError:
            if self._body is body:
                self.close()
            raise

    def hold(self, held: bool) -> None:
        """Pause reading, or resume it."""
        if self._transport is not None and held == self._transport.is_reading():
            (self._transport.pause_reading if held else self._transport.resume_reading)()

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._owner.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._parser = None  # the parser references this object
        self._owner.closed(self)
        self._fail(f"the connection broke: {error}" if error else "the connection was closed before an answer")

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > MAX_ANSWER_BYTES and (self._answer is not None or self._head is not None):
            self._fail(f"the answer does not end within {MAX_ANSWER_BYTES >> 20} MiB")
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def eof_received(self) -> None:
        if (
            (self._answer or self._body)
            and self._headed
            and not self._headers.keys() & {"content-length", "transfer-encoding"}
        ):
            self._complete(keep=False)  # an answer without a length ends with its connection

    def on_message_begin(self) -> None:
        if self._answer is None and self._body is None:
            self.close()  # an answer to nothing

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower().decode("latin-1")
        if key == "set-cookie":
            cookie, _, content = value.partition(b";")[0].decode("latin-1").partition("=")
            self._cookies[cookie.strip()] = content.strip()
        self._headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headed = True
        status = self._parser.get_status_code()
        head = self._head
        if status >= 200 and head is not None and self._body is not None:
            self._head = None
            if not head.done():
                head.set_result(Streamed(status, self._headers, self._body))

    def on_body(self, part: bytes) -> None:
        if self._body is None:
            self._parts.append(part)
        else:
            self._body.take(part)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._begin()  # 100 Continue and similar come before the answer
        elif self._answer is not None or self._body is not None:
            self._complete(keep=self._parser.should_keep_alive())

    def _begin(self) -> None:
        self._headers: dict[str, str] = {}
        self._cookies: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._headed = False

    def _complete(self, *, keep: bool) -> None:
        if (streamed := self._body) is not None:
            self._body = None
            self.hold(False)
            streamed.end(StopAsyncIteration())
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        reply = Reply(self._parser.get_status_code(), self._headers, body, self._cookies)
        answer, self._answer = self._answer, None
        self._begin()
        assert self._transport is not None
        if keep and self._transport.get_write_buffer_size() == 0:
            self._owner.give_back(self)
        else:
            self._transport.close()
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _fail(self, why: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionResetError(why))
        head, self._head = self._head, None
        body, self._body = self._body, None
        if head is not None and not head.done():
            head.set_exception(ConnectionResetError(why))
        elif body is not None:
            body.end(ConnectionResetError(why))
