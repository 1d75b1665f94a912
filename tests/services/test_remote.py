"""ngym.remote against servers on real sockets: rate limits, retries, size limits, and streams that break off."""

import asyncio
import itertools
import random
import time
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from local_services import local_services
from pydantic import ValidationError
from waiting import PATIENCE_S, until

from ngym.errors import Overloaded, ServiceError, UpstreamError
from ngym.net import request_context
from ngym.net.load_balancer import RetryBudget
from ngym.remote import ContextOverflow, OutcomeUnknown, RemoteOptions, Upstream
from ngym.remote import answer_validation as answers
from ngym.remote.rate_limiter import Caps, QuotaExhausted, TokenUsage
from ngym.remote.upstream import MAX_WAIT_S, EventData, wait_s
from ngym.services import ServiceOptions

Json = dict[str, Any]
NOW = 1_800_000_000.0
REQUESTS = 300
USAGE = {"prompt_tokens": 70, "completion_tokens": 30, "prompt_tokens_details": None}


@asynccontextmanager
async def upstream(answer: Any, **options: Any):
    """An Upstream in front of a server whose every POST `answer(request)` answers."""
    app = FastAPI()
    app.state.options_model, app.state.kind = ServiceOptions, "model"
    app.add_api_route("/{path:path}", answer, methods=["POST"])

    async def no_headers() -> dict[str, str]:
        return {}

    async with local_services(stub=app) as peers:
        settings = RemoteOptions(base_url=peers.urls["stub"][0] + "/v1", **options)
        one = Upstream(settings, "policy", "m", no_headers)
        try:
            yield one
        finally:
            await one.close()


class TokenBucket:
    """A server that takes `rate` requests a second, and `burst` at once; to each other one it says 429."""

    def __init__(self, rate: float, burst: float, latency_s: float = 0.0, says_when: bool = True) -> None:
        self.rate, self.burst, self.latency_s, self.says_when = rate, burst, latency_s, says_when
        self.tokens = burst
        self.at = 0.0
        self.answer_count = self.refused = 0

    async def answer(self, request: Request) -> Response:
        now = asyncio.get_running_loop().time()
        self.at = self.at or now
        self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
        self.at = now
        if self.tokens < 1:
            self.refused += 1
            headers = {"retry-after-ms": str(1000 * (1 - self.tokens) / self.rate)} if self.says_when else {}
            return JSONResponse({"error": {"message": "slow down"}}, 429, headers)
        self.tokens -= 1
        self.answer_count += 1
        await asyncio.sleep(self.latency_s)
        return JSONResponse({"ok": True})


async def a_rate_to_be_refused_at() -> float:
    """Requests a second: as many as a limit may allow, and a third of what this machine asks without one."""
    async with upstream(TokenBucket(1e9, 1e9).answer) as one:
        began = time.monotonic()
        await asyncio.gather(*(one.post("/x", {}) for _ in range(REQUESTS)))
        return min(200.0, REQUESTS / (time.monotonic() - began) / 3)


@pytest.mark.parametrize(
    ("latency", "says_when"), [(10, True), (0, True), (10, False)], ids=["latency", "no-latency", "says-not-when"]
)
async def test_under_a_rate_limit_everything_is_answered_and_little_is_refused(latency: float, says_when: bool):
    fast = await a_rate_to_be_refused_at()
    for rate in (fast, fast / 3, fast / 9):
        bucket = TokenBucket(rate, rate / 10, latency / rate, says_when)
        async with upstream(bucket.answer, max_retries=20) as one:
            await asyncio.gather(*(one.post("/x", {}) for _ in range(REQUESTS)))
        assert bucket.answer_count == REQUESTS
        if bucket.refused:
            break  # this machine has not become too slow to be refused
    assert 0 < bucket.refused < REQUESTS * 0.2


async def test_a_pause_that_one_caller_gets_is_kept_by_all():
    at: list[float] = []

    async def answer(request: Request) -> Response:
        at.append(asyncio.get_running_loop().time())
        return JSONResponse({}, 429, {"retry-after": "1"}) if len(at) == 1 else JSONResponse({})

    async with upstream(answer) as one:
        first = asyncio.create_task(one.post("/x", {}))
        await until(lambda: one.limiter.counts.refused)
        await asyncio.gather(first, *(one.post("/x", {}) for _ in range(5)))
    assert len(at) == 7
    assert min(at[1:]) - at[0] >= 0.99


