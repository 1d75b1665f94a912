"""The HTTP client under `ngym.peers` and `ngym.remote`, with connections that are kept open.

HTTP/1.1 on httptools, as far as JSON services need it: http and https, answers of any framing. No redirects, no
compression (none is requested), no stored cookies; https also through a proxy. docs/adr/0010 has the reasons.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import SplitResult, quote, unquote, urlsplit

import httptools
import orjson

from ngym.net.keepalive import SILENT_S, TcpSocket, enable_keepalive, silence_s
from ngym.net.request_context import Timeout
from ngym.net.tls import client_context

_MAX_HEAD = 1 << 16
MAX_ANSWER_BYTES = 256 << 20  # head and body of an answer in memory: the largest that a service of ngym accepts
MAX_BUFFERED_BYTES = 1 << 16  # of a streamed body; beyond it the server has to wait
KEEPALIVE_S = 4.0  # below uvicorn's 5 s and the 75 s of ngym's servers, so that no connection is closed under a request
CONNECT_TIMEOUT_S = 5.0
MAX_TARGETS = 1024
MAX_NAME = 64  # characters of a header's name that is remembered
JOINED_BYTES = 16 << 10  # a larger body is not copied behind its head
MAX_CONNECTING = 64  # at a time: a server's queue of new connections is short
__all__ = ["CONNECT_TIMEOUT_S", "AnswerTooLong", "Client", "Reply", "StreamedReply"]
SILENT = f"its machine has been silent for {SILENT_S:.0f} s"
VISIBLE = re.compile(r"[!-~]+")


class AnswerTooLong(ConnectionResetError):
    """An answer has more than MAX_ANSWER_BYTES; another attempt would get the same."""


class _ConnectTimeout(ConnectionRefusedError):
    """The other machine did not answer. began: when the attempt began, in the time of the loop."""

    def __init__(self, began: float) -> None:
        super().__init__(f"no connection within {CONNECT_TIMEOUT_S:.0f} s")
        self.began = began


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
            line = status.decode("latin-1")
            raise ConnectionRefusedError(f"the proxy {proxy.hostname} did not connect to {target}: {line}")
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
            self._connection.set_paused(False)
        return part

    def close(self) -> None:
        if not isinstance(self._end, StopAsyncIteration):
            self._connection.close()  # the rest of the answer has no reader

    def take(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > MAX_BUFFERED_BYTES:
            self._connection.set_paused(True)
        self._wake()

    def end(self, reason: Exception) -> None:
        """End the body; the reason of a complete one is StopAsyncIteration."""
        self._end = self._end or reason
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class StreamedReply(NamedTuple):
    """Status and headers (lower case) of an answer whose body is not read yet."""

    status: int
    headers: Mapping[str, str]
    body: Body


class ConnectionOwner(Protocol):
    """The owner of the connections to one server."""

    def add(self, connection: Connection) -> None: ...
    def discard(self, connection: Connection) -> None: ...
    def give_back(self, connection: Connection) -> None: ...


Request = tuple[bytes, ...]  # its head and its body; a short one is one piece
_HEADER_NAMES: dict[bytes, str] = {}  # of answers -> in lower case


def _header_name(name: bytes) -> str:
    key = name.lower().decode("latin-1")
    if len(_HEADER_NAMES) < MAX_TARGETS and len(name) < MAX_NAME:
        _HEADER_NAMES[name] = key
    return key


class Connection(asyncio.Protocol):
    """HTTP/1.1 as far as JSON services need it: answers of any framing, at most one request at a time."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: TcpSocket | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Reply] | None = None
        self._head: asyncio.Future[StreamedReply] | None = None  # instead of `_answer`, for a streamed body
        self._body: Body | None = None
        self._received = 0  # bytes since the request was sent
        self.idle_since = 0.0
        self._begin()

    def is_fresh(self) -> bool:
        """Whether a request may be sent on it: it is open and has not been idle for long."""
        return self._transport is not None and self.loop.time() - self.idle_since < KEEPALIVE_S

    async def exchange(self, request: Request) -> Reply:
        """Send a request and return its answer. The connection is given back when that is complete.

        Raises:
            ConnectionRefusedError: it was not sent.
            ConnectionResetError: the connection broke, or the answer is not HTTP or too long.
        """
        if self._transport is None:
            raise ConnectionRefusedError("the connection was closed before the request was sent")
        answer: asyncio.Future[Reply] = self.loop.create_future()
        self._answer, self._received = answer, 0
        if len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._answer is answer:  # else the answer has come, and the connection serves another request
                self.close()  # the pending answer has no reader
            raise

    async def begin(self, request: Request) -> StreamedReply:
        """As `exchange`, but returns with the head; the connection is given back when the body is complete."""
        if self._transport is None:
            raise ConnectionRefusedError("the connection was closed before the request was sent")
        head: asyncio.Future[StreamedReply] = self.loop.create_future()
        body = Body(self)
        self._head, self._body, self._received = head, body, 0
        self._transport.writelines(request)
        try:
            return await head
        except asyncio.CancelledError:
            if self._body is body:
                self.close()
            raise

    def set_paused(self, paused: bool) -> None:
        """Pause reading, or resume it."""
        if self._transport is not None and paused == self._transport.is_reading():
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def close_if_silent(self) -> None:
        """Close it if the other machine has sent no packet for SILENT_S."""
        if self._socket is not None and silence_s(self._socket) > SILENT_S:
            self._fail(ConnectionResetError(SILENT))
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            enable_keepalive(self._socket)
        self._owner.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._socket = self._parser = None  # the parser references this object
        self._owner.discard(self)
        why = f"the connection broke: {error}" if error else "the connection was closed before an answer"
        self._fail(ConnectionResetError(SILENT if isinstance(error, TimeoutError) else why))

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionResetError(f"the answer is not HTTP: {error}"))
            self.close()
            return
        if self._received > MAX_ANSWER_BYTES and (self._answer is not None or self._head is not None):
            self._fail(AnswerTooLong(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB"))
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
        key = _HEADER_NAMES.get(name) or _header_name(name)
        if key == "set-cookie":
            cookie, _, content = value.partition(b";")[0].decode("latin-1").partition("=")
            self._cookies[cookie.strip()] = content.strip()
        self._headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headed = True
        self._received = max(self._received, int(self._headers.get("content-length", 0)))  # of digits, says the parser
        status = self._parser.get_status_code()
        head = self._head
        if status >= 200 and head is not None and self._body is not None:
            self._head = None
            if not head.done():
                head.set_result(StreamedReply(status, self._headers, self._body))

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
            self.set_paused(False)
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

    def _fail(self, error: ConnectionResetError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
        head, self._head = self._head, None
        body, self._body = self._body, None
        if head is not None and not head.done():
            head.set_exception(error)
        elif body is not None:
            body.end(error)


class Pool:
    """A pool with as many connections as concurrent requests.

    Only connections in the making are bounded. Another bound would be a guess (a tool may answer at once or after a
    minute), and two services that wait for each other could deadlock on it.

    Args:
        url: scheme, host and port of the server.
        proxy: for https, `http://host:port`; None: no proxy.
    """

    def __init__(self, url: str, proxy: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConnectionRefusedError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConnectionRefusedError(f"{url!r} is not an http:// or https:// URL")
        self.host_header = parts.netloc.rpartition("@")[2]
        self._host = parts.hostname
        self._tls = client_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._proxy = urlsplit(proxy) if proxy and self._tls else None
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []  # longest idle first
        self._waiting: deque[asyncio.Future[Connection]] = deque()
        self._connecting: set[asyncio.Task[Connection]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._opened_at = 0.0  # when the last connection was opened

    def take_idle(self) -> Connection | None:
        """The most recently used connection: it is warm, and the others may expire."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.close()
        return None

    async def acquire(self) -> Connection:
        """Wait for the next connection that is given back or opened, in order of arrival."""
        waiter: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._open_more()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back(waiter.result())
            raise

    def _open_more(self) -> None:
        for _ in range(min(MAX_CONNECTING, len(self._waiting)) - len(self._connecting)):
            task = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._on_connected)

    def _on_connected(self, task: asyncio.Task[Connection]) -> None:
        self._connecting.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._opened_at = asyncio.get_running_loop().time()
            self.give_back(task.result())
        elif waiter := self._next_waiter():
            waiter.set_exception(error)
            if isinstance(error, _ConnectTimeout) and self._opened_at < error.began:
                while waiter := self._next_waiter():  # each would wait as long for a machine that is silent
                    waiter.set_exception(_ConnectTimeout(error.began))
        self._open_more()

    def _next_waiter(self) -> asyncio.Future[Connection] | None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                return waiter
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._proxy is not None and self._tls is not None:
                    connection = Connection(self)
                    await tunnel(self._proxy, f"{self._host}:{self._port}", self._host, self._tls, connection)
                    return connection
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls
                )
                return connection
        except TimeoutError:
            raise _ConnectTimeout(began) from None
        except OSError as error:
            raise ConnectionRefusedError(str(error)) from error

    def add(self, connection: Connection) -> None:
        self._open.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._close_unused)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)

    def give_back(self, connection: Connection) -> None:
        if waiter := self._next_waiter():
            waiter.set_result(connection)
            return
        connection.idle_since = connection.loop.time()
        self._idle.append(connection)

    def _close_unused(self) -> None:
        """Close the connections that were idle for long, and those to a machine that is silent."""
        fresh = [connection for connection in self._idle if connection.is_fresh()]
        for connection in self._idle[: len(self._idle) - len(fresh)]:
            connection.close()
        self._idle = fresh
        for connection in list(self._open):
            connection.close_if_silent()
        call_later = asyncio.get_running_loop().call_later
        self._sweep = call_later(KEEPALIVE_S, self._close_unused) if self._open else None

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self._connecting:
            task.cancel()
        while waiter := self._next_waiter():
            waiter.set_exception(ConnectionRefusedError("this process closes its connections"))
        for connection in list(self._open):
            connection.close()


class Client:
    """Requests to any number of servers. One per process and event loop; close it at the end.

    Args:
        headers: sent with every request.
        proxy: for https, `http://host:port`; None: direct connections.
    """

    def __init__(self, headers: Mapping[str, str], proxy: str | None = None) -> None:
        self._headers = _lines(headers)
        self._proxy = proxy
        self._pools: dict[str, Pool] = {}
        self._targets: dict[tuple[str, str], tuple[Pool, str]] = {}  # of recent requests, by method and URL

    async def request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Reply:
        """Send a request and return its answer.

        Raises:
            ConnectionRefusedError: no connection, so the request was not sent.
            AnswerTooLong: the answer has more than MAX_ANSWER_BYTES.
            ConnectionResetError: the connection broke, or the answer was not HTTP; the request may have been processed.
            TimeoutError: no answer in time; the message says what it waited for.
        """
        pool, request = self._prepare(method, url, body, headers)
        connection = None
        try:
            with Timeout(timeout_s):
                connection = pool.take_idle() or await pool.acquire()
                return await connection.exchange(request)
        except TimeoutError:
            raise TimeoutError("waited for a connection" if connection is None else "waited for the answer") from None

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[StreamedReply]:
        """Send a request and read the body of its answer as it arrives; leaving the block early closes the connection.

        A slow reader slows only the server. Raises as `request`; the timeout is until the last part.
        """
        pool, request = self._prepare(method, url, body, headers)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        connection = None
        try:
            async with asyncio.timeout_at(deadline):
                connection = pool.take_idle() or await pool.acquire()
                answer = await connection.begin(request)
        except TimeoutError:
            raise TimeoutError("waited for a connection" if connection is None else "waited for the answer") from None
        timer = loop.call_at(deadline, answer.body.end, TimeoutError("waited for the rest of the answer"))
        try:
            yield answer
        finally:
            timer.cancel()
            answer.body.close()

    def _prepare(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[Pool, Request]:
        pool, start = self._targets.get((method, url)) or self._target(method, url)
        if body is None:
            return pool, (f"{start}{_lines(headers)}\r\n".encode("latin-1"),)
        head = f"{start}{_lines(headers)}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        return pool, (head + body,) if len(body) < JOINED_BYTES else (head, body)

    def _target(self, method: str, url: str) -> tuple[Pool, str]:
        """The pool of a URL, and the beginning of a request's head."""
        path = url.find("/", url.find("//") + 2)
        server, target = (url, "/") if path < 0 else (url[:path], url[path:])
        pool = self._pools.get(server) or self._pools.setdefault(server, Pool(server, self._proxy))
        if not VISIBLE.fullmatch(target):
            target = quote(target, safe="!$%&'()*+,/:;=?@[]~")
        if len(self._targets) >= MAX_TARGETS:
            self._targets.clear()
        known = pool, f"{method} {target} HTTP/1.1\r\nhost: {pool.host_header}\r\n{self._headers}"
        self._targets[method, url] = known
        return known

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._targets.clear()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop


def _lines(headers: Mapping[str, str]) -> str:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError(f"a line break in one of the headers {', '.join(headers)}")
    return lines
