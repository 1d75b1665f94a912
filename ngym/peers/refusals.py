"""What does an answer that is no success say? Whoever asked raises it as an error, in the words of the first that failed."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from ngym.client import Reply
from ngym.errors import UpstreamError
from ngym.net.json_limits import is_deep
from ngym.net.upstream_errors import is_context_overflow, words
from ngym.peers.pauses import MAYBE_PROCESSED, NOT_PROCESSED
from ngym.schema import SESSION_HEADER, Json

SAMPLING = "/v1/responses"
KEPT_STATUSES = frozenset({400, 404, 409, 422, 429, 503, 504})
NOT_ABOUT_THE_CALL = frozenset({401, 403, 407, 408, 429})  # who may call, and when
SHOWN_STATUSES = frozenset({*range(400, 500), 500}) - NOT_ABOUT_THE_CALL
PROBLEM = "application/problem+json"


class InSession(NamedTuple):
    """The session that a call belongs to.

    tells: whether the service has told this id in an answer; then it does so in all of them.
    shows: whether a model reads what the service refuses, however it says so.
    """

    id: str
    tells: bool = False
    shows: bool = False


def is_own(reply: Reply, session: InSession) -> bool:
    """Whether an answer can be the service's, and not of something between: a proxy does not know the session.

    A problem document that names a service is its own, too: what went wrong may have kept it from telling more.
    """
    return not session.tells or _names(reply, session) or (reply.status >= 300 and bool(_problem(reply).get("service")))


def refusal(
    service: str, reply: Reply, method: str, url: str, path: str, session: InSession | None = None
) -> UpstreamError:
    """A peer's error, its own words kept: the first problem document of the chain tells the cause."""
    if session is not None and not is_own(reply, session):
        return _stranger(service, reply, method, url, path)
    problem = _problem(reply)
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
        is_for_the_model=session is not None and _is_for_the_model(reply, problem, session),
    )


def _problem(reply: Reply) -> Json:
    """The answer as a record; empty where it is none that can be passed on."""
    try:
        problem = reply.json()
    except orjson.JSONDecodeError:
        return {}
    if is_deep(reply.body, problem):
        return {}
    return problem if isinstance(problem, dict) else {"detail": problem}


def _is_for_the_model(reply: Reply, problem: Json, session: InSession) -> bool:
    """The service says so of its own answer, which names the session; or all that it refuses is."""
    if session.shows and reply.status in SHOWN_STATUSES:
        return True
    named = problem.get("session") == session.id or _names(reply, session)
    is_problem = reply.headers.get("content-type", "").startswith(PROBLEM)
    return named and is_problem and problem.get("for_the_model") is True


def _names(reply: Reply, session: InSession) -> bool:
    return reply.headers.get(SESSION_HEADER) == session.id


def _stranger(service: str, reply: Reply, method: str, url: str, path: str) -> UpstreamError:
    says = reply.body[:300].decode("utf-8", "replace") or "nothing"
    return UpstreamError(
        f"something between here and {service} answered {reply.status} to {method} {path}, as a proxy would: {says}",
        upstream=upstream_of(service, url, reply.status),
        retryable=True,
    )


def upstream_of(service: str, url: str, status: int | None = None) -> dict[str, Any]:
    """Which replica it was."""
    return {"service": service, "url": url, "status": status}
