"""Calls to a remote API, their options, and their errors with a hint at the remedy: JSON, server-sent events, and metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import orjson
from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ngym.client import AnswerTooLong, Client, StreamedReply
from ngym.errors import BadRequest, Overloaded, PeerTimeout, ServiceError, Unreachable, UpstreamError, shorten
from ngym.net import request_context
from ngym.net.auth import wrong_url
from ngym.net.json_limits import serialize
from ngym.net.load_balancer import RetryBudget
from ngym.peer_answers import is_context_overflow, words
from ngym.remote.rate_limiter import Caps, ConcurrencyLimiter, QuotaExhausted, RequestSlot, TokenUsage
from ngym.runtime.event_loop import run_endlessly
from ngym.schema import Json

MAX_WAIT_S = 3600.0  # then a request finds out whether the endpoint is open again
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
    an RFC 3339 time). Never below 0 or above an hour.

    Args:
        now: seconds since 1970; None: the clock.
    """
    now = time.time() if now is None else now
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    if "retry-after" in headers:
        waited = _seconds_until(headers["retry-after"], now)
        if waited is not None:
            return _bounded(waited)
    resets = []
    for name, value in headers.items():
        if _REMAINING.fullmatch(name) and _number(value) == 0:
            waited = _seconds_until(headers.get(name.replace("remaining", "reset"), ""), now)
            resets += [] if waited is None else [waited]
    return _bounded(max(resets)) if resets else None


def _seconds_until(text: str, now: float) -> float | None:
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


class NotSupported(UpstreamError):
    """The API does not have this path (or, with 404, perhaps not this model)."""


class ContextOverflow(BadRequest):
    """The input does not fit the model's context."""


class OutcomeUnknown(UpstreamError):
    """The request was sent, but no answer came: it may or may not be processed."""


class RequestTarget(NamedTuple):
    """The target of a request, for error messages: the URL, the model's name, the variable with the key.

    service: the model server that sends it. A run waits for a service that cannot work, and knows those of its config.
    """

    url: str
    model: str
    api_key_env: str | None
    service: str

    def peer(self, status: int | None = None) -> Json:
        return {"service": urlsplit(self.url).hostname, "url": self.url, "status": status}

    def unreachable(self, why: object) -> Unreachable:
        detail = f"{self.url} cannot be reached: {why}; is base_url right, and the endpoint up?"
        return Unreachable(detail, upstream={**self.peer(), "service": self.service})

    def timeout(self, timeout_s: float) -> PeerTimeout:
        detail = f"{self.url} did not answer within {timeout_s:g} s (timeout_s) or the caller's deadline"
        return PeerTimeout(detail, upstream=self.peer())

    def unknown_outcome(self, why: object) -> OutcomeUnknown:
        detail = f"{self.url} gave no answer ({why}): the request may or may not have been processed"
        return OutcomeUnknown(detail, failure="model_error", upstream=self.peer())

    def broken_stream(self, why: object) -> UpstreamError:
        detail = f"{self.url}: the stream broke off: {why}"
        return UpstreamError(detail, failure="model_error", upstream=self.peer(200), retryable=True)

    def invalid_answer(self, what: str, *, retryable: bool | None = None) -> UpstreamError:
        peer = self.peer(200)
        return UpstreamError(f"{self.url} {what}", failure="model_error", upstream=peer, retryable=retryable)


def problem(target: RequestTarget, status: int, body: bytes) -> ServiceError:
    """The error of a refusal. The message for a refused key is left out: it may quote the key."""
    message, code = words(_json(body))
    url, peer = target.url, target.peer(status)
    if status in (401, 403):
        key = f"the key in {target.api_key_env}" if target.api_key_env else "a request without a key"
        detail = f"{url} refused {key} ({status}); put a valid key into the environment variable named by api_key_env"
        return UpstreamError(detail, failure="model_error", upstream=peer, retryable=False)
    if status in _NO_SUCH_PATH:
        detail = f"{url} answered {status} for model {target.model!r}: {message}"
        return NotSupported(detail, failure="model_error", upstream=peer)
    if status == 402 or code in _PAID_OUT:
        return QuotaExhausted(f"{url}: the account has no credit left: {message}", failure="model_error", upstream=peer)
    if status in (429, 529):
        return Overloaded(f"{url} is still over its limit: {message}", failure="model_error", upstream=peer)
    if is_context_overflow(status, code, message):
        return ContextOverflow(message, failure="context_length", upstream=peer)
    if status < 500 and status not in _PASSING:
        return BadRequest(f"{url} refused the request ({status}): {message}", failure="model_error", upstream=peer)
    return UpstreamError(f"{url} answered {status}: {message}", failure="model_error", upstream=peer, retryable=True)


