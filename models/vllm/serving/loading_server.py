"""A small server that answers while vLLM loads (alive, not ready, and why), and the middleware for API keys."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Self, cast

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from ngym.errors import NgymError, NotReady, Unauthorized
from ngym.net.auth import TokenAuth
from ngym.services.base.app import ProblemResponse
from ngym.telemetry.log_format import REFUSED, STATUS_PREFIX

GUARDED = ("/v1/", "/rollouts/")
DRAIN_S = 5.0
MAX_HEAD_BYTES = 64 << 10
LEAVE_MESSAGE = b"\0"
Say = Callable[[str], None]


class Keys:
    """Middleware that requires a key, as a bearer token (OpenAI's clients) or x-api-key (Anthropic's)."""

    def __init__(self, app: ASGIApp, keys: list[str], service: str) -> None:
        self._app = app
        self._keys = TokenAuth(keys)
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED) or self._keys.accepts(scope["headers"]):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("this server requires a key: 'Authorization: Bearer KEY', or 'x-api-key: KEY'")
        details = {"type": "authentication_error", "message": error.detail}
        problem = error.problem(self._service) | {"error": details}
        refusal = ProblemResponse(problem, status_code=401, headers={"www-authenticate": "Bearer"})
        await refusal(scope, receive, send)


class LoadingServer:
    """A child process that answers on the service's sockets until `leave`, or until we die and its channel closes.

    A thread cannot do this: importing vLLM blocks the interpreter for seconds, and the engine is forked from this
    process, which must then have one thread and no open connections.
    """

    def __init__(self, sockets: list[socket.socket], service: str) -> None:
        for sock in sockets:
            sock.setblocking(False)  # a caller may hang up between select and accept
        self._parent_end, child_end = socket.socketpair()
        self._pid: int | None = os.fork()
        if self._pid == 0:
            _run_placeholder_server(self._parent_end, child_end, sockets, service)
        child_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._pid is not None and isinstance(error, NgymError):
            print(f"{STATUS_PREFIX}{REFUSED}", flush=True)  # vLLM may have logged a lot
        self.stop()

    def publish_status(self, status: str) -> None:
        """Publish the service's status for the supervisor's display and for /ready."""
        print(f"{STATUS_PREFIX}{status}", flush=True)
        with contextlib.suppress(BrokenPipeError):  # the child was killed: the engine can load without it
            self._parent_end.sendall(status.encode() + b"\n")

    def stop(self) -> None:
        """End the child. Returns when it accepts no more connections."""
        if self._pid is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._parent_end.sendall(LEAVE_MESSAGE)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._parent_end.close()
        self._pid = None


def _run_placeholder_server(
    parent_end: socket.socket, child_end: socket.socket, sockets: list[socket.socket], service: str
) -> None:
    """The main function of the child; it never returns into the event loop that it was forked from."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it ends with its parent
        parent_end.close()
        _serve(child_end, sockets, service)
    finally:
        os._exit(0)


def _serve(channel: socket.socket, sockets: list[socket.socket], service: str) -> None:
    """Serve until the parent says so, and then until the accepted callers have their answers."""
    status = "starting"
    deadline: float | None = None
    heads: dict[socket.socket, bytes] = {}  # incomplete requests, by caller
    watched = selectors.DefaultSelector()  # not select(): there may be very many callers
    for sock in (channel, *sockets):
        watched.register(sock, selectors.EVENT_READ)
    while deadline is None or (watched.get_map() and time.monotonic() < deadline):
        for key, _ in watched.select(None if deadline is None else deadline - time.monotonic()):
            sock = cast(socket.socket, key.fileobj)
            if sock in sockets:
                _accept(sock, watched, heads)
            elif sock is not channel:
                if _read_and_answer(sock, heads, service, status):
                    heads.pop(sock, None)
                    watched.unregister(sock)
                    sock.close()
            elif (message := channel.recv(4096)) and LEAVE_MESSAGE not in message:
                status = message.decode().splitlines()[-1]
            else:
                deadline = time.monotonic() + DRAIN_S
                for sock in (channel, *sockets):
                    watched.unregister(sock)


def _accept(listening: socket.socket, watched: selectors.BaseSelector, heads: dict[socket.socket, bytes]) -> None:
    with contextlib.suppress(OSError):  # the caller went away
        caller = listening.accept()[0]
        caller.setblocking(False)
        heads[caller] = b""
        watched.register(caller, selectors.EVENT_READ)


def _read_and_answer(caller: socket.socket, heads: dict[socket.socket, bytes], service: str, status: str) -> bool:
    """Read from a caller and answer a complete request. True once the caller has hung up.

    The caller closes first: closing with unread bytes would reset the connection and lose the answer.
    """
    try:
        data = caller.recv(MAX_HEAD_BYTES)
        if data and caller in heads:
            heads[caller] += data
            if b"\r\n\r\n" in heads[caller] or len(heads[caller]) >= MAX_HEAD_BYTES:
                caller.sendall(_reply(heads.pop(caller).split(b"\r\n", 1)[0], service, status))
                caller.shutdown(socket.SHUT_WR)
    except OSError:
        return True
    return not data


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
