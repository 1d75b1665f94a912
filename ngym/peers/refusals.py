"""What does an answer that is no success say? Whoever asked raises it as an error, in the words of the first that failed."""

from __future__ import annotations

from typing import Any

import orjson

from ngym.client import Reply
from ngym.depth import is_deep
from ngym.errors import UpstreamError
from ngym.peers.pauses import MAYBE_PROCESSED, NOT_PROCESSED
from ngym.refused import is_context_overflow, words

SAMPLING = "/v1/responses"
KEPT_STATUSES = frozenset({400, 404, 409, 422, 429, 503, 504})


def refusal(service: str, reply: Reply, method: str, url: str, path: str) -> UpstreamError:
    """A peer's error, its own words kept: the first problem document of the chain tells the cause."""
    try:
        problem = reply.json()
    except orjson.JSONDecodeError:
        problem = {}
    if is_deep(reply.body, problem):
        problem = {}
    if not isinstance(problem, dict):
        problem = {"detail": problem}
    ours = bool(problem.get("service"))
    told = words(problem)
    says = bool(problem.get("error") or problem.get("message"))
    detail = (
        problem.get("detail")
        or (told.message if says else reply.body[:300].decode("utf-8", "replace"))
        or "no reason given"
    )
    if not isinstance(detail, str):
        detail = orjson.dumps(detail)[:300].decode()
    failure = problem["failure"] if isinstance(problem.get("failure"), str) else None
    if path == SAMPLING and not ours and is_context_overflow(reply.status, told.code, detail):
        failure = "context_length"
    match problem.get("upstream"):
        case {"service": str(), "status": int() | None} as first:
            upstream = first
        case _:
            upstream = upstream_of(service, url, reply.status)
    prefix = "" if ours else f"{service} answered {reply.status} to {method} {path}: "
    return UpstreamError(
        prefix + detail,
        failure=failure,
        upstream=upstream,
        retryable=bool(problem.get("retryable", reply.status in NOT_PROCESSED | MAYBE_PROCESSED | {500})),
        status=reply.status if reply.status in KEPT_STATUSES else None,
    )


def upstream_of(service: str, url: str, status: int | None = None) -> dict[str, Any]:
    """Which replica it was."""
    return {"service": service, "url": url, "status": status}