def problem_in_stream(target: RequestTarget, event: Json) -> ServiceError | None:
    """The error in an event of a stream, in OpenAI's or Anthropic's shape; None for other events."""
    if "error" not in event and event.get("type") != "error":
        return None
    if not event.get("error") and event.get("type") != "error":
        return None  # a Response or a chunk with an empty error
    message, code = words(event)
    if is_context_overflow(400, code, message):
        return ContextOverflow(message, failure="context_length", upstream=target.peer(200))
    detail = f"{target.url} failed while it answered: {message}"
    kind = Overloaded if code in _OVERLOADED else UpstreamError
    return kind(detail, failure="model_error", upstream=target.peer(200), retryable=True)


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


class RemoteOptions(BaseModel):
    """A base class next to ModelOptions; subclasses give `base_url` and `api_key_env` the vendor's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    base_url: str = Field(pattern="^https?://", description="The URL of the API.")
    api_key_env: str | None = Field(
        default=None, description="The variable that holds the key (never the key itself); null if no key is needed."
    )
    timeout_s: float = Field(
        default=600, gt=0, description="Limit of one answer, from its start; each retry has its own."
    )
    max_concurrency: int = Field(
        default=256,
        ge=1,
        le=4096,
        description="The upper bound of requests in flight; the actual limit adapts to refusals.",
    )
    max_retries: int = Field(
        default=4, ge=0, le=20, description="Retries of one request: after 429, 5xx, broken connections."
    )
    retry_ratio: float = Field(
        default=0.2, ge=0, le=1, description="The share of a minute's requests that may be retried after a failure."
    )
    max_tokens_total: int | None = Field(
        default=None, ge=1, description="Limit of input and output tokens for this key; then all requests are refused."
    )
    max_spend: float | None = Field(default=None, gt=0, description="The same limit in money, by the prices below.")
    price_input: float | None = Field(default=None, ge=0, description="Per million tokens of input.")
    price_output: float | None = Field(default=None, ge=0, description="Per million tokens of output.")
    proxy: str | None = Field(
        default=None, pattern="^http://", description="A proxy for https; default: that of HTTPS_PROXY and NO_PROXY."
    )

    @field_validator("base_url")
    @classmethod
    def _is_a_service(cls, url: str) -> str:
        if problem := wrong_url(url):
            raise ValueError(problem)
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_set(cls, name: str | None) -> str | None:
        if name and not os.environ.get(name):
            raise ValueError(
                f"the environment variable {name} is not set; export it, or write null if no key is needed"
            )
        return name

    @model_validator(mode="after")
    def _is_priced(self) -> RemoteOptions:
        if self.max_spend is not None and (self.price_input is None or self.price_output is None):
            raise ValueError("max_spend needs price_input and price_output, the price per million tokens")
        return self

    @property
    def key(self) -> str | None:
        return os.environ.get(self.api_key_env) if self.api_key_env else None

    def proxy_for_https(self) -> str | None:
        if self.proxy or proxy_bypass(urlsplit(self.base_url).hostname or ""):
            return self.proxy
        return getproxies().get("https")

    def caps(self) -> Caps:
        return Caps(self.max_tokens_total, self.max_spend, self.price_input or 0.0, self.price_output or 0.0)


_MAX_EVENT_BYTES = 1 << 26
log = logging.getLogger("ngym.remote")
BACKOFF_S = 0.5  # before the first retry after a failure; doubled with each, and spread
MAX_BACKOFF_S = 8.0
PROBE_S = 2.0  # between two probes of an API that cannot be reached
PROBE_TIMEOUT_S = 10.0
MAX_TARGETS = 64
MAX_PLACE = 200
DONE = b"[DONE]"
Headers = Callable[[], Awaitable[Mapping[str, str]]]
"""Returns the authorization headers of a request; called for each one, because tokens expire."""


class EventData:
    """Incremental parser of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, part: bytes) -> Iterator[bytes]:
        """The data of the events that end in this part; data lines of one event are joined by line breaks.

        Raises:
            ValueError: an event has no end within 64 MiB.
        """
        text = self._rest + part
        if b"\r" in text:
            cut = text.endswith(b"\r")  # the line feed may be in the next part
            text = text[: len(text) - cut].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * cut
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ValueError("an event without end")
        for event in events:
            data = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield b"\n".join(data)


