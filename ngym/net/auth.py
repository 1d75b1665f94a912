"""Authentication of callers, and checks of addresses and URLs.

The run's token opens every route except GET /health, which needs none; routes such as the weights need the admin token.
A browser asks for it at /docs, and sends it as the password of HTTP Basic authentication. No other route accepts that:
a browser adds it by itself, also to requests that another site makes it send.
An open run listens on loopback, where a browser lets every web page send requests; `OriginCheck` refuses those.
"""

from __future__ import annotations

import binascii
import contextlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import orjson

from ngym.errors import ServiceError, Unauthorized, UsageError, openai_refusal, shorten
from ngym.net import api_docs
from ngym.net.request_context import headers_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MIN_CHARACTERS = 16
OPEN_ROUTE = ("GET", "/health")
DOCUMENTS = api_docs.PATHS | {"/openapi.json"}  # of the interface; they answer GET and change nothing
REFUSAL = (
    "this run is locked: send 'Authorization: Bearer TOKEN'; the token is in NGYM_TOKEN, or in .ngym/head.json "
    "next to the config of ng_run"
)
# A line each: Chrome ignores Basic where another challenge follows it in the same line, and asks for no password.
CHALLENGES = ('Basic realm="ngym: the run\'s token is the password"', "Bearer")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MAX_HOST = 80  # shown characters of a host name
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]@/\\]+)(?::\d+)?")  # the port may differ: ssh forwards it
_OF_BROWSERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
MAX_HOSTS = 64  # remembered Host headers
_PAGE_OF_OURS = (b"none", b"same-origin")  # Sec-Fetch-Site: typed by the user; sent by a page of the same service


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def wrong_url(url: str) -> str | None:
    """The reason why this URL is not valid for a service of a config, or None. The text shows no credentials."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises for an invalid port)
    except ValueError as error:
        return f"{url!r} is not a URL ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "\\" in url:
        return f"{url!r} is not a service URL; write http://host:port or https://host:port"
    if "@" in parts.netloc:
        return f"the URL of {parts.hostname} has credentials; use token_env with the variable of a token instead"
    if _is_link_local(parts.hostname):
        return f"{url!r}: link-local addresses belong to cloud metadata services"
    return None


def _is_link_local(host: str) -> bool:
    """Whether it is link-local in any notation: `169.254.169.254`, `0xa9fea9fe`, `[::ffff:169.254.169.254]`."""
    with contextlib.suppress(OSError):
        return ipaddress.ip_address(socket.inet_aton(host)).is_link_local
    with contextlib.suppress(ValueError):
        address = ipaddress.IPv6Address(host.partition("%")[0])
        return (address.ipv4_mapped or address).is_link_local
    return False


RUN_TOKEN, ADMIN_TOKEN = "NGYM_TOKEN", "NGYM_ADMIN_TOKEN"


class Misdirected(ServiceError):
    """The Host header names another server."""

    status = 421
    title = "Misdirected request"


class CrossOrigin(ServiceError):
    """A web page of another origin sent this."""

    status = 403
    title = "Forbidden"


def new_token() -> str:
    """A token of 256 random bits."""
    return secrets.token_urlsafe(32)


def token_from(variable: str) -> str | None:
    """The token in this environment variable, or None; UsageError if it is too short or cannot be sent."""
    token = os.environ.get(variable)
    if not token:
        return None
    if len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"{variable}: a token must have at least {MIN_CHARACTERS} printable ASCII characters and no space; "
            "`openssl rand -hex 32` makes one"
        )
    return token


class TokenAuth:
    """Accepts requests with one of the tokens, as a bearer token or in Anthropic's `x-api-key`.

    All digests are compared in constant time: the time reveals neither length nor content.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [_digest(token.encode()) for token in tokens]

    def accepts(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the headers (ASGI, names in lower case) have a valid token. A repeated header is not valid."""
        values: dict[bytes, list[bytes]] = {b"authorization": [], b"x-api-key": []}
        for name, value in headers:
            if name in values:
                values[name].append(value)
        bearer, key = values[b"authorization"], values[b"x-api-key"]
        if len(bearer) > 1 or len(key) > 1:
            return False
        tokens = [value.removeprefix(b"Bearer ") for value in bearer if value.startswith(b"Bearer ")] + key
        matches = [hmac.compare_digest(_digest(one), digest) for one in tokens for digest in self._digests]
        return any(matches)

    def accepts_document(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """As `accepts`; a browser may also send the token as the password of Basic authentication."""
        bearers = []
        for name, value in headers:
            if name == b"authorization" and value[:6].lower() == b"basic ":
                with contextlib.suppress(ValueError):
                    value = b"Bearer " + binascii.a2b_base64(value[6:], strict_mode=True).partition(b":")[2]
            bearers.append((name, value))
        return self.accepts(bearers)


class TokenAuthMiddleware:
    """An ASGI application behind `TokenAuth`: requests without a token are refused unread, websockets never open."""

    def __init__(self, app: ASGIApp, auth: TokenAuth, service: str) -> None:
        self._app = app
        self._auth = auth
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "http" and (scope["method"], scope["path"]) == OPEN_ROUTE
        is_document = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in DOCUMENTS
        accepts = self._auth.accepts_document if is_document else self._auth.accepts
        if scope["type"] == "lifespan" or is_open or accepts(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, Unauthorized(REFUSAL), self._service, CHALLENGES if is_document else CHALLENGES[1:])


class OriginCheck:
    """Distinguishes programs of this machine from web pages.

    A browser names the site (Sec-Fetch-Site) or the origin (Origin) of a request. With DNS rebinding, a page has the
    same origin, but its name is in the Host header.

    Args:
        names: further allowed hosts of a Host header, in addition to loopback; an IPv6 address in brackets.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in (*LOOPBACK, *names))
        self._allowed: set[bytes | None] = {None}  # Host headers of earlier requests; None: without one

    def problem(self, scope: Scope) -> ServiceError | None:
        """The reason why this request is refused, or None."""
        headers = headers_of(scope)
        if len(headers) != len(scope["headers"]) or not _OF_BROWSERS.isdisjoint(headers):
            return self._problem(scope)
        host = headers.get(b"host")
        if host in self._allowed:
            return None
        problem = self._problem(scope)
        if problem is None and len(self._allowed) < MAX_HOSTS:
            self._allowed.add(host)
        return problem

    def _problem(self, scope: Scope) -> ServiceError | None:
        headers: dict[bytes, list[bytes]] = {b"host": [], b"origin": [], b"sec-fetch-site": [], b"sec-fetch-mode": []}
        for name, value in scope["headers"]:
            if name in headers:
                headers[name].append(value)
        hosts = [value.decode("latin-1").lower() for value in headers[b"host"]]
        if len(hosts) > 1 or not all(map(self._is_ours, hosts)):  # no Host is allowed: a browser always sends one
            host_names = shorten(", ".join(hosts), MAX_HOST)
            return Misdirected(
                f"no server here is called {host_names!r}: use {' or '.join(LOOPBACK[:2])}, a name in the config's urls, or lock the run "
                "with NGYM_TOKEN (docs/security.md)"
            )
        if self._is_link(scope["method"], headers[b"sec-fetch-mode"]):
            return None
        sites, origins = headers[b"sec-fetch-site"], [value.decode("latin-1").lower() for value in headers[b"origin"]]
        if not all(site in _PAGE_OF_OURS for site in sites) or not all(
            self._is_ours_page(each, hosts) for each in origins
        ):
            return CrossOrigin("a web page of another origin may not call this server; a program sends no Origin")
        return None

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        return match is not None and (match[1] in self._names or is_loopback(match[1]))

    def _is_ours_page(self, origin: str, hosts: list[str]) -> bool:
        """Whether a page of this server sent it. On loopback, other ports are other programs; a proxy in front of a
        named server may send another Host.
        """
        scheme, separator, host = origin.partition("://")
        if not separator or scheme not in ("http", "https") or not self._is_ours(host):
            return False
        return not hosts or host == hosts[0] or not is_loopback(host.rpartition(":")[0] or host)

    @staticmethod
    def _is_link(method: str, modes: list[bytes]) -> bool:
        """Whether a user follows a link: the linking page neither reads the answer nor sends a body."""
        return method in ("GET", "HEAD") and modes == [b"navigate"]


class LocalOnlyMiddleware:
    """An ASGI application that only answers programs of this machine and its own web pages."""

    def __init__(self, app: ASGIApp, origin_check: OriginCheck, service: str) -> None:
        self._app = app
        self._origin_check = origin_check
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._origin_check.problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await refuse(send, problem, self._service)


async def refuse(send: Send, error: ServiceError, service: str, challenges: Sequence[str] = ("Bearer",)) -> None:
    """Answer with a problem document, before the body is read. challenges: of a 401."""
    body = orjson.dumps(error.problem(service) | openai_refusal(error))
    headers = [("content-type", "application/problem+json"), ("content-length", str(len(body)))]
    if error.status == 401:
        headers += [("www-authenticate", challenge) for challenge in challenges]
    start = [(name.encode(), value.encode()) for name, value in headers]
    await send({"type": "http.response.start", "status": error.status, "headers": start})
    await send({"type": "http.response.body", "body": body})


def hosts_of(urls: Iterable[str]) -> Iterator[str]:
    """The hosts of these URLs, in the notation of a Host header."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        if host:
            yield f"[{host}]" if ":" in host else host


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()
