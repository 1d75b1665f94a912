"""Who answers while the model loads? A small process, forked before the heavy imports: alive, but not ready."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Self

import orjson

from ngym.errors import NotReady

STATUS_PREFIX = "ngym-status: "  # the supervisor shows what follows as the service's live line
REQUEST_TIMEOUT_S = 1.0
MAX_HEAD_BYTES = 64 << 10
LEAVE = b"\0"

Say = Callable[[str], None]


class Doorkeeper:
    """Answers on the service's sockets until `leave`; it goes when we die, too, for then its own channel closes.

    A thread could not do this: importing vLLM holds the interpreter for seconds, and the engine is forked from
    this process, which must have one thread and no open connection when that happens.
    """

    def __init__(self, sockets: list[socket.socket], service: str) -> None:
        for sock in sockets:
            sock.setblocking(False)  # a caller may give up between select and accept
        self._ours, theirs = socket.socketpair()
        self._pid: int | None = os.fork()
        if self._pid == 0:
            _become_doorkeeper(self._ours, theirs, sockets, service)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def say(self, status: str) -> None:
        """What the service is doing now: for the supervisor's display and for whoever asks /ready."""
        print(f"{STATUS_PREFIX}{status}", flush=True)
        with contextlib.suppress(BrokenPipeError):  # it was killed: the engine can load without it
            self._ours.sendall(status.encode() + b"\n")

    def leave(self) -> None:
        """Returns when nobody but us will accept a connection."""
        if self._pid is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._ours.sendall(LEAVE)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._ours.close()
        self._pid = None


def _become_doorkeeper(ours: socket.socket, theirs: socket.socket, sockets: list[socket.socket], service: str) -> None:
    """The child's whole life; it never returns into the event loop that it was forked from."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it leaves when its parent does
        ours.close()
        _attend(theirs, sockets, service)
    finally:
        os._exit(0)


def _attend(channel: socket.socket, sockets: list[socket.socket], service: str) -> None:
    status = "starting"
    while True:
        readable, _, _ = select.select([channel, *sockets], [], [])
        if channel in readable:
            said = channel.recv(4096)
            if not said or LEAVE in said:
                return
            status = said.decode().splitlines()[-1]
        for sock in readable:
            if sock is not channel:
                with contextlib.suppress(OSError):  # the caller went away
                    _answer(sock.accept()[0], service, status)


def _answer(connection: socket.socket, service: str, status: str) -> None:
    with connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < MAX_HEAD_BYTES:
            chunk = connection.recv(4096)
            if not chunk:
                return
            head += chunk
        connection.sendall(_reply(head.split(b"\r\n", 1)[0], service, status))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(MAX_HEAD_BYTES):  # closing on unread bytes would reset the connection and lose the answer
            pass


def _reply(request_line: bytes, service: str, status: str) -> bytes:
    if request_line.split(b"?")[0].removesuffix(b" HTTP/1.1") in (b"GET /", b"GET /health"):
        return _http("200 OK", "application/json", orjson.dumps({"status": "ok"}))
    problem = NotReady(f"{service} is not ready: {status}").problem(service)
    return _http("503 Service Unavailable", "application/problem+json", orjson.dumps(problem))


def _http(status: str, media_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}",
        f"content-type: {media_type}",
        f"content-length: {len(body)}",
        "retry-after: 1",
        "connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
