"""Small GET requests without a client library: readiness of services, and queries of the head."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from ngym.net.tls import client_context

MAX_REPLY_BYTES = 8 << 20


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes


@dataclass(frozen=True)
class Health:
    """Whether a service can serve, and if not, why."""

    ready: bool
    reason: str = ""


async def get(url: str, timeout_s: float, token: str | None = None) -> Reply:
    """GET a URL, with a bearer token if one is given.

    Raises:
        OSError: it cannot be reached. TimeoutError: there is no answer in time.
    """
    parts = urlsplit(url)
    secure = client_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            opener = f"Authorization: Bearer {token}\r\n" if token else ""
            request = f"GET {target} HTTP/1.0\r\nHost: {parts.netloc}\r\nAccept: application/json\r\n{opener}\r\n"
            writer.write(request.encode())
            answer = await reader.read(MAX_REPLY_BYTES)
            while answer and len(answer) < MAX_REPLY_BYTES and (more := await reader.read(MAX_REPLY_BYTES)):
                answer += more
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1][:3].isdigit():
        raise ConnectionResetError(f"{url}: the connection was closed without an answer")
    return Reply(int(words[1][:3]), body)


async def health(url: str, timeout_s: float, token: str | None = None) -> Health:
    """Ask a service's /ready. A third-party service may not have it: any answer that is not a server error counts."""
    try:
        reply = await get(f"{url.rstrip('/')}/ready", timeout_s, token)
    except TimeoutError:
        return Health(False, f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Health(False, f"not reachable: {error.strerror or error}")
    return Health(True) if reply.status < 500 else Health(False, _reason(reply))


def _reason(reply: Reply) -> str:
    """The one-line reason of a service that is not ready."""
    with contextlib.suppress(ValueError):
        problem = json.loads(reply.body)
        if isinstance(problem, dict) and (reason := problem.get("reason") or problem.get("detail")):
            return str(reason)
    return f"/ready answers {reply.status}"