class Upstream:
    """A remote API: its connections, and the limiter, the retry budget and the caps that all callers share.

    Args:
        service: the name of the model server.
        headers: see Headers.
        address: path -> URL; None: `base_url` + path.
    """

    def __init__(
        self,
        options: RemoteOptions,
        service: str,
        model: str,
        headers: Headers,
        address: Callable[[str], str] | None = None,
    ) -> None:
        self.limiter = ConcurrencyLimiter(options.max_concurrency)
        self.budget = RetryBudget(options.retry_ratio)
        self.caps = options.caps()
        self._outage: asyncio.Future[str] | None = None
        self._options = options
        self._service = service
        self._model = model
        self._headers = headers
        self._address = address or (lambda path: options.base_url.rstrip("/") + path)
        self._targets: dict[str, RequestTarget] = {}  # by path
        self._client = Client({"content-type": "application/json", "user-agent": "ngym"}, options.proxy_for_https())

    async def close(self) -> None:
        await self._client.close()

    async def wait_for_outage(self) -> str:
        """Wait until a request is given up because the API cannot be reached; returns the reason."""
        self._outage = asyncio.get_running_loop().create_future()
        return await self._outage

    async def is_reachable(self) -> bool:
        """Whether it answers anything at all, to a GET without a key."""
        try:
            await self._client.request("GET", self._options.base_url, None, {}, PROBE_TIMEOUT_S)
        except (AnswerTooLong, TimeoutError):
            return True  # it was connected to
        except ConnectionError:
            return False
        return True

    async def get(self, path: str) -> Json:
        """The JSON of a path. Raises as `post`."""
        return await self.post(path, None)

    async def post(self, path: str, body: Json | None) -> Json:
        """Send JSON to a path and return the JSON of the answer; without a body it is a GET.

        Raises:
            NotSupported: 404 or 405. ContextOverflow: the input is too long. BadRequest: any other fault of the request.
            Overloaded: still refused for the rate after all retries. QuotaExhausted: a cap is reached, or the credit is used
            up.
            Unreachable, PeerTimeout, UpstreamError: as their names say.
        """
        raw = await self.send(path, body)
        try:
            parsed = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            if raw.lstrip()[:1] == b"{":  # cut off, or with text that is not UTF-8
                raise self._target(path).invalid_answer(f"answered with broken JSON: {error}", retryable=True) from None
            parsed = None
        if not isinstance(parsed, dict):
            detail = "answered with no JSON object; check the end of base_url (often /v1)"
            raise self._target(path).invalid_answer(detail)
        if "output" not in parsed and (failure := problem_in_stream(self._target(path), parsed)) is not None:
            raise failure  # gateways send the error of their provider with a 200
        used = TokenUsage()
        used.take(parsed)
        self.caps.add(used)
        return parsed

    async def send(self, path: str, body: Json | None, *, once: bool = False) -> bytes:
        """As `post`, for answers of any kind.

        once: never process the request twice: it is only retried if it was certainly not processed, else OutcomeUnknown is
        raised.
        """
        target, raw, attempt = self._target(path), None if body is None else serialize(body), 0
        self.budget.record_request()
        while True:
            self.caps.check()
            slot = await self._enter(target)
            try:
                answer = await self._read_answer(slot, target, raw, once)
                if isinstance(answer, bytes):
                    slot.record_answer()
                    return answer
            finally:
                self.limiter.leave()
            attempt += 1
            await self._pause(attempt, answer, once)

    async def stream(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        """Send JSON to a path and yield the events of the answer; `[DONE]` is left out.

        Raises:
            as `post` before the first event; later UpstreamError, Overloaded or ContextOverflow if an event is an error
            or not JSON, or the stream breaks off.
        """
        target, used = self._target(path), TokenUsage()
        try:
            async with self._open(target, serialize(body)) as answer:
                if "text/event-stream" not in answer.headers.get("content-type", ""):
                    raise target.invalid_answer("did not answer with a stream, which was requested")
                data = EventData()
                try:
                    async for part in answer.body:
                        for event in data.take(part):
                            if event != DONE:
                                yield self._event(event, target, used)
                except TimeoutError:
                    raise target.timeout(self._options.timeout_s) from None
                except (ConnectionError, ValueError) as error:
                    raise target.broken_stream(error) from None
        finally:
            self.caps.add(used)

    def _event(self, data: bytes, target: RequestTarget, used: TokenUsage) -> Json:
        event = orjson.loads(data)
        if not isinstance(event, dict):
            raise target.broken_stream("an event that is not a JSON object")
        if (failure := problem_in_stream(target, event)) is not None:
            raise failure
        used.take(event)
        return event

    def _target(self, path: str) -> RequestTarget:
        target = self._targets.get(path)
        if target is None:
            target = RequestTarget(self._address(path), self._model, self._options.api_key_env, self._service)
            if len(self._targets) < MAX_TARGETS:
                self._targets[path] = target
        return target

    @asynccontextmanager
    async def _open(self, target: RequestTarget, raw: bytes) -> AsyncIterator[StreamedReply]:
        """A 2xx answer whose body is not read, with retries; its slot in flight is held until it is read."""
        self.budget.record_request()
        attempt = 0
        while True:
            self.caps.check()
            slot = await self._enter(target)
            try:
                async with AsyncExitStack() as stack:
                    answer = await self._start_request(stack, slot, target, raw)
                    if isinstance(answer, StreamedReply):
                        yield answer
                        slot.record_answer()
                        return
            finally:
                self.limiter.leave()
            attempt += 1
            await self._pause(attempt, answer, False)

    async def _enter(self, target: RequestTarget) -> RequestSlot:
        """Wait for a slot in flight; `limiter.leave` must follow."""
        remaining = request_context.current.get().remaining_s()
        try:
            return await self.limiter.enter(remaining, self._options.timeout_s)
        except TimeoutError:
            raise target.timeout(self._options.timeout_s) from None

    async def _read_answer(
        self, slot: RequestSlot, target: RequestTarget, raw: bytes | None, once: bool
    ) -> bytes | ServiceError:
        """The body of a 2xx answer, or a problem, which the caller raises unless it retries."""
        method = "GET" if raw is None else "POST"
        try:
            headers = {**await self._headers(), **request_context.trace_headers()}
            reply = await self._client.request(method, target.url, raw, headers, self._timeout_s())
        except (ConnectionError, TimeoutError) as error:
            return self._connection_error(target, error, once)
        if 200 <= reply.status < 300:
            return reply.body
        return _problem(slot, target, reply.status, reply.headers, reply.body)

    async def _start_request(
        self, stack: AsyncExitStack, slot: RequestSlot, target: RequestTarget, raw: bytes
    ) -> StreamedReply | ServiceError:
        """As `_read_answer`, for a streamed body."""
        try:
            headers = {**await self._headers(), **request_context.trace_headers()}
            opening = self._client.stream("POST", target.url, raw, headers, self._timeout_s())
            answer = await stack.enter_async_context(opening)
            if 200 <= answer.status < 300:
                return answer
            body = b"".join([part async for part in answer.body])
        except (ConnectionError, TimeoutError) as error:
            return self._connection_error(target, error, False)
        return _problem(slot, target, answer.status, answer.headers, body)

    def _timeout_s(self) -> float:
        remaining = request_context.current.get().remaining_s()
        return self._options.timeout_s if remaining is None else min(remaining, self._options.timeout_s)

    def _connection_error(self, target: RequestTarget, error: OSError, once: bool) -> ServiceError:
        """The problem of a request without an answer; raised if it must not be sent again."""
        if once and not isinstance(error, ConnectionRefusedError):
            raise target.unknown_outcome(error) from None
        if isinstance(error, TimeoutError):
            raise target.timeout(self._options.timeout_s) from None
        if isinstance(error, AnswerTooLong):
            raise target.invalid_answer(f"cannot be used: {error}") from None
        return target.unreachable(error)

    async def _pause(self, attempt: int, failure: ServiceError, once: bool) -> None:
        """Wait before the next attempt. Raises the problem if no retry is left or it would not help."""
        if attempt > self._options.max_retries or not self._should_retry(failure, once):
            if isinstance(failure, Unreachable) and self._outage is not None and not self._outage.done():
                self._outage.set_result(failure.detail)
            raise failure
        if not _is_refusal(failure):
            await asyncio.sleep(min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1))

    def _should_retry(self, failure: ServiceError, once: bool) -> bool:
        """Whether to retry. A refusal for the rate slows down all callers instead of using the retry budget."""
        if once and not (_is_refusal(failure) or isinstance(failure, Unreachable)):
            return False
        return failure.retryable and (_is_refusal(failure) or self.budget.allow_retry())


