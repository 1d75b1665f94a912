"""What does an answer of success say? JSON, from whomever one likes; what is none is its sender's failure, by name."""

from __future__ import annotations

from typing import Any

import orjson

from ngym.client import Reply
from ngym.errors import UpstreamError
from ngym.net.json_limits import MAX_DEPTH, is_deep

SHOWN_BYTES = 100


def json_of(reply: Reply, service: str, path: str) -> Any:
    """The JSON that a service answered with.

    Raises:
        UpstreamError: it is none, or nested more deeply than can be passed on.
    """
    try:
        value = reply.json()
    except orjson.JSONDecodeError as error:
        begin = reply.body[:SHOWN_BYTES].decode("utf-8", "replace")
        raise _wrong(reply, service, f"{service} answered {path} with no JSON ({error}); it begins {begin!r}") from None
    if is_deep(reply.body, value):
        raise _wrong(reply, service, f"{service} answered {path} with JSON nested deeper than {MAX_DEPTH} levels")
    return value


def _wrong(reply: Reply, service: str, what: str) -> UpstreamError:
    return UpstreamError(what, upstream={"service": service, "url": None, "status": reply.status})