async def test_the_limit_grows_with_answers_and_is_halved_once_for_those_that_are_refused_together():
    refuse = asyncio.Event()

    async def answer(request: Request) -> Response:
        await asyncio.sleep(0.01)
        return JSONResponse({}, 429, {"retry-after-ms": "1"}) if refuse.is_set() else JSONResponse({})

    async with upstream(answer, max_concurrency=40, max_retries=0) as one:
        assert one.limiter.limit == 16
        await asyncio.gather(*(one.post("/x", {}) for _ in range(200)))
        assert one.limiter.limit == 40
        refuse.set()
        errors = await asyncio.gather(*(one.post("/x", {}) for _ in range(40)), return_exceptions=True)
    assert all(isinstance(one, Overloaded) and one.retryable for one in errors)
    assert (one.limiter.counts.refused, one.limiter.counts.cuts) == (40, 1)
    assert one.limiter.limit == 20


async def test_a_pause_longer_than_anyone_waits_is_reported_at_once():
    async def answer(request: Request) -> Response:
        return JSONResponse({}, 429, {"retry-after": "3600"})

    async with upstream(answer, max_retries=3) as one:
        with pytest.raises(Overloaded, match=r"a pause of 3\d\d\d s, longer than this request may wait"):
            await one.post("/x", {})
        with pytest.raises(Overloaded, match="longer than this request may wait") as refusal:
            await one.post("/x", {})
    assert refusal.value.retry_after_s > 3000


async def test_the_other_side_can_continue_with_the_trace_and_learns_nothing_else_of_the_rollout():
    requests: list[dict[str, str]] = []

    async def answer(request: Request) -> Response:
        requests.append(dict(request.headers))
        return JSONResponse({"ok": True})

    here = request_context.new_correlation("r-1", timeout_s=60)
    token = request_context.current.set(here)
    try:
        async with upstream(answer) as one:
            await one.post("/chat/completions", {})
    finally:
        request_context.current.reset(token)
    assert requests[0]["traceparent"] == here.traceparent
    assert not [name for name in requests[0] if name.startswith("x-ng")] and "r-1" not in str(requests[0])


async def test_a_server_that_is_down_is_asked_again_only_within_the_budget():
    requests = 0

    async def answer(request: Request) -> Response:
        nonlocal requests
        requests += 1
        return JSONResponse({"error": {"message": "no"}}, 500, {"retry-after-ms": "1"})

    async with upstream(answer, max_retries=3, retry_ratio=0.1) as one:
        failed = await asyncio.gather(*(one.post("/x", {}) for _ in range(100)), return_exceptions=True)
    assert all(isinstance(error, UpstreamError) and error.retryable for error in failed)
    assert requests == 100 + 10 + 10
    assert one.budget.spent == 20
    assert one.budget.refused > 0


def test_the_retry_budget_forgets_after_a_minute():
    now = 0.0
    budget = RetryBudget(0.0, clock=lambda: now)
    assert [budget.allow_retry() for _ in range(11)] == [True] * 10 + [False]
    now = 61.0
    assert budget.allow_retry()


async def test_a_cap_on_tokens_and_on_money_ends_it_with_what_to_raise():
    async def answer(request: Request) -> Response:
        return JSONResponse({"usage": USAGE})

    async with upstream(answer, max_tokens_total=250) as one:
        for _ in range(3):
            await one.post("/x", {})
        with pytest.raises(
            QuotaExhausted, match=r"300 tokens used of max_tokens_total 250.*raise max_tokens_total"
        ) as caught:
            await one.post("/x", {})
    assert (caught.value.status, caught.value.retryable) == (402, False)
    async with upstream(answer, max_spend=1e-3, price_input=10, price_output=20) as one:
        await one.post("/x", {})
        assert one.caps.spend == pytest.approx((70 * 10 + 30 * 20) / 1e6)
        with pytest.raises(QuotaExhausted, match="raise max_spend"):
            await one.post("/x", {})
    with pytest.raises(ValidationError, match="max_spend needs price_input and price_output"):
        RemoteOptions(base_url="http://x", max_spend=1)


