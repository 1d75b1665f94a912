"""Rate control of calls to a remote API: an adaptive concurrency limit, and caps of tokens and money.

The limit grows while answers come, and is halved when the API refuses for the rate (429, 529, 503), at most once for
requests that were in flight together. It then returns to the last refused limit, fast at first, and probes slowly
beyond it (like TCP CUBIC, RFC 9438). All callers wait as long as the API asks for. After a refusal, requests also start
at even intervals (latency / limit), and the limit may fall below 1: an API that accepts five requests a second and
answers each in a millisecond limits the rate, not the number in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ngym.errors import Overloaded, ServiceError
from ngym.schema import Json

START = 16.0  # the first limit; it doubles with each round of answers until the first refusal
RECOVERY = 16  # answers until a halved limit has recovered by two thirds ...
PROBING = 256  # ... and each answer adds 1/256 of the last refused limit, also beyond it
SMOOTHING = 0.2  # of the latency, per answer
MAX_GAP_S = 60.0
FIRST_PAUSE_S = 0.05  # after a refusal without a time; doubled with each consecutive one
MAX_PAUSE_S = 30.0


class QuotaExhausted(ServiceError):
    """The cap of a key is reached, or its account has no credit. It is a 402, because clients retry a 429."""

    status = 402
    title = "Used up"


@dataclass(slots=True)
class TokenUsage:
    """Tokens of one answer, or the sum of all."""

    input: int = 0
    output: int = 0

    def take(self, event: Json) -> None:
        """Read the usage of an answer, or of one event of its stream (the highest counts: some repeat it)."""
        usage = _usage(event)
        if usage is None:
            return
        cached = _count(usage, "cache_read_input_tokens") + _count(usage, "cache_creation_input_tokens")
        self.input = max(self.input, _count(usage, "input_tokens", "prompt_tokens") + cached)
        self.output = max(self.output, _count(usage, "output_tokens", "completion_tokens"))


def _count(usage: Json, *names: str) -> int:
    """The first of these fields that is a number; 0 without one."""
    for name in names:
        count = usage.get(name)
        if isinstance(count, int):
            return count
    return 0


def _usage(event: Json) -> Json | None:
    """The usage in Chat, Responses, Anthropic and SGLang: at the top, or in the `response` or `message` of an event."""
    if isinstance(event.get("meta_info"), dict):
        of_sglang: Json = event["meta_info"]
        return of_sglang
    for holder in (event, event.get("response"), event.get("message")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            usage: Json = holder["usage"]
            return usage
    return None


@dataclass
class Caps:
    """The caps of a key for this process since its start; None: no cap. Prices are per million tokens."""

    max_tokens: int | None = None
    max_spend: float | None = None
    price_input: float = 0.0
    price_output: float = 0.0
    used: TokenUsage = field(default_factory=TokenUsage)

    @property
    def spend(self) -> float:
        return (self.used.input * self.price_input + self.used.output * self.price_output) / 1e6

    def check(self) -> None:
        """Raise QuotaExhausted once a cap is reached; the message has the option to raise."""
        tokens = self.used.input + self.used.output
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise _quota_error(f"{tokens} tokens used of max_tokens_total {self.max_tokens}", "max_tokens_total")
        if self.max_spend is not None and self.spend >= self.max_spend:
            raise _quota_error(f"{self.spend:.4g} spent of max_spend {self.max_spend:g}", "max_spend")

    def add(self, used: TokenUsage) -> None:
        self.used.input += used.input
        self.used.output += used.output


def _quota_error(what: str, option: str) -> QuotaExhausted:
    detail = f"{what}: no more requests for this key; raise {option} in the stanza (a restart counts from 0)"
    return QuotaExhausted(detail, failure="model_error")


@dataclass
class Counts:
    """Counters for /metrics."""

    refused: int = 0
    cuts: int = 0


class ConcurrencyLimiter:
    """The rate control of one API, on one event loop.

    Args:
        most: the upper bound of the limit.
    """

    def __init__(self, most: int) -> None:
        self.counts = Counts()
        self.limit = min(float(most), START)
        self.in_flight = 0
        self._most = float(most)
        self._ceiling: float | None = None  # the limit at the last cut; None before the first
        self._latency_s = 0.0
        self._resume_at = 0.0
        self._next_start = 0.0
        self._last_cut = -1.0
        self._refusals_in_a_row = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._patience: dict[asyncio.Future[None], float] = {}  # of each waiter
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for waiter in self._waiting)

    def paused_s(self) -> float:
        """Seconds until requests may be started again."""
        return max(0.0, self._resume_at - asyncio.get_running_loop().time())

    async def enter(self, remaining_s: float | None, patience_s: float) -> RequestSlot:
        """Wait for a turn; report the result with its methods, then call `leave`.

        Args:
            remaining_s: the longest wait; None: no bound.
            patience_s: a longer pause raises Overloaded.

        Raises:
            Overloaded: the API asked for a longer pause. TimeoutError: the turn did not come in time.
        """
        patience_s = min(patience_s, patience_s if remaining_s is None else remaining_s)
        now = asyncio.get_running_loop().time()
        if self._resume_at - now > patience_s:
            raise self._too_long()
        if not self._waiting and self._may_start(now):
            self._start(now)
            return RequestSlot(self, now)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._patience[waiter] = patience_s
        self._admit()
        try:
            async with asyncio.timeout(remaining_s):
                await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave()
            raise
        finally:
            del self._patience[waiter]
        return RequestSlot(self, asyncio.get_running_loop().time())

    def leave(self) -> None:
        self.in_flight -= 1
        self._admit()

    def record_answer(self, started: float) -> None:
        """Record an answer to a request that started at `started` (loop time)."""
        latency = asyncio.get_running_loop().time() - started
        self._latency_s += (latency - self._latency_s) * (SMOOTHING if self._latency_s else 1.0)
        self._refusals_in_a_row = 0
        if self.in_flight * 2 < self.limit:
            return  # the limit was not reached, so the answer is not evidence for it
        if self._ceiling is None:
            self.limit += 1.0
        else:
            self.limit += max(self._ceiling - self.limit, 0.0) / RECOVERY + self._ceiling / PROBING
            self._ceiling = max(self._ceiling, self.limit)
        self.limit = min(self.limit, self._most)

    def record_refusal(self, started: float, wait_s: float | None) -> None:
        """Record a refusal of a request that started at `started`. wait_s: the requested pause, if any."""
        self.counts.refused += 1
        now = asyncio.get_running_loop().time()
        if started > self._last_cut:
            self._last_cut = now
            self._ceiling = self.limit
            self.limit /= 2
            self.counts.cuts += 1
            self._refusals_in_a_row += 1
        if wait_s is None:
            wait_s = min(FIRST_PAUSE_S * 2 ** (self._refusals_in_a_row - 1), MAX_PAUSE_S)
        self._resume_at = max(self._resume_at, now + wait_s)
        paused = self.paused_s()
        for waiter, patience_s in self._patience.items():
            if paused > patience_s and not waiter.done():
                waiter.set_exception(self._too_long())

    def _too_long(self) -> Overloaded:
        detail = f"the API asked for a pause of {self.paused_s():.0f} s, longer than this request may wait"
        return Overloaded(detail, failure="model_error", retry_after_s=self.paused_s())

    def _may_start(self, now: float) -> bool:
        return self.in_flight < max(1.0, self.limit) and now >= max(self._resume_at, self._next_start)

    def _start(self, now: float) -> None:
        self.in_flight += 1
        if self._ceiling is not None:
            self._next_start = now + min(self._latency_s / self.limit, MAX_GAP_S)

    def _admit(self) -> None:
        """Start as many waiters as allowed, in order; if they only wait for a time, set a timer."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        while self._waiting and self._may_start(now := loop.time()):
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._start(now)
                waiter.set_result(None)
        if self._waiting and self.in_flight < max(1.0, self.limit):
            if self._timer is not None:
                self._timer.cancel()
            when = max(self._resume_at, self._next_start)
            self._timer = loop.call_at(when, self._admit)


class RequestSlot(NamedTuple):
    """The slot of one request in flight. started: in loop time."""

    limiter: ConcurrencyLimiter
    started: float

    def record_answer(self) -> None:
        self.limiter.record_answer(self.started)

    def record_refusal(self, wait_s: float | None) -> None:
        self.limiter.record_refusal(self.started, wait_s)
