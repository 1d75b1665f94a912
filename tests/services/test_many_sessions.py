"""Many sessions at a time: states are separate, ids cannot be guessed, and ended sessions leave nothing."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from local_services import local_services
from paths import ROOT
from shipped_gym import module
from waiting import until

from ngym import VerifyRequest, gym_server
from ngym.config.service_config import load_config
from ngym.errors import Overloaded, ServiceError
from ngym.peers import Peer, Peers
from ngym.services.base.app import load
from ngym.services.gym.sessions import SessionStore
from ngym.supervise.supervisor import Supervisor

SIMPLE_AGENT = ROOT / "agents" / "simple" / "app.py"
STEPS = 10
SPARE_FILES = 5
GROWTH = 1.10
PATIENCE_S = 600.0
CONFIG = {"counter": {"kind": "gym_server", "app": "gym_servers/counter", "replicas": 2}, "ngym": {"head": {"port": 0}}}


def row(target: int) -> dict[str, object]:
    return {"responses_create_params": {"input": "count"}, "target": target, "nonce": secrets.token_hex(8)}


async def one_session(peer: Peer, number: int, all_begun: asyncio.Barrier) -> None:
    """Counts in steps of its own; what it sees must be its own sum, and the row that comes back its own row."""
    session, body = peer.session(), row(STEPS * (number + 1))
    await session.post("/seed_session", body, idempotent=True)
    await all_begun.wait()
    for step in range(1, STEPS + 1):
        assert await session.post("/add", {"amount": number + 1}) == {"total": step * (number + 1)}
    scored = await session.post("/verify", {**body, "response": {"output": []}})
    assert (scored["reward"], scored["nonce"]) == (1.0, body["nonce"])


async def many(urls: dict[str, list[str]], sessions: int) -> None:
    peers, all_begun = Peers(urls), asyncio.Barrier(sessions)
    try:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(one_session(peers["counter"], number, all_begun))
    finally:
        await peers.close()


@pytest.mark.parametrize("sessions", [100, pytest.param(1000, marks=pytest.mark.soak)])
async def test_sessions_over_two_replicas_do_not_touch_one_another_and_leave_nothing(
    tmp_path: Path, sessions: int
) -> None:
    file = tmp_path / "global_config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    async with Supervisor(load_config([file])) as stack:
        replicas = [psutil.Process(state.pid) for state in stack.states if state.pid]
        assert len(replicas) == 2
        before = [replica.num_fds() for replica in replicas]
        for _ in range(4):  # the first fill what is bounded
            await many(stack.urls, sessions)
        size = [replica.memory_info().rss for replica in replicas]
        for _ in range(2):
            await many(stack.urls, sessions)
        for replica, files, bytes_before in zip(replicas, before, size, strict=True):
            await until(lambda replica=replica, files=files: replica.num_fds() <= files + SPARE_FILES)
            if sessions >= 1000:  # of few, a page more is a tenth
                assert replica.memory_info().rss < GROWTH * bytes_before
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            metrics = [(await client.get(f"{url}/metrics")).text for url in stack.urls["counter"]]
    answers = [line for text in metrics for line in text.splitlines() if line.startswith("ngym_requests_total")]
    assert not [line for line in answers if 'status="5' in line or 'status="4' in line]
    adds = [float(line.split()[-1]) for line in answers if 'route="/add"' in line]
    assert len(adds) == 2 and sum(adds) == 6 * sessions * STEPS, "both replicas, and nothing was asked twice"


async def test_a_session_is_found_only_by_its_id_and_never_after_its_end() -> None:
    async with local_services(counter=module("counter").app) as peers:
        url = peers.urls["counter"][0]
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            seeded = await client.post("/seed_session", json=row(3))
            session_id = seeded.headers["x-ng-session"]
            assert len(session_id) == 32 and int(session_id, 16)
            assert "HttpOnly" in seeded.headers["set-cookie"] and "SameSite=strict" in seeded.headers["set-cookie"]
            assert (await client.post("/add", json={"amount": 3})).json() == {"total": 3}, "by its cookie"
            client.cookies.clear()
            near = f"{int(session_id, 16) ^ 1:032x}"
            guesses = [
                near,
                session_id[:-1],
                session_id.upper() + "0",
                "0" * 32,
                "../" + session_id,
                "*" * 32,
                "' OR 1=1 --",
            ]
            guesses += [secrets.token_hex(16) for _ in range(50)]
            for guess in guesses:
                for named in ({"x-ng-session": guess}, {"cookie": f"ng_session={guess}"}):
                    for path, body in (("/add", {"amount": 1}), ("/verify", {**row(0), "response": {}})):
                        reply = await client.post(path, json=body, headers=named)
                        assert reply.status_code in (400, 404), (guess, path, reply.text)
                        assert "total" not in reply.text and "reward" not in reply.text
                    assert (await client.delete("/session", headers=named)).json() == {"ended": False}
            by_id = {"x-ng-session": session_id}
            verified = await client.post("/verify", json={**row(3), "response": {}}, headers=by_id)
            assert verified.json()["reward"] == 1.0, "nobody touched it"
            for path, body in (("/add", {"amount": 1}), ("/verify", {**row(3), "response": {}})):
                replayed = await client.post(path, json=body, headers=by_id)
                assert (replayed.status_code, replayed.json()["retryable"]) == (404, True)


def test_ids_that_no_one_chose_are_all_different_and_long() -> None:
    store = SessionStore(limit=20_000)
    ids = {store.start().id for _ in range(10_000)}
    assert len(ids) == 10_000 and {len(one) for one in ids} == {32}
    guesses = (secrets.token_hex(16) for _ in range(100_000))
    assert not any(guess in store for guess in guesses)


def test_rows_of_live_sessions_are_bounded_together() -> None:
    store = SessionStore(task_bytes=100)
    first, second = store.start(), store.start()
    store.set_task(first, {"n": 1}, 60)
    store.set_task(first, {"n": 2}, 70)
    with pytest.raises(Overloaded, match="end some"):
        store.set_task(second, {}, 40)
    assert second.id not in store and store.get(first.id)["task"] == {"n": 2}
    store.end(first.id)
    alone = store.start()
    store.set_task(alone, {}, 1000)  # a single row is bounded by its body
    store.end(alone.id)
    store.set_task(store.start(), {}, 100)


def test_sessions_that_no_one_uses_end_and_there_are_never_more_than_the_limit() -> None:
    closed: list[str] = []
    store = SessionStore(ttl_s=3600, limit=3)
    for name in "abc":
        session = store.start(name * 16)
        session.when_over(lambda name=name: closed.append(name))
    with pytest.raises(Overloaded, match="3 sessions are alive"):
        store.start("d" * 16)
    assert store.start("a" * 16).id == "a" * 16, "seeded again it is one of the three"
    store.ttl_s = -1.0
    store.start("d" * 16)
    assert closed == ["a", "b", "c"] and len(store) == 1


async def test_an_agent_whose_rollout_failed_ends_its_session() -> None:
    """Else ten thousand failures would close a gym server for an hour."""

    async def verify(task: VerifyRequest) -> float:
        return 1.0

    gym = gym_server(verify=verify)
    agent = load(SIMPLE_AGENT).app
    options = {"agent": {"gym": "gym", "model": "policy"}}
    async with local_services(options, gym=gym, agent=agent) as peers:
        agent.state.context.peers.urls["policy"] = ["http://127.0.0.1:9"]
        for _ in range(3):
            with pytest.raises(ServiceError, match="policy cannot be reached"):
                await peers["agent"].post("/run", row(3))
        await until(lambda: len(gym.state.sessions) == 0)