def test_an_answer_with_a_negative_usage_is_refused() -> None:
    """It would lower the tokens that count against a cap."""
    negative = {"output_tokens": -1, "completion_tokens": -1}
    head: Json = {"id": "1", "model": "m", "created_at": 0, "status": "completed", "usage": negative}
    answer: Json = {**head, "choices": [{"message": {}}], "content": [], "output": []}
    problems = [check(answer) for check in (answers.chat_completion, answers.message, answers.response)]
    assert all("tokens: Input should be greater than or equal to 0" in str(problem) for problem in problems), problems


def test_usage_is_found_wherever_an_api_puts_it():
    def read_usage(*events: Json) -> TokenUsage:
        one = TokenUsage()
        for event in events:
            one.take(event)
        return one

    assert read_usage({"usage": USAGE}) == TokenUsage(70, 30)
    assert read_usage({"usage": None}, {"choices": [], "usage": USAGE}) == TokenUsage(70, 30)
    assert read_usage({"response": {"usage": {"input_tokens": 3, "output_tokens": 4}}}) == TokenUsage(3, 4)
    start = {"message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 6, "output_tokens": 1}}}
    assert read_usage(start, {"usage": {"output_tokens": 9}}) == TokenUsage(11, 9)
    assert Caps(price_input=1, price_output=2, used=TokenUsage(10**6, 10**6)).spend == 3


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Fri, 15 Jan 2027 08:00:30 GMT"}, 30),
        ({"retry-after": "Fri, 15 Jan 2027 07:00:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1e9"}, MAX_WAIT_S),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "120ms"}, 0.12),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "120ms"}, None),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "1m1.5s",
            },
            61.5,
        ),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1800000007"}, 7),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1800000007000"}, 7),
        (
            {
                "anthropic-ratelimit-tokens-remaining": "0",
                "anthropic-ratelimit-tokens-reset": "2027-01-15T08:00:05Z",
            },
            5,
        ),
        ({"x-ratelimit-remaining": "0"}, None),
    ],
)
def test_what_headers_say_about_waiting(headers: dict[str, str], expected: float | None):
    assert wait_s(headers, NOW) == (None if expected is None else pytest.approx(expected))


def test_events_are_found_however_the_stream_is_cut():
    text = b': hello\n\nevent: a\ndata: {"x":1}\n\ndata: one\r\ndata: two\r\n\r\ndata:\xc3\xa4\n\nid: 3\n\ndata: [DONE]\n\n'
    payloads = [b'{"x":1}', b"one\ntwo", "ä".encode(), b"[DONE]"]
    draw = random.Random(1)
    for _ in range(200):
        cuts = [0, *sorted(draw.randrange(len(text)) for _ in range(draw.randrange(6))), len(text)]
        data = EventData()
        parts = [text[start:end] for start, end in itertools.pairwise(cuts)]
        assert [event for part in parts for event in data.take(part)] == payloads
    assert list(EventData().take(b"data: unfinished\n")) == []


def sse(*events: Any) -> Response:
    async def body():
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield event if isinstance(event, bytes) else b"data: " + orjson.dumps(event) + b"\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


async def collect_stream(*events: Any, **options: Any) -> list[Json]:
    async def answer(request: Request) -> Response:
        return sse(*events)

    async with upstream(answer, **options) as one:
        return [event async for event in one.stream("/x", {})]


async def test_a_stream_comes_event_by_event_and_its_usage_counts():
    async def answer(request: Request) -> Response:
        return sse({"a": 1}, {"usage": USAGE}, b"data: [DONE]\n\n")

    async with upstream(answer, max_tokens_total=100) as one:
        assert [event async for event in one.stream("/x", {})] == [{"a": 1}, {"usage": USAGE}]
        with pytest.raises(QuotaExhausted, match="max_tokens_total"):
            await anext(one.stream("/x", {}))


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([{"a": 1}, {"error": {"message": "overheated", "code": None}}], UpstreamError, "overheated"),
        ([{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}], Overloaded, "Overloaded"),
        ([{"type": "error", "message": "bad luck", "code": "server_error"}], UpstreamError, "bad luck"),
        ([{"error": {"message": "x", "code": "context_length_exceeded"}}], ContextOverflow, "x"),
        ([{"a": 1}, b"data: {oops\n\n"], UpstreamError, "broke off"),
        ([b"data: 7\n\n"], UpstreamError, "not a JSON object"),
        ([{"a": 1}, RuntimeError("the stub breaks")], UpstreamError, "broke off"),
    ],
)
async def test_what_goes_wrong_within_a_stream_is_reported(events: list[Any], kind: type[ServiceError], message: str):
    with pytest.raises(kind, match=message):
        await collect_stream(*events)


