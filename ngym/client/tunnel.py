"""How does a connection get through a proxy? `CONNECT host:port`, and from its 200 on the bytes are the server's."""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import cast
from urllib.parse import SplitResult, unquote

_MAX_HEAD = 1 << 16


class _Opening(asyncio.Protocol):
    """Reads the proxy's answer to CONNECT, up to its empty line."""

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
    """Connect `protocol` to `target` (host:port) by TLS inside a tunnel.

    Raises:
        OSError: the proxy cannot be reached, or does not want to; or the server's certificate is wrong.
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
