"""Access to the viewer: no page of another origin, a token where there is one, GET only, and strict headers."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym.errors import ServiceError, Unauthorized
from ngym.net.auth import Lock, Visitors

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
_ADDED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """An ASGI application behind the checks. The page itself has no secrets and is open: it brings the token to /api.

    Args:
        hosts: what a Host header may name beside loopback (`ngym.net.auth.Visitors`). None: anything, from any page.
        lock: what opens /api; None: it is open.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, lock: Lock | None) -> None:
        self._app = app
        self._visitors = None if hosts is None else Visitors(hosts)
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
        if self._visitors is not None and (problem := self._visitors.problem(scope)):
            return problem
        if scope["path"].startswith("/api") and self._lock is not None and not self._lock.opens(scope["headers"]):
            return Unauthorized(LOCKED)
        return None
