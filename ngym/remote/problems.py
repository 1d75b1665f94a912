"""What does an error of the other side mean to us? One table for OpenAI's, Anthropic's and everybody's shape of error."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from ngym.errors import BadRequest, Overloaded, PeerTimeout, ServiceError, Unreachable, UpstreamError
from ngym.net.upstream_errors import is_context_overflow, words
from ngym.remote.budget import UsedUp
from ngym.schema import Json

REFUSED_FOR_RATE = frozenset({429, 503, 529})
"""The request was not begun, because there are too many: everybody goes slower."""

_PASSING = frozenset({408, 409})
_NO_SUCH_PATH = frozenset({404, 405})
_PAID_OUT = frozenset({"insufficient_quota", "billing_error", "billing_hard_limit_reached"})
_OVERLOADED = frozenset({"overloaded_error", "rate_limit_error", "rate_limit_exceeded"})


class NotOffered(UpstreamError):
    """The other side does not have this path (or, with 404, perhaps not this model)."""


class ContextOverflow(BadRequest):
    """The input does not fit the model's context."""


class Unanswered(UpstreamError):
    """It was sent, and no answer came: it may have been carried out, or be carried out yet."""


class Site(NamedTuple):
    """Who was asked, for the words of an error: the URL, the model's name, the variable with the key."""

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
        detail = f"{self.url} gave no answer ({why}): it may have done what it was asked, or not"
        return Unanswered(detail, failure="model_error", upstream=self.peer())

    def broke_off(self, why: object) -> UpstreamError:
        detail = f"{self.url}: the stream broke off: {why}"
        return UpstreamError(detail, failure="model_error", upstream=self.peer(200), retryable=True)

    def nonsense(self, what: str) -> UpstreamError:
        return UpstreamError(f"{self.url} {what}", failure="model_error", upstream=self.peer(200))


def problem(site: Site, status: int, body: bytes) -> ServiceError:
    """A refusal as ours. For a refused key its own words are left out: they may quote it."""
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
    """The error that an event of a stream tells, in OpenAI's or Anthropic's shape; None where it is none."""
    if "error" not in event and event.get("type") != "error":
        return None
    if not event.get("error") and event.get("type") != "error":
        return None  # a Response, or a chunk, that says that there is none
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
