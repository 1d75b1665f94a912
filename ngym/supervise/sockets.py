"""Listening sockets, bound before any service starts: nobody races for a port, a restarted service keeps its own."""

from __future__ import annotations

import errno
import socket

from ngym.errors import UsageError

BACKLOG = 4096
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def listen(host: str, port: int, who: str, remedy: str) -> socket.socket:
    """A socket that listens on host:port (port 0: any free one). UsageError says who wanted it and the remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY where it sees TCP
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "is in use by another program" if in_use else f"cannot be used: {error.strerror or error}"
        raise UsageError(f"{who}: port {port} on {host} {reason}; {remedy}") from None
    return sock


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """The URL at which this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    host = ANYWHERE.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
