"""Connection pool of one server: reuses the most recently used connection; the longest waiting caller is first."""

from __future__ import annotations

import asyncio
from collections import deque
from urllib.parse import urlsplit

from ngym.client.connection import KEEPALIVE_S, Connection, tunnel
from ngym.net.tls import client_context

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTING = 64  # at a time: a server's queue of new connections is short


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

    def idle(self) -> Connection | None:
        """The most recently used connection: it is warm, and the others may expire."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.close()
        return None

    async def connection(self) -> Connection:
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
            task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        self._connecting.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.give_back(task.result())
        elif waiter := self._next_waiter():
            waiter.set_exception(error)
        self._open_more()

    def _next_waiter(self) -> asyncio.Future[Connection] | None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                return waiter
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
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
            raise ConnectionRefusedError(f"no connection within {CONNECT_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise ConnectionRefusedError(str(error)) from error

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)

    def give_back(self, connection: Connection) -> None:
        if waiter := self._next_waiter():
            waiter.set_result(connection)
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        kept = [connection for connection in self._idle if connection.is_fresh()]
        for connection in self._idle[: len(self._idle) - len(kept)]:
            connection.close()
        self._idle = kept
        again = asyncio.get_running_loop().call_later
        self._sweep = again(KEEPALIVE_S, self._close_idle) if kept else None

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self._connecting:
            task.cancel()
        while waiter := self._next_waiter():
            waiter.set_exception(ConnectionRefusedError("this process closes its connections"))
        for connection in list(self._open):
            connection.close()
