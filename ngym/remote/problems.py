"""Translates errors of a remote API to errors of ngym, with a hint at the remedy."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from ngym.errors import BadRequest, Overloaded, PeerTimeout, ServiceError, Unreachable, UpstreamError
from ngym.peers import is_context_overflow, words
from ngym.remote.pace import UsedUp
from ngym.schema import Json

MAX_WAIT_S = 24 * 3600.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EPOCH_S = 1e9  # larger numbers are points in time, in seconds or milliseconds
_REMAINING = re.compile(r"(?:x|anthropic)-ratelimit-(.*-)?remaining(-.*)?")
REFUSED_FOR_RATE = frozenset({429, 503, 529})
"""The request was not processed because of the rate: all callers slow down."""
_PASSING = frozenset({408, 409})
_NO_SUCH_PATH = frozenset({404, 405})
_PAID_OUT = frozenset({"insufficient_quota", "billing_error", "billing_hard_limit_reached"})
_OVERLOADED = frozenset({"overloaded_error", "rate_limit_error", "rate_limit_exceeded"})


def wait_s(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds to wait, from the headers (lower case) of a 429, 503 or 529; None if they have none.

    In this order: `retry-after-ms`; `retry-after` (seconds or an HTTP date); the reset of each exhausted limit
    (`x-ratelimit-reset-requests: 6m0s`, `x-ratelimit-reset: 1760000000`, `anthropic-ratelimit-tokens-reset:`
    an RFC 3339 time). Never below 0 or above a day.

    Args:
        now: seconds since 1970; None: the clock.
    """
    now = time.time() if now is None else now
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    if "retry-after" in headers:
        waited = _moment(headers["retry-after"], now)
        if waited is not None:
            return _bounded(waited)
    resets = []
    for name, value in headers.items():
        if _REMAINING.fullmatch(name) and _number(value) == 0:
            waited = _moment(headers.get(name.replace("remaining", "reset"), ""), now)
            resets += [] if waited is None else [waited]
    return _bounded(max(resets)) if resets else None


def _moment(text: str, now: float) -> float | None:
    """Seconds from now: from a number, a duration such as 6m0.5s, a date, or a point in time."""
    text = text.strip()
    number = _number(text)
    if number is not None:
        if number > _EPOCH_S * 1000:
            return number / 1000 - now
        return number - now if number > _EPOCH_S else number
    if text and not _DURATION.sub("", text):
        return sum(float(count) * _UNIT_S[unit] for count, unit in _DURATION.findall(text))
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = read(text)
        except ValueError:
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
    return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_S)


class NotOffered(UpstreamError):
    """The API does not have this path (or, with 404, perhaps not this model)."""


class ContextOverflow(BadRequest):
    """The input does not fit the model's context."""


class Unanswered(UpstreamError):
    """The request was sent, but no answer came: it may or may not be processed."""


class Site(NamedTuple):
    """The target of a request, for error messages: the URL, the model's name, the variable with the key."""

    url: str
    model: str
    api_key_env: str | None

    def peer(self, status: int | None = None) -> Json:
        return {"service": urlsplit(self.url).hostname, "url": self.url, "status": status}

    def cannot_be_reached(self, why: object) -> Unreachable:
        detail = f"{self.url} cannot be reached: {why}; is base_url right, and the endpoint up?"
        return Unreachable(detail, upstream=self.peer())

    def too_slow(self, timeout_s: float) -> PeerTimeout:
        detail = f"{self.url} did not answer within {timeout_s:g} s (timeout_s) or the caller's deadline"
        return PeerTimeout(detail, upstream=self.peer())

    def unanswered(self, why: object) -> Unanswered:
        detail = f"{self.url} gave no answer ({why}): the request may or may not have been processed"
        return Unanswered(detail, failure="model_error", upstream=self.peer())

    def broke_off(self, why: object) -> UpstreamError:
        detail = f"{self.url}: the stream broke off: {why}"
        return UpstreamError(detail, failure="model_error", upstream=self.peer(200), retryable=True)

    def nonsense(self, what: str) -> UpstreamError:
        return UpstreamError(f"{self.url} {what}", failure="model_error", upstream=self.peer(200))


def problem(site: Site, status: int, body: bytes) -> ServiceError:
    """The error of a refusal. The message for a refused key is left out: it may quote the key."""
    message, code = words(_json(body))
    url, peer = site.url, site.peer(status)
    if status in (401, 403):
        key = f"the key in {site.api_key_env}" if site.api_key_env else "a request without a key"
        detail = f"{url} refused {key} ({status}); put a valid key into the environment variable named by api_key_env"
        return UpstreamError(detail, failure="model_error", upstream=peer, retryable=False)
    if status in _NO_SUCH_PATH:
        detail = f"{url} answered {status} for model {site.model!r}: {message}"
        return NotOffered(detail, failure="model_error", upstream=peer)
    if status == 402 or code in _PAID_OUT:
        return UsedUp(f"{url}: the account has no credit left: {message}", failure="model_error", upstream=peer)
    if status in (429, 529):
        return Overloaded(f"{url} is still over its limit: {message}", failure="model_error", upstream=peer)
    if is_context_overflow(status, code, message):
        return ContextOverflow(message, failure="context_length", upstream=peer)
    if status < 500 and status not in _PASSING:
        return BadRequest(f"{url} refused the request: {message}", failure="model_error", upstream=peer)
    return UpstreamError(f"{url} answered {status}: {message}", failure="model_error", upstream=peer, retryable=True)


def problem_in_stream(site: Site, event: Json) -> ServiceError | None:
    """The error in an event of a stream, in OpenAI's or Anthropic's shape; None for other events."""
    if "error" not in event and event.get("type") != "error":
        return None
    if not event.get("error") and event.get("type") != "error":
        return None  # a Response or a chunk with an empty error
    message, code = words(event)
    if is_context_overflow(400, code, message):
        return ContextOverflow(message, failure="context_length", upstream=site.peer(200))
    detail = f"{site.url} failed while it answered: {message}"
    kind = Overloaded if code in _OVERLOADED else UpstreamError
    return kind(detail, failure="model_error", upstream=site.peer(200), retryable=True)


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
