"""Who may ask, and what may an answer do? Known Host names only, a token where there is one, GET only, and strict headers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym.errors import ServiceError, Unauthorized
from ngym.locks import Lock

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
LOCKED = "this viewer is locked: open the address that ng_view printed; programs send 'Authorization: Bearer TOKEN'"
_PORT = re.compile(r":\d+$")  # one that is forwarded by ssh may be any
_ADDED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Misdirected(ServiceError):
    """The Host header names somebody else."""

    status = 421
    title = "Misdirected request"


class Guard:
    """An ASGI application behind the checks. The page itself has no secrets and is open: it brings the token to /api.

    Args:
        hosts: what a Host header may say; another name leads here only when somebody's DNS lies. None: anything.
        lock: what opens /api; None: it is open.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, lock: Lock | None) -> None:
        self._app = app
        self._hosts = hosts
        self._lock = lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_ADDED]
            await send(message)

        problem = self._problem(scope)
        if problem is None:
            await self._app(scope, receive, guarded)
            return
        body = orjson.dumps(
            {
                "type": problem.problem()["type"],
                "title": problem.title,
                "status": problem.status,
                "detail": problem.detail,
            }
        )
        headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
        if problem.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await guarded({"type": "http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _problem(self, scope: Scope) -> ServiceError | None:
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if self._hosts is not None and (len(hosts) != 1 or _PORT.sub("", hosts[0]) not in self._hosts):
            return Misdirected(
                f"this viewer is not called {', '.join(hosts)!r:.80}; use {' or '.join(sorted(self._hosts))}"
            )
        if scope["path"].startswith("/api") and self._lock is not None and not self._lock.opens(scope["headers"]):
            return Unauthorized(LOCKED)
        return None
