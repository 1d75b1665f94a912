"""Services that fail or refuse for a while, deadlines that pass, and the load that this causes."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from aiohttp import web
from fastapi import Request
from local_services import local_services
from paths import ROOT
from starlette.responses import Response
from stub_agents import problem, serving
from waiting import until

from ngym import ServiceOptions, Session, VerifyRequest, gym_server
from ngym.errors import ServiceError, UpstreamError
from ngym.net.load_balancer import FREE_RETRIES
from ngym.peers import Peers
from ngym.schema import Json
from ngym.services.base.app import JsonResponse, add_route, load, service_app

SIMPLE_AGENT = ROOT / "agents" / "simple" / "app.py"
CALLS = 1000
IN_FLIGHT = 64
PATIENCE_S = 300.0
DEADLINES = ("500", "4000", "30000")  # milliseconds: the first in which the work begins


async def send_calls(url: str, calls: int) -> list[object]:
    """The results of so many calls that may be repeated, so many at a time."""
    peers, gate = Peers({"policy": [url]}), asyncio.Semaphore(IN_FLIGHT)

    async def one() -> object:
        async with gate:
            return await peers["policy"].post("/run", {}, idempotent=True, timeout=PATIENCE_S)

    try:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*(one() for _ in range(calls)), return_exceptions=True)
    finally:
        await peers.close()


async def test_while_three_in_ten_answers_are_errors_nearly_all_calls_succeed() -> None:
    """No more is asked than it takes: 1 / (1 - 0.3) requests a call, and a fifth more at most."""
    requests, draw = 0, random.Random(0)

    def answer(body: Json) -> web.Response | Json:
        nonlocal requests
        requests += 1
        return web.Response(status=draw.choice((500, 502, 503))) if draw.random() < 0.3 else {"ok": True}

    async with serving(answer) as url:
        outcomes = await send_calls(url, CALLS)
    assert sum(outcome == {"ok": True} for outcome in outcomes) >= 0.999 * CALLS
    assert requests <= 1.2 * CALLS / (1 - 0.3)


async def test_a_caller_that_gets_a_retry_after_waits_that_long() -> None:
    """Twice during the storm everybody is refused; each call in flight is made once more for each of them."""
    requests, refusals, shut = 0, 0, 0

    def answer(body: Json) -> web.Response | Json:
        nonlocal requests, refusals, shut
        requests += 1
        if requests in (200, 700):
            shut = IN_FLIGHT // 2
        if shut:
            shut -= 1
            refusals += 1
            reply = problem(429, retryable=True)
            reply.headers["retry-after"] = "1"
            return reply
        return {"ok": True}

    async with serving(answer) as url:
        outcomes = await send_calls(url, CALLS)
    assert outcomes == [{"ok": True}] * CALLS
    assert refusals == IN_FLIGHT
    assert requests == CALLS + refusals <= 1.2 * CALLS


async def test_a_service_that_answers_only_errors_is_hardly_asked_again() -> None:
    requests = 0

    def answer(body: Json) -> web.Response:
        nonlocal requests
        requests += 1
        return web.Response(status=500)

    async with serving(answer) as url:
        outcomes = await send_calls(url, 200)
    assert all(isinstance(outcome, UpstreamError) and outcome.retryable for outcome in outcomes)
    assert requests == 200 + FREE_RETRIES


async def test_one_service_in_trouble_leaves_the_others_their_retries() -> None:
    turn = 0

    def every_other(body: Json) -> web.Response | Json:
        nonlocal turn
        turn += 1
        return web.Response(status=500) if turn % 2 else {"ok": True}

    async with serving(lambda body: web.Response(status=500)) as broken, serving(every_other) as shaky:
        peers = Peers({"broken": [broken], "shaky": [shaky]})
        try:
            failing = (peers["broken"].post("/run", {}, idempotent=True) for _ in range(2 * FREE_RETRIES))
            outcomes = await asyncio.gather(*failing, return_exceptions=True)
            assert all(isinstance(outcome, UpstreamError) for outcome in outcomes)
            for _ in range(FREE_RETRIES):
                assert await peers["shaky"].post("/run", {}, idempotent=True) == {"ok": True}
        finally:
            await peers.close()


@pytest.mark.parametrize(
    ("status", "expected"), [(400, 400), (409, 409), (422, 422), (401, 502), (418, 502), (500, 502)]
)
async def test_which_statuses_of_a_peer_are_passed_on(status: int, expected: int) -> None:
    async with serving(lambda body: problem(status, retryable=False)) as url:
        peers = Peers({"gym": [url]})
        try:
            with pytest.raises(UpstreamError) as caught:
                await peers["gym"].post("/run", {})
        finally:
            await peers.close()
    assert caught.value.status == expected
    assert not caught.value.is_for_the_model, "that, a gym server says of a tool call in a session"


class Slow:
    """A service whose work takes until it is cancelled."""

    def __init__(self) -> None:
        self.started = 0
        self.stopped = 0

    def app(self):
        async def work(request: Request) -> Response:
            await request.body()
            self.started += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.stopped += 1
                raise
            return JsonResponse({})

        app = service_app("model", options=ServiceOptions)
        for path in ("/work", "/v1/responses"):
            add_route(app, "POST", path, work)
        return app


async def test_work_is_stopped_at_its_callers_deadline_and_not_begun_after_it() -> None:
    slow = Slow()
    async with (
        local_services(slow=slow.app()) as peers,
        httpx.AsyncClient(base_url=peers.urls["slow"][0], timeout=PATIENCE_S) as client,
    ):
        late = await client.post("/work", headers={"x-ng-deadline-ms": "0"})
        assert (late.status_code, late.json()["failure"], slow.started) == (504, "timeout", 0)
        for deadline in DEADLINES:
            over = await client.post("/work", headers={"x-ng-deadline-ms": deadline})
            if slow.started:
                break
        assert (over.status_code, over.json()["failure"], over.json()["retryable"]) == (504, "timeout", True)
        assert "the caller's deadline passed" in over.json()["detail"]
        assert (slow.started, slow.stopped) == (1, 1)


@pytest.mark.parametrize("deadline", [b"\xb2", b"soon", b"-1", b"9" * 5000])
async def test_a_deadline_that_is_not_a_number_is_passed_over(deadline: bytes) -> None:
    async def work(request: Request) -> Response:
        return JsonResponse({})

    app = service_app("model", options=ServiceOptions)
    add_route(app, "POST", "/work", work)
    async with (
        local_services(quick=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["quick"][0], timeout=PATIENCE_S) as client,
    ):
        done = await client.post("/work", headers={b"x-ng-deadline-ms": deadline})
    assert done.status_code == 200


async def test_a_rollouts_deadline_reaches_its_model_and_its_session_ends_with_it() -> None:
    slow = Slow()

    async def verify(task: VerifyRequest, session: Session) -> float:
        return 1.0

    gym = gym_server(verify=verify)
    options = {"agent": {"gym": "gym", "model": "model"}}
    async with local_services(options, gym=gym, model=slow.app(), agent=load(SIMPLE_AGENT).app) as peers:
        row = {"responses_create_params": {"input": "say something"}}
        for deadline in DEADLINES:
            with pytest.raises(ServiceError) as caught:
                headers = {"x-ng-deadline-ms": deadline}
                await peers["agent"].request("POST", "/run", row, headers=headers, timeout=PATIENCE_S)
            if slow.started:
                break
        assert (caught.value.status, caught.value.failure) == (504, "timeout")
        await until(lambda: slow.stopped == slow.started == 1)
        await until(lambda: len(gym.state.sessions) == 0)


async def test_a_collector_that_leaves_takes_its_rollout_with_it() -> None:
    slow = Slow()

    async def verify(task: VerifyRequest) -> float:
        return 1.0

    gym = gym_server(verify=verify)
    options = {"agent": {"gym": "gym", "model": "model"}}
    async with local_services(options, gym=gym, model=slow.app(), agent=load(SIMPLE_AGENT).app) as peers:
        row = {"responses_create_params": {"input": "say something"}}
        run = asyncio.create_task(peers["agent"].post("/run", row))
        await until(lambda: slow.started)
        assert len(gym.state.sessions) == 1
        run.cancel()
        await until(lambda: slow.stopped and len(gym.state.sessions) == 0)
        with pytest.raises(asyncio.CancelledError):
            await run
