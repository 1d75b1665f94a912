"""The HTTP client under `ngym.peers` and `ngym.remote`, with connections that are kept open.

HTTP/1.1 on httptools, as far as JSON services need it: http and https, answers of any framing. No redirects, no
compression (none is requested), no stored cookies; https also through a proxy. docs/adr/0010 has the reasons.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote

from ngym.client.connection import Reply, Streamed
from ngym.client.pool import CONNECT_TIMEOUT_S, Pool

__all__ = ["CONNECT_TIMEOUT_S", "Client", "Reply", "Streamed"]

VISIBLE = re.compile(r"[!-~]+")


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

    async def request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Reply:
        """Send a request and return its answer.

        Raises:
            ConnectionRefusedError: no connection, so the request was not sent.
            ConnectionResetError: the connection broke, or the answer was not HTTP; the request may have been processed.
            TimeoutError: no answer in time; the message says what it waited for.
        """
        pool, request = self._prepared(method, url, body, headers)
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = pool.idle() or await pool.connection()
                return await connection.exchange(request)
        except TimeoutError:
            raise TimeoutError("waited for a connection" if connection is None else "waited for the answer") from None

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[Streamed]:
        """Send a request and read the body of its answer as it arrives; leaving the block early closes the connection.

        A slow reader slows only the server. Raises as `request`; the timeout is until the last part.
        """
        pool, request = self._prepared(method, url, body, headers)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        connection = None
        try:
            async with asyncio.timeout_at(deadline):
                connection = pool.idle() or await pool.connection()
                answer = await connection.begin(request)
        except TimeoutError:
            raise TimeoutError("waited for a connection" if connection is None else "waited for the answer") from None
        timer = loop.call_at(deadline, answer.body.end, TimeoutError("waited for the rest of the answer"))
        try:
            yield answer
        finally:
            timer.cancel()
            answer.body.close()

    def _prepared(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[Pool, bytes]:
        path = url.find("/", url.find("//") + 2)
        server, target = (url, "/") if path < 0 else (url[:path], url[path:])
        pool = self._pools.get(server) or self._pools.setdefault(server, Pool(server, self._proxy))
        if not VISIBLE.fullmatch(target):
            target = quote(target, safe="!$%&'()*+,/:;=?@[]~")
        length = "" if body is None else f"content-length: {len(body)}\r\n"
        head = f"{method} {target} HTTP/1.1\r\nhost: {pool.host_header}\r\n{self._headers}{_lines(headers)}{length}\r\n"
        return pool, head.encode("latin-1") + (body or b"")

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop


def _lines(headers: Mapping[str, str]) -> str:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError(f"a line break in one of the headers {', '.join(headers)}")
    return lines
