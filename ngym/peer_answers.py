"""The answers of other services: their JSON, or the error that a refusal reports, in any of the shapes that servers use."""

from __future__ import annotations

import math
import re
import time
from typing import Any, NamedTuple

import orjson

from ngym.client import Reply
from ngym.errors import UpstreamError
from ngym.net.json_limits import LOOP_BYTES, MAX_DEPTH, by_size, is_deep
from ngym.schema import SESSION_HEADER, Json

NOT_PROCESSED = frozenset({429, 503})
MAYBE_PROCESSED = frozenset({500, 502, 504})
SHOWN_BYTES = 100
SAMPLING = "/v1/responses"
STORED_STATUSES = frozenset({400, 404, 409, 422, 429, 503, 504})
NOT_ABOUT_THE_CALL = frozenset({401, 403, 407, 408, 429})  # about the caller's rights and timing
SHOWN_STATUSES = frozenset({*range(400, 500), 500}) - NOT_ABOUT_THE_CALL
PROBLEM = "application/problem+json"


def json_of(reply: Reply, service: str, path: str) -> Any:
    """The JSON of a service's answer.

    Raises:
        UpstreamError: the answer is not JSON, or is nested too deeply to be forwarded.
    """
    try:
        value = reply.json()
    except orjson.JSONDecodeError as error:
        begin = reply.body[:SHOWN_BYTES].decode("utf-8", "replace")
        raise _upstream_error(
            reply, service, f"{service} answered {path} with no JSON ({error}); it begins {begin!r}"
        ) from None
    if is_deep(reply.body, value):
        raise _upstream_error(
            reply, service, f"{service} answered {path} with JSON nested deeper than {MAX_DEPTH} levels"
        )
    return value


async def parse_large(reply: Reply, service: str, path: str) -> Any:
    """As `json_of`; a large answer is parsed in a thread."""
    if len(reply.body) <= LOOP_BYTES:
        return json_of(reply, service, path)
    return await by_size(len(reply.body), json_of, reply, service, path)


def _upstream_error(reply: Reply, service: str, what: str) -> UpstreamError:
    return UpstreamError(what, upstream={"service": service, "url": None, "status": reply.status})


class InSession(NamedTuple):
    """The session that a call belongs to.

    is_echoed: whether the service has sent this id in an answer; it then does so in all of them.
    shows_refusals: whether the model reads every refusal of the service, in any form.
    """

    id: str
    is_echoed: bool = False
    shows_refusals: bool = False


def is_own(reply: Reply, session: InSession) -> bool:
    """Whether an answer comes from the service itself and not from a proxy, which does not know the session.

    A problem document that names a service also counts: the failure may have prevented the session header.
    """
    return (
        not session.is_echoed
        or _names(reply, session)
        or (reply.status >= 300 and bool(problem_of(reply).get("service")))
    )


def refusal(
    service: str, reply: Reply, method: str, url: str, path: str, session: InSession | None = None
) -> UpstreamError:
    """The error of a peer's answer, with its own message: the first problem document of the chain has the cause."""
    if session is not None and not is_own(reply, session):
        return _proxy_error(service, reply, method, url, path)
    problem = problem_of(reply)
    is_ngym_error = bool(problem.get("service"))
    reason = words(problem)
    says = bool(problem.get("error") or problem.get("message"))
    detail = (
        problem.get("detail")
        or (reason.message if says else reply.body[:300].decode("utf-8", "replace"))
        or "no reason given"
    )
    if not isinstance(detail, str):
        detail = orjson.dumps(detail)[:300].decode()
    failure = problem["failure"] if isinstance(problem.get("failure"), str) else None
    if path == SAMPLING and not is_ngym_error and is_context_overflow(reply.status, reason.code, detail):
        failure = "context_length"
    match problem.get("upstream"):
        case {"service": str(), "status": int() | None} as first:
            upstream = first
        case _:
            upstream = upstream_of(service, url, reply.status)
    prefix = "" if is_ngym_error else f"{service} answered {reply.status} to {method} {path}: "
    return UpstreamError(
        prefix + detail,
        failure=failure,
        upstream=upstream,
        retryable=bool(problem.get("retryable", reply.status in NOT_PROCESSED | MAYBE_PROCESSED | {500})),
        status=reply.status if reply.status in STORED_STATUSES else None,
        is_for_the_model=session is not None and _is_for_the_model(reply, problem, session),
    )


