"""Repeated calls: after a lost answer a call has its effect once; a call that answered 429 or 503 had none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request
from local_services import local_services
from pydantic import BaseModel
from starlette.responses import Response
from waiting import until

from ngym import ServiceContext, ServiceError, ServiceOptions, Session, Step, VerifyRequest, gym_server, step_server
from ngym.errors import NotReady, Overloaded, UpstreamError
from ngym.peers import Peers
from ngym.services.base.app import JsonResponse, add_route, service_app
from ngym.services.gym.sessions import IdempotentCalls

KEY = "idempotency-key"
SESSION = "x-ng-session"
PATIENCE_S = 60.0
ROW = {"responses_create_params": {"input": "hi"}}
ANSWERED = {**ROW, "response": {"output": []}}


class Word(BaseModel):
    word: str


class Shop:
    """A gym server whose tools note each time that they run."""

    def __init__(self) -> None:
        self.call_counts: Counter[str] = Counter()
        self.proceed = asyncio.Event()
        self.stopped = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[httpx.AsyncClient]:
        async with (
            local_services(gym=self.app()) as peers,
            httpx.AsyncClient(base_url=peers.urls["gym"][0], timeout=PATIENCE_S) as client,
        ):
            yield client

    def app(self) -> FastAPI:
        async def say(body: Word, session: Session) -> str:
            """Say a word."""
            self.call_counts[body.word] += 1
            return f"{body.word} {self.call_counts[body.word]}"

        async def wait(body: Word, session: Session) -> str:
            """Say a word when told."""
            self.call_counts[body.word] += 1
            try:
                await self.proceed.wait()
            except asyncio.CancelledError:
                self.stopped = True
                raise
            return body.word

        async def refuse(body: Word, session: Session) -> str:
            """Never."""
            self.call_counts[body.word] += 1
            raise ServiceError("not that word", failure="tool_error")

        async def busy(body: Word, session: Session) -> str:
            """The first time there is no room."""
            self.call_counts[body.word] += 1
            if self.call_counts[body.word] == 1:
                raise Overloaded("come again")
            return body.word

        async def verify(task: VerifyRequest, session: Session) -> float:
            self.call_counts["verify"] += 1
            return float(sum(self.call_counts.values()))

        return gym_server(verify=verify, tools=[say, wait, refuse, busy])


async def seeded(client: httpx.AsyncClient) -> dict[str, str]:
    """The headers of a new session."""
    return {SESSION: (await client.post("/seed_session", json=ROW)).headers[SESSION]}


async def test_under_one_key_a_tool_runs_once_and_says_the_same_again() -> None:
    shop = Shop()
    async with shop.open() as client:
        headers, other = await seeded(client), await seeded(client)
        once = {**headers, KEY: "a"}
        answers = [(await client.post("/say", json={"word": "x"}, headers=once)).json() for _ in range(3)]
        assert answers == ["x 1"] * 3
        assert (await client.post("/say", json={"word": "x"}, headers={**headers, KEY: "b"})).json() == "x 2"
        assert (await client.post("/say", json={"word": "x"}, headers={**other, KEY: "a"})).json() == "x 3"
        assert (await client.post("/say", json={"word": "x"}, headers=headers)).json() == "x 4"
        responses = [await client.post("/refuse", json={"word": "y"}, headers=once) for _ in range(2)]
        assert [one.status_code for one in responses] == [500, 500]
        assert responses[0].json() == responses[1].json()
        assert shop.call_counts["y"] == 1
        busy = [await client.post("/busy", json={"word": "z"}, headers=once) for _ in range(3)]
        assert [one.status_code for one in busy] == [429, 200, 200], "what was not done is done the next time"
        assert shop.call_counts["z"] == 2
        long = await client.post("/say", json={"word": "x"}, headers={**headers, KEY: "k" * 1000})
        assert long.status_code == 422


async def test_the_session_ends_with_verify_and_its_reward_can_still_be_asked_for() -> None:
    shop = Shop()
    async with shop.open() as client:
        headers = await seeded(client)
        rewards = [
            (await client.post("/verify", json=ANSWERED, headers={**headers, KEY: "v"})).json()["reward"]
            for _ in range(2)
        ]
        assert rewards == [1.0, 1.0]
        assert (await client.post("/verify", json=ANSWERED, headers={**headers, KEY: "w"})).status_code == 404


async def test_a_step_server_that_is_busy_once_costs_no_episode() -> None:
    calls: Counter[str] = Counter()

    def busy_once(what: str, error: ServiceError) -> None:
        calls[what] += 1
        if calls[what] == 1:
            raise error

    async def reset(task: VerifyRequest, session: Session) -> str:
        busy_once("reset", Overloaded("both places are taken"))
        return "go"

    async def step(task: VerifyRequest, session: Session) -> Step:
        busy_once("step", NotReady("the board is being set up"))
        return Step("fine", reward=1.0, terminated=True)

    async with local_services(gym=step_server(task=VerifyRequest, reset=reset, step=step)) as peers:
        session = peers["gym"].session()
        assert (await session.post("/reset", ROW))["observation"] == "go"
        assert (await session.post("/step", ANSWERED))["terminated"]
        scored = await session.post("/verify", ANSWERED)
    assert (scored["reward"], scored["steps"]) == (1.0, 1)
    assert calls == {"reset": 2, "step": 2}


@pytest.mark.parametrize("fails_in", ["reset", "step"])
async def test_a_new_reset_begins_an_episode_that_does_not_keep_the_failure_of_the_last_one(fails_in: str) -> None:
    fails = {fails_in}

    def fail_once(what: str) -> None:
        if what in fails:
            fails.remove(what)
            raise RuntimeError(f"{what} is broken")

    async def reset(task: VerifyRequest, session: Session) -> str:
        fail_once("reset")
        return "go"

    async def step(task: VerifyRequest, session: Session) -> Step:
        fail_once("step")
        return Step("done", reward=1.0, terminated=True)

    async with local_services(gym=step_server(task=VerifyRequest, reset=reset, step=step)) as peers:
        session = peers["gym"].session()
        turn = {**ROW, "response": {"output": []}}
        with pytest.raises(ServiceError, match=f"{fails_in} is broken"):
            await session.post("/reset", ROW)
            await session.post("/step", turn)
        await session.post("/reset", ROW)
        await session.post("/step", turn)
        assert (await session.post("/verify", turn))["reward"] == 1.0


async def test_a_step_server_that_stays_busy_is_reported_with_its_reason() -> None:
    async def reset(task: VerifyRequest, session: Session) -> str:
        raise Overloaded("both places are taken; lower `episodes`", retry_after_s=36_000)

    async def step(task: VerifyRequest, session: Session) -> Step:
        raise AssertionError("no episode has begun")

    async with local_services(gym=step_server(task=VerifyRequest, reset=reset, step=step)) as peers:
        with pytest.raises(UpstreamError, match="both places are taken; lower `episodes`") as busy:
            await peers["gym"].session().post("/reset", ROW)
    assert (busy.value.status, busy.value.failure, busy.value.retryable) == (429, "tool_error", True)


@pytest.mark.parametrize("error", [Overloaded("the grader is busy"), NotReady("the grader starts")])
async def test_a_verifier_that_is_busy_once_is_asked_again_in_the_same_session(error: ServiceError) -> None:
    closed: list[str] = []
    refusals = [error]

    async def add(session: Session) -> int:
        """Count."""
        session.when_over(lambda: closed.append("session"))
        session["n"] = session.get("n", 0) + 1
        return int(session["n"])

    async def verify(task: VerifyRequest, session: Session) -> float:
        if refusals:
            raise refusals.pop()
        return float(session["n"])

    app = gym_server(tools=[add], verify=verify)
    async with local_services(gym=app) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", ROW)
        await session.post("/add", {})
        assert (await session.post("/verify", ANSWERED))["reward"] == 1.0
        assert len(app.state.sessions) == 0 and closed == ["session"]


async def test_what_a_session_closes_may_be_async_and_its_error_costs_no_reward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = asyncio.Event()

    async def close() -> None:
        await asyncio.sleep(0)
        closed.set()
        raise ValueError("closed badly")

    async def verify(task: VerifyRequest, session: Session) -> float:
        session.when_over(lambda: {}["no such key"])
        session.when_over(close)
        return 1.0

    async with local_services(gym=gym_server(verify=verify, replays=True)) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", ROW)
        assert (await session.post("/verify", ANSWERED))["reward"] == 1.0
        await closed.wait()
        await until(lambda: "closed badly" in caplog.text)
    assert "no such key" in caplog.text and caplog.text.count(f"when_over failed (session {session.id})") == 2


async def test_the_sessions_of_a_service_end_with_it_before_its_lifespan() -> None:
    ended: list[str] = []

    @asynccontextmanager
    async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
        yield
        ended.append("lifespan")

    async def close() -> None:
        await asyncio.sleep(0)
        ended.append("session")

    async def look(session: Session) -> str:
        """Look."""
        session.when_over(close)
        return "seen"

    async def verify(task: VerifyRequest, session: Session) -> float:
        return 1.0

    async with local_services(gym=gym_server(tools=[look], verify=verify, lifespan=lifespan)) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", ROW)
        await session.post("/look", {})
        assert not ended
    assert ended == ["session", "lifespan"]


async def test_a_session_whose_verifier_stays_busy_ends_when_it_is_deleted_or_idle() -> None:
    async def verify(task: VerifyRequest, session: Session) -> float:
        session.when_over(lambda: closed.append(session.id))
        raise Overloaded("the grader is busy")

    closed: list[str] = []
    app = gym_server(verify=verify, replays=True)
    async with local_services(gym=app) as peers, httpx.AsyncClient(base_url=peers.urls["gym"][0]) as client:
        first, second = await seeded(client), await seeded(client)
        for headers in (first, second):
            assert (await client.post("/verify", json=ANSWERED, headers=headers)).status_code == 429
        assert len(app.state.sessions) == 2 and not closed
        assert (await client.delete("/session", headers=first)).json() == {"ended": True}
        app.state.sessions.ttl_s = -1.0
        assert (await client.post("/verify", json=ANSWERED, headers=second)).status_code == 404
        assert closed == [first[SESSION], second[SESSION]] and len(app.state.sessions) == 0
        client.cookies.clear()
        assert (await client.post("/verify", json=ANSWERED)).status_code == 429
        assert len(closed) == 3, "a session that was never stored ends with its call"


async def test_who_disconnects_and_comes_back_waits_for_the_same_call() -> None:
    shop = Shop()
    async with shop.open() as client, asyncio.timeout(PATIENCE_S):
        once = {**await seeded(client), KEY: "a"}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/wait", json={"word": "x"}, headers=once, timeout=0.5)
        again = asyncio.create_task(client.post("/wait", json={"word": "x"}, headers=once))
        await until(lambda: shop.call_counts["x"])
        shop.proceed.set()
        assert (await again).json() == "x"
    assert shop.call_counts["x"] == 1 and not shop.stopped


async def test_what_runs_in_a_session_is_stopped_when_that_is_deleted() -> None:
    shop = Shop()
    async with shop.open() as client, asyncio.timeout(PATIENCE_S):
        headers = await seeded(client)
        call = asyncio.create_task(client.post("/wait", json={"word": "x"}, headers={**headers, KEY: "a"}))
        await until(lambda: shop.call_counts["x"])
        assert (await client.delete("/session", headers=headers)).json() == {"ended": True}
        assert (await call).status_code == 409
        await until(lambda: shop.stopped)


async def test_what_runs_in_a_session_is_stopped_when_its_deadline_is_over() -> None:
    shop = Shop()
    async with shop.open() as client, asyncio.timeout(PATIENCE_S):
        headers = await seeded(client)
        for deadline in ("500", "4000", "30000"):  # milliseconds: the first in which the call begins
            once = {**headers, "x-ng-deadline-ms": deadline, KEY: deadline}
            assert (await client.post("/wait", json={"word": "x"}, headers=once)).status_code == 504
            if shop.call_counts["x"]:
                break
        await until(lambda: shop.stopped)


@asynccontextmanager
async def counting_client(repeats: IdempotentCalls) -> AsyncIterator[tuple[httpx.AsyncClient, list[int]]]:
    """A client of a service whose /count does nothing twice, and how often it was done."""
    times: list[int] = []

    async def count(request: Request) -> Response:
        times.append(1)
        return JsonResponse(len(times))

    app = service_app("gym_server", options=ServiceOptions)
    add_route(app, "POST", "/count", repeats.once(count))
    async with (
        local_services(one=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["one"][0], timeout=PATIENCE_S) as client,
    ):
        yield client, times


async def test_an_answer_that_there_is_not_a_room_for_is_reported_as_lost_and_the_call_is_not_made_again() -> None:
    async with counting_client(IdempotentCalls(max_bytes=6500)) as (client, times):
        for key in "abc":
            assert (await client.post("/count", headers={KEY: key})).is_success
        lost = await client.post("/count", headers={KEY: "a"})
        assert (lost.status_code, lost.json()["retryable"]) == (409, True)
        assert "not executed again" in lost.json()["detail"]
        assert (await client.post("/count", headers={KEY: "c"})).json() == 3
        assert len(times) == 3


async def test_after_its_time_an_answer_is_forgotten() -> None:
    async with counting_client(IdempotentCalls(kept_s=0.0)) as (client, _):
        answers = [(await client.post("/count", headers={KEY: "a"})).json() for _ in range(20)]
    assert answers == list(range(1, 21))


async def test_a_lost_answer_of_a_tool_is_fetched_and_the_rollout_continues() -> None:
    """The first connections break after the server has answered and before the client has read it."""
    shop = Shop()
    async with local_services(gym=shop.app()) as peers, asyncio.timeout(PATIENCE_S):
        host, port = peers.urls["gym"][0].removeprefix("http://").split(":")
        lost: list[bytes] = []

        async def losing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await reader.read(1 << 16)
            to_server = await asyncio.open_connection(host, int(port))
            to_server[1].write(request)
            answer = await to_server[0].read(1 << 16)
            to_server[1].close()
            if len(lost) < 2:
                lost.append(answer)
                writer.transport.abort()
                return
            writer.write(answer)
            writer.close()

        network = await asyncio.start_server(losing, "127.0.0.1", 0)
        client = Peers(peers.urls)
        session = client["gym"].session()
        try:
            await session.post("/seed_session", ROW)
            client.urls["gym"] = [f"http://127.0.0.1:{network.sockets[0].getsockname()[1]}"]
            assert await session.post("/say", {"word": "x"}) == "x 1"
        finally:
            await client.close()
            network.close()
    assert len(lost) == 2 and all(answer.startswith(b"HTTP/1.1 200") for answer in lost)
    assert shop.call_counts["x"] == 1


@pytest.mark.parametrize("error", [ServiceError("not that word"), RuntimeError("a bug")], ids=["refusal", "bug"])
@pytest.mark.parametrize("waits", [False, True], ids=["gone", "waiting"])
async def test_the_error_of_a_call_is_logged_by_itself_if_no_caller_waits_for_it(
    error: Exception, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    proceed, repeats = asyncio.Event(), IdempotentCalls()

    async def fail(request: Request) -> Response:
        await proceed.wait()
        raise error

    app = service_app("gym_server", options=ServiceOptions)
    add_route(app, "POST", "/fail", repeats.once(fail))
    async with (
        local_services(one=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["one"][0], timeout=PATIENCE_S) as client,
        asyncio.TaskGroup() as calls,
    ):
        gone, waiting = (calls.create_task(client.post("/fail", headers={KEY: "a"})) for _ in range(2))
        await until_metric(client, "ngym_requests_in_flight 3.0")
        gone.cancel()
        await until_metric(client, 'status="499"} 1.0')
        if not waits:
            waiting.cancel()
            await until_metric(client, 'status="499"} 2.0')
        proceed.set()
        if waits:
            assert (await waiting).status_code == 500
        else:
            await until(lambda: str(error) in caplog.text)
    assert ("no caller waits" in caplog.text) is not waits
    assert not repeats._callers


async def until_metric(client: httpx.AsyncClient, line: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.02)