async def test_a_stream_that_stalls_is_a_timeout():
    async def answer(request: Request) -> Response:
        async def body():
            yield b"data: {}\n\n"
            await asyncio.sleep(3600)

        return StreamingResponse(body(), media_type="text/event-stream")

    async with upstream(answer, timeout_s=0.5) as one:
        with pytest.raises(ServiceError, match=r"did not answer within 0.5 s"):
            [event async for event in one.stream("/x", {})]
        assert one.limiter.in_flight == 0


async def test_a_stream_is_retried_until_its_first_event_and_never_after():
    requests = 0

    async def answer(request: Request) -> Response:
        nonlocal requests
        requests += 1
        return JSONResponse({}, 500) if requests == 1 else sse({"a": 1}, RuntimeError("the stub breaks"))

    async with upstream(answer, max_retries=3) as one:
        with pytest.raises(UpstreamError, match="broke off"):
            [event async for event in one.stream("/x", {})]
    assert requests == 2


async def test_what_must_not_be_done_twice_is_sent_again_only_where_it_was_not_begun():
    requests = 0

    async def answer(request: Request) -> Response:
        nonlocal requests
        requests += 1
        if requests == 1:
            return JSONResponse({}, 503, {"retry-after-ms": "10"})
        return sse({"a": 1}, RuntimeError("the stub breaks"))

    async with upstream(answer, max_retries=3) as one:
        with pytest.raises(OutcomeUnknown, match="the request may or may not have been processed"):
            await one.send("/x", {}, once=True)
    assert requests == 2


async def test_leaving_a_stream_disconnects():
    disconnected = asyncio.Event()

    async def answer(request: Request) -> Response:
        async def body():
            try:
                while True:
                    yield b"data: {}\n\n"
                    await asyncio.sleep(0.01)
            finally:
                disconnected.set()

        return StreamingResponse(body(), media_type="text/event-stream")

    async with upstream(answer) as one:
        events = one.stream("/x", {})
        assert await anext(events) == {}
        await events.aclose()
        async with asyncio.timeout(PATIENCE_S):
            await disconnected.wait()
        assert one.limiter.in_flight == 0


async def test_a_caller_that_goes_away_frees_its_place_and_disconnects():
    running: set[str] = set()

    async def answer(request: Request) -> Response:
        running.add("one")
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        running.clear()
        return JSONResponse({})

    async with upstream(answer, max_concurrency=1) as one:
        asking = asyncio.create_task(one.post("/x", {}))
        waiting = asyncio.create_task(one.post("/x", {}))
        await until(lambda: running)
        assert one.limiter.waiting == 1
        waiting.cancel()
        asking.cancel()
        await until(lambda: not running)
    assert (one.limiter.in_flight, one.limiter.waiting) == (0, 0)


async def test_without_a_content_type_of_events_it_is_not_a_stream():
    async def answer(request: Request) -> Response:
        return JSONResponse({"choices": []})

    async with upstream(answer) as one:
        with pytest.raises(UpstreamError, match="did not answer with a stream"):
            await anext(one.stream("/x", {}))


async def test_credit_that_is_used_up_is_not_asked_for_again():
    requests = 0

    async def answer(request: Request) -> Response:
        nonlocal requests
        requests += 1
        return JSONResponse({"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}, 429)

    async with upstream(answer) as one:
        with pytest.raises(QuotaExhausted, match="no credit left: You exceeded your quota") as caught:
            await one.post("/x", {})
    assert requests == 1
    assert not caught.value.retryable