class KeptCalls:
    """Since when each model server has lost no captured call.

    `kept_s` is as old as the answer that has it, so an answer that took long proves less. What an earlier answer has
    proved holds as long as the server's `kept_id` is the same.
    """

    def __init__(self) -> None:
        self._proved: dict[str, tuple[Any, float]] = {}  # by URL: the `kept_id`, and the time

    def since(self, url: str, answer: Json) -> float:
        """The time by time.perf_counter(); -inf for a server of another make, which does not say so.

        answer: to GET /rollouts/{id}/segments, whatever its status.
        """
        kept_s, kept_id = answer.get("kept_s"), answer.get("kept_id")
        if not isinstance(kept_s, int | float):
            return -math.inf
        since = time.perf_counter() - kept_s
        known_id, proved = self._proved.get(url, (None, since))
        if kept_id is not None and kept_id == known_id:
            since = min(since, proved)
        self._proved[url] = kept_id, since
        return since


def problem_of(reply: Reply) -> Json:
    """The answer as an object; empty if it is not JSON that can be forwarded."""
    try:
        problem = reply.json()
    except orjson.JSONDecodeError:
        return {}
    if is_deep(reply.body, problem):
        return {}
    return problem if isinstance(problem, dict) else {"detail": problem}


def _is_for_the_model(reply: Reply, problem: Json, session: InSession) -> bool:
    """Whether the model may read this refusal: the service marks its answer so, or the session shows all refusals."""
    if session.shows_refusals and reply.status in SHOWN_STATUSES:
        return True
    is_this_session = problem.get("session") == session.id or _names(reply, session)
    is_problem = reply.headers.get("content-type", "").startswith(PROBLEM)
    return is_this_session and is_problem and problem.get("for_the_model") is True


def _names(reply: Reply, session: InSession) -> bool:
    return reply.headers.get(SESSION_HEADER) == session.id


def _proxy_error(service: str, reply: Reply, method: str, url: str, path: str) -> UpstreamError:
    says = reply.body[:300].decode("utf-8", "replace") or "nothing"
    return UpstreamError(
        f"something between here and {service} answered {reply.status} to {method} {path}, as a proxy would: {says}",
        upstream=upstream_of(service, url, reply.status),
        retryable=True,
    )


def upstream_of(service: str, url: str, status: int | None = None) -> dict[str, Any]:
    """The `upstream` field of an error: service, replica and status."""
    return {"service": service, "url": url, "status": status}


_OVERFLOW = re.compile(
    r"context[ _](length|window|size)|maximum (model|input) length|max_model_len|(prompt|input) is too long"
    r"|max_(completion_)?tokens.{0,40}(too large|greater|exceed)",
    re.IGNORECASE,
)


class ErrorWords(NamedTuple):
    """An error's message, in one line, and its code or type."""

    message: str
    code: str | None


def words(body: object) -> ErrorWords:
    """An error body's message and code, in any of the shapes that servers use."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        inner = inner if isinstance(inner, dict) else {"message": inner}
        text = inner.get("message") or inner.get("detail") or "no reason given"
        code = inner.get("code") or inner.get("type")
        return ErrorWords(_line(str(text)), str(code) if code else None)
    return ErrorWords(_line(str(body or "no reason given")), None)


def is_context_overflow(status: int, code: str | None, message: str) -> bool:
    """Whether a back end's error says that the input and the requested output do not fit its context."""
    if status not in (400, 413, 422):
        return False
    return code == "context_length_exceeded" or bool(_OVERFLOW.search(message))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