def _problem(
    slot: RequestSlot, target: RequestTarget, status: int, headers: Mapping[str, str], body: bytes
) -> ServiceError:
    """The problem of a refusal; one for the rate slows down all callers."""
    if 300 <= status < 400:
        place = shorten(headers.get("location") or "no place", MAX_PLACE)
        detail = f"{target.url} answered {status}, a redirect to {place}: set base_url to where it leads"
        return UpstreamError(detail, failure="model_error", upstream=target.peer(status), retryable=False)
    failure = problem(target, status, body)
    if status in REFUSED_FOR_RATE and failure.retryable:
        slot.record_refusal(wait_s(headers))
    return failure


def _is_refusal(failure: ServiceError) -> bool:
    return bool(failure.upstream and failure.upstream["status"] in REFUSED_FOR_RATE)


class UpstreamMetrics(Collector):
    """Collects the metrics of an upstream when they are scraped."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def collect(self) -> Iterator[Metric]:
        limiter, budget, caps = self._upstream.limiter, self._upstream.budget, self._upstream.caps
        gauge, count = GaugeMetricFamily, CounterMetricFamily
        yield gauge("ngym_upstream_limit", "The limit of requests in flight", limiter.limit)
        yield gauge("ngym_upstream_in_flight", "Requests in flight", limiter.in_flight)
        yield gauge("ngym_upstream_waiting", "Requests that wait for a slot", limiter.waiting)
        yield gauge("ngym_upstream_paused_seconds", "Seconds until requests may start again", limiter.paused_s())
        yield count("ngym_upstream_refused", "Requests refused for the rate (429, 503, 529)", limiter.counts.refused)
        yield count("ngym_upstream_limit_halved", "Number of times the limit was halved", limiter.counts.cuts)
        yield count("ngym_upstream_retries", "Retries after failures", budget.spent)
        yield count("ngym_upstream_retries_refused", "Retries that the budget did not allow", budget.refused)
        tokens = count("ngym_upstream_tokens", "Tokens, from the usage of answers", labels=["way"])
        tokens.add_metric(["input"], caps.used.input)
        tokens.add_metric(["output"], caps.used.output)
        yield tokens
        yield count("ngym_upstream_spend", "Money spent, by price_input and price_output", caps.spend)


@asynccontextmanager
async def watch_upstream(upstream: Upstream, app: FastAPI) -> AsyncIterator[Upstream]:
    """Register the metrics of an upstream during the block; it is closed at the end.

    While it cannot be reached, the app's `/ready` answers 503 with the reason, and a run that collects from it waits.
    """
    metrics = UpstreamMetrics(upstream)
    app.state.registry.register(metrics)
    what = "outages of the endpoint"
    watch = asyncio.create_task(run_endlessly(partial(_report_outages, upstream, app), what), name=what)
    try:
        yield upstream
    finally:
        watch.cancel()
        app.state.registry.unregister(metrics)
        await upstream.close()


async def _report_outages(upstream: Upstream, app: FastAPI) -> None:
    while True:
        app.state.not_ready = await upstream.wait_for_outage()
        while not await upstream.is_reachable():
            await asyncio.sleep(PROBE_S)
        app.state.not_ready = None
