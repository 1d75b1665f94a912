"""The viewer's server: its address, its token, and its end. It runs in this process until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import ASGIApp

from ngym.errors import UsageError
from ngym.net.auth import RUN_TOKEN, Lock, hosts_of, is_loopback, new_token, token_from
from ngym.view.app import application
from ngym.view.runs import Opened

PORT, TRIED_PORTS = 8770, 30
BACKLOG = 128
GRACE_S = 1
OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)
OTHER_PORT = "choose another --port, or --port 0 for any free one"
OTHER_HOST = "name an address of this machine with --host, or 0.0.0.0 for all that it has"


@dataclass(frozen=True)
class Door:
    """An open socket, and what a browser is given to find it. token: None on loopback without NGYM_TOKEN."""

    socket: socket.socket
    token: str | None

    @property
    def address(self) -> str:
        """Without the token."""
        host, port = self.socket.getsockname()[:2]
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    @property
    def url(self) -> str:
        """What is opened in a browser."""
        return f"{self.address}#token={quote(self.token, safe='')}" if self.token else self.address


def door(host: str, port: int | None) -> Door:
    """Listen. Off loopback a token is needed: NGYM_TOKEN, or one that is made.

    Args:
        port: 0: any free one; None: the usual one, or the next that is free.

    Raises:
        UsageError: the port is in use, the host does not belong to this machine, or the token could be guessed.
    """
    token = token_from(RUN_TOKEN) or (None if is_loopback(host) else new_token())
    ports = range(PORT, PORT + TRIED_PORTS) if port is None else [port]
    for number in ports:
        try:
            return Door(_listening(host, number), token)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    remedy = OTHER_PORT if problem.errno in OF_THE_PORT else OTHER_HOST
    raise UsageError(f"port {ports[0]} on {host}: {problem.strerror or problem}; {remedy}")


def serve(shown: Opened, entrance: Door, title: str, ready: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM. ready: called when the page can be asked for."""
    lock = Lock([entrance.token]) if entrance.token else None
    # A token is not a cookie, so a page of another name has none to send along.
    hosts = None if lock else frozenset(hosts_of([entrance.address]))
    app = application(shown, hosts=hosts, lock=lock, title=title)
    asyncio.run(_served(app, entrance.socket, ready))


async def _served(app: ASGIApp, listener: socket.socket, ready: Callable[[], None]) -> None:
    import uvicorn

    from ngym.net.connection_limits import Connection, Server, room

    config = uvicorn.Config(
        app,
        http=Connection,
        limit_concurrency=room(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.005)
    ready()
    await serving


def open_browser(url: str) -> None:
    """If a user sits in front of it."""
    display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if display and sys.stdout.isatty():
        webbrowser.open(url)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # what cannot be a name does not get as far as the resolver
        raise socket.gaierror(socket.EAI_NONAME, "no host can be called so") from None
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # asyncio sets TCP_NODELAY where it sees TCP
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
