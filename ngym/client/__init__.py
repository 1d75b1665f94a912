"""How does one HTTP request get its answer? Over a connection that is kept open; `ngym.peers` stands on it, and nobody else.

HTTP/1.1 on httptools, and as much of it as JSON services need: http and https, answers of any framing. No redirects, no
compression (none is asked for), no cookies kept. docs/adr/0010 says why it is our own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from urllib.parse import quote

from ngym.client.connection import Reply
from ngym.client.pool import CONNECT_TIMEOUT_S, Pool

__all__ = ["CONNECT_TIMEOUT_S", "Client", "Reply"]

VISIBLE = re.compile(r"[!-~]+")


class Client:
    """Requests to any number of servers. One per process and event loop; close it at the end.

    Args:
        headers: sent with every request.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = _lines(headers)
        self._pools: dict[str, Pool] = {}

    async def request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Reply:
        """One request and its answer.

        Raises:
            ConnectionRefusedError: there is no connection, so the request was not sent.
            ConnectionResetError: the connection broke, or what came was no HTTP; the request may have been processed.
            TimeoutError: says what was waited for.
        """
        path = url.find("/", url.find("//") + 2)
        server, target = (url, "/") if path < 0 else (url[:path], url[path:])
        pool = self._pools.get(server) or self._pools.setdefault(server, Pool(server))
        if not VISIBLE.fullmatch(target):
            target = quote(target, safe="!$%&'()*+,/:;=?@[]~")
        length = "" if body is None else f"content-length: {len(body)}\r\n"
        head = f"{method} {target} HTTP/1.1\r\nhost: {pool.host_header}\r\n{self._headers}{_lines(headers)}{length}\r\n"
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = pool.idle() or await pool.connection()
                return await connection.exchange(head.encode("latin-1") + (body or b""))
        except TimeoutError:
            raise TimeoutError("waited for a connection" if connection is None else "waited for the answer") from None

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
