"""Several replicas of a service: load balancing, failover, and replicas that are avoided for a while."""

import asyncio
from collections import Counter

import pytest
from aiohttp import web
from stub_agents import problem, serving
from waiting import reserved_port

from ngym.errors import PeerTimeout, ServiceError, Unreachable
from ngym.net import load_balancer
from ngym.net.load_balancer import Replicas, SessionReplica, StickyReplica
from ngym.peers import Peers
from ngym.schema import Json

URLS = [f"http://replica-{number}" for number in range(4)]


def test_conversations_that_begin_alike_go_to_one_replica_until_it_has_more_than_its_share():
    replicas = Replicas()
    first = replicas.replica_of(StickyReplica("same"), URLS)
    assert {replicas.replica_of(StickyReplica("same"), URLS) for _ in range(20)} == {first}
    calls: Counter[str] = Counter()
    for _ in range(400):
        url = replicas.replica_of(StickyReplica("same"), URLS)
        replicas.in_flight[url] += 1
        calls[url] += 1
    assert calls[first] == max(calls.values()) <= 1.25 * 100 + 1
    assert len(calls) == 4


def test_a_conversation_stays_where_it_is_however_busy_that_is():
    replicas, conversation = Replicas(), StickyReplica("same")
    home = replicas.replica_of(conversation, URLS)
    replicas.in_flight[home] = 1000
    assert replicas.replica_of(conversation, URLS) == home
    assert replicas.replica_of(StickyReplica("same"), URLS) != home


def test_a_replica_that_failed_is_left_alone_and_its_conversations_move():
    replicas, conversation = Replicas(), StickyReplica("same")
    home = replicas.replica_of(conversation, URLS)
    replicas.record_failure(home)
    away = replicas.replica_of(conversation, URLS)
    assert away != home
    assert home not in {replicas.random_replica(URLS) for _ in range(100)}
    replicas.record_answer(home)
    assert replicas.replica_of(conversation, URLS) == away
    for url in URLS:
        replicas.record_failure(url)
    assert replicas.random_replica(URLS) in URLS  # someone has to be asked


def test_a_session_begins_at_a_replica_that_is_up_and_every_client_finds_it_there():
    replicas = Replicas()
    for _ in range(6):
        replicas.record_failure(URLS[0])
    drawn = [replicas.session_id(URLS) for _ in range(100)]
    assert {SessionReplica(each).replica(URLS) for each in drawn} == set(URLS[1:])
    for url in URLS[1:]:
        replicas.record_failure(url)
    assert replicas.session_id(URLS)  # someone has to be asked


def test_a_replica_that_failed_gets_one_call_after_its_pause_until_it_has_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_balancer, "REST_S", 0)
    monkeypatch.setattr(load_balancer, "TRIAL_S", 1000)
    replicas = Replicas()
    for choose in (
        lambda: replicas.random_replica(URLS),
        lambda: replicas.replica_of(StickyReplica("same"), URLS),
        lambda: SessionReplica(replicas.session_id(URLS)).replica(URLS),
    ):
        failed = replicas.replica_of(StickyReplica("same"), URLS)
        replicas.record_failure(failed)
        assert Counter(choose() for _ in range(200))[failed] == 1
        replicas.record_answer(failed)
        assert not replicas.has_alternative(failed, URLS)


async def test_another_replica_answers_for_one_that_is_down_or_cannot_serve():
    refusals = 0

    def refuse(body: Json) -> web.Response:
        nonlocal refusals
        refusals += 1
        return problem(503)

    async with serving(refuse) as broken, serving(lambda body: {"ok": True}) as good:
        with reserved_port() as port:
            peers = Peers({"policy": [broken, good, f"http://127.0.0.1:{port}"]})
            try:
                for number in range(40):
                    assert await peers["policy"].conversation(str(number)).post("/run", {}) == {"ok": True}
                answers = await asyncio.gather(*(peers["policy"].post("/run", {}) for _ in range(40)))
            finally:
                await peers.close()
    assert answers == [{"ok": True}] * 40
    assert 0 < refusals < 40  # it is asked again only now and then


async def test_a_pause_longer_than_the_deadline_is_reported_at_once_unless_another_replica_serves():
    refusals = 0

    def refuse(body: Json) -> web.Response:
        nonlocal refusals
        refusals += 1
        return web.Response(status=503, headers={"retry-after": "3600"}, text="not now")

    async with serving(refuse) as broken, serving(lambda body: {"ok": True}) as good:
        peers = Peers({"policy": [broken, good], "alone": [broken]})
        try:
            for number in range(20):
                assert await peers["policy"].conversation(str(number)).post("/run", {}, timeout=60) == {"ok": True}
            assert refusals > 0
            refusals = 0
            with pytest.raises(ServiceError, match="not now"):
                await peers["alone"].post("/run", {}, timeout=60)
        finally:
            await peers.close()
    assert refusals == 1


async def test_a_deadline_that_ends_a_retry_names_the_answer_before_it():
    answers = iter([web.Response(status=504, text="the endpoint answers nothing")])

    async def slow(body: Json) -> web.Response:
        if (answer := next(answers, None)) is None:
            await asyncio.sleep(60)
        return answer

    async with serving(slow) as url:
        peers = Peers({"policy": [url]})
        try:
            with pytest.raises(PeerTimeout, match=r"before, it answered: .*the endpoint answers nothing"):
                await peers["policy"].post("/run", {}, timeout=4, idempotent=True)
        finally:
            await peers.close()


async def test_the_time_of_a_large_body_on_a_slow_line_is_not_that_of_the_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ngym.peers.SLOW_BYTES_PER_S", 1)

    async def slow(body: Json) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response({"ok": True})

    async with serving(slow) as url:
        peers = Peers({"gym": [url]})
        try:
            assert await peers["gym"].post("/run", {"text": "x" * 100}, timeout=0.1) == {"ok": True}
        finally:
            await peers.close()


async def test_a_request_that_did_not_come_whole_in_time_is_sent_again():
    answers = iter([problem(408, retryable=True), problem(408, retryable=True)])

    async with serving(lambda body: next(answers, {"ok": True})) as url:
        peers = Peers({"agent": [url]})
        try:
            assert await peers["agent"].post("/run", {}) == {"ok": True}
        finally:
            await peers.close()


async def test_where_no_replica_can_be_reached_the_error_says_so():
    with reserved_port() as one, reserved_port() as other:
        peers = Peers({"policy": [f"http://127.0.0.1:{one}", f"http://127.0.0.1:{other}"]})
        try:
            with pytest.raises(Unreachable, match="policy cannot be reached"):
                await peers["policy"].conversation("x").post("/x", {})
        finally:
            await peers.close()
