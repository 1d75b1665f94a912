"""Who may call a service? The run's token opens every route but GET /health; the weights and the like want the admin token."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING

import orjson

from ngym.errors import Unauthorized, UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

RUN_TOKEN, ADMIN_TOKEN = "NGYM_TOKEN", "NGYM_ADMIN_TOKEN"
MIN_CHARACTERS = 16
OPEN = ("GET", "/health")
REFUSAL = (
    "this run is locked: send 'Authorization: Bearer TOKEN'; the token is NGYM_TOKEN's, or stands in .ngym/head.json "
    "beside the config of ng_run"
)


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def token_from(variable: str) -> str | None:
    """The token in this environment variable, or None; UsageError for one that could be guessed or cannot be sent."""
    token = os.environ.get(variable)
    if not token:
        return None
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"{variable}: a token has at least {MIN_CHARACTERS} printable ASCII characters and no space; "
            "`openssl rand -hex 32` makes one"
        )
    return token


class Lock:
    """Opens for whoever shows one of the tokens, as a bearer token or as Anthropic's clients do (`x-api-key`).

    Digests are compared, all of them and in constant time: neither length nor content can be learnt from the time.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [_digest(token.encode()) for token in tokens]

    def opens(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """headers: ASGI's, names in lower case. A header that stands there twice is none."""
        shown: dict[bytes, list[bytes]] = {b"authorization": [], b"x-api-key": []}
        for name, value in headers:
            if name in shown:
                shown[name].append(value)
        bearer, key = shown[b"authorization"], shown[b"x-api-key"]
        if len(bearer) > 1 or len(key) > 1:
            return False
        told = [value.removeprefix(b"Bearer ") for value in bearer if value.startswith(b"Bearer ")] + key
        found = [hmac.compare_digest(_digest(one), digest) for one in told for digest in self._digests]
        return any(found)


class Locked:
    """An ASGI application behind a lock: who shows no token is refused before the body is read; websockets never open."""

    def __init__(self, app: ASGIApp, lock: Lock, service: str) -> None:
        self._app = app
        self._lock = lock
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = orjson.dumps(Unauthorized(REFUSAL).problem(self._service))
            kinds = {"content-type": "application/problem+json", "www-authenticate": "Bearer"}
            headers = {**kinds, "content-length": str(len(body))}
            start = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 401, "headers": start})
            await send({"type": "http.response.body", "body": body})

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == OPEN:
            return True
        return self._lock.opens(scope["headers"])


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()
