"""Captured calls of external agents whose model has replicas that are down, silent, delisted or started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web
from local_services import local_services
from paths import ROOT
from stub_agents import scored_row, text_item
from waiting import PATIENCE_S, reserved_port, until

from ngym.collect import CollectionLimits, CollectionPlan, FailedAttempt, Outcome, Rollout, collect, replica_outages
from ngym.collect import rollout_rows as rows
from ngym.errors import Unreachable
from ngym.peers import Peers
from ngym.services.base.app import load

ANSWER = {"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [-0.1], "policy_version": [[1, 2, 0]]}
CAPTURED = {"segments": [ANSWER], "spans": [[0.1, 0.1]], "finish_reasons": ["stop"]}
ONE_TURN, TWO_TURNS = [text_item("4")], [text_item("4"), {"type": "function_call_output"}, text_item("5")]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times for the segments and for a probe stay long enough for a busy machine: only a silent server uses them up."""
    monkeypatch.setattr(rows, "TIMEOUT_S", 5.0)
    monkeypatch.setattr(replica_outages, "PROBE_S", 0.02)


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """The URL of a server that accepts connections and answers nothing."""
    server = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@asynccontextmanager
async def model_server(port: int, *rollouts: str, **says: float | str | None) -> AsyncIterator[str]:
    """The URL of a model server that has one captured call of each of these rollouts. says: more that it answers."""

    async def answer(request: web.Request) -> web.Response:
        has = request.path.split("/")[2] in rollouts
        return web.json_response(CAPTURED | says) if has else web.json_response(says, status=404)

    app = web.Application()
    app.router.add_get("/rollouts/{rollout}/segments", answer)
    app.router.add_delete("/rollouts/{rollout}/segments", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def client(*urls: str) -> AsyncIterator[rows.CaptureClient]:
    async with Peers({"policy": list(urls)}) as peers:
        captures = rows.CaptureClient(peers, ["policy"])
        await captures.begin()
        yield captures
        await captures.close()


async def segments(captures: rows.CaptureClient, rollout: str, output: list[Any], began: float) -> list[Any]:
    """The captured segments of a rollout."""
    answer: dict[str, Any] = {"response": {"output": output}}
    await captures.complete("agent", rollout, answer, began)
    return list(answer.get("ng", {}).get("segments", []))


async def collected(*dead: str, more: Sequence[dict[str, Any]] = (), starts_again: bool = False) -> list[Outcome]:
    """Two rollouts, one after the other, of an agent that answers with `more` items, too.

    dead: the URLs of further replicas. starts_again: the model server does, after the first call of the agent.
    """
    policy, calls = load(ROOT / "models" / "scripted" / "app.py").app, []
    async with local_services({"policy": {"tokens": True}}, policy=policy) as peers:
        live = peers.urls["policy"][0]

        async def run(request: web.Request) -> web.Response:
            base_url = f"{live}/rollouts/{request.headers['x-ng-rollout-id']}/v1"
            async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as model:
                items = (await model.post("/responses", json={"input": "one two"})).json()["output"]
            calls.append(base_url)
            if starts_again and len(calls) == 1:
                policy.state.captures.begin(1000)  # what its lifespan begins with
            output = [text_item(items[0]["content"][0]["text"]), *more]
            return web.json_response(scored_row(await request.json(), 0.5, *output))

        app = web.Application()
        app.add_routes([web.post("/run", run)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        peers.urls |= {"agent": [f"http://127.0.0.1:{runner.addresses[0][1]}"], "policy": [live, *dead]}
        try:
            limits = CollectionLimits(concurrency=1, max_attempts=2, retry_s=(0.01,))
            plan = CollectionPlan("agent", repeats=2)
            row = {"responses_create_params": {"input": "x"}}
            return [
                outcome async for outcome in collect([row], peers=peers, recipe=plan, limits=limits, models=["policy"])
            ]
        finally:
            await runner.cleanup()


async def test_a_dead_replica_fails_only_the_rollout_that_may_have_used_it() -> None:
    with reserved_port() as port:
        found = await collected(f"http://127.0.0.1:{port}", more=TWO_TURNS[1:])
    assert [type(outcome) for outcome in found] == [FailedAttempt, Rollout, Rollout]
    assert [len(outcome.row["ng"]["segments"]) for outcome in found[1:]] == [1, 1]


async def test_with_a_silent_replica_a_rollout_is_complete_if_each_of_its_turns_is_captured() -> None:
    async with silent_server() as url:
        found = await collected(url)
    assert [type(outcome) for outcome in found] == [FailedAttempt, Rollout, Rollout]


async def test_with_a_silent_replica_a_rollout_with_a_turn_that_is_not_captured_fails() -> None:
    async with silent_server() as url:
        found = await collected(url, more=TWO_TURNS[1:])
    assert {type(outcome) for outcome in found} == {FailedAttempt}
    failure = found[-1].row["failure"]
    assert failure["class"] == "connect" and failure["service"] == "policy"
    assert f"policy was down at {url}" in failure["message"]
    assert "1 calls are captured, and the trajectory has 2 model turns" in failure["message"]


async def test_calls_at_a_replica_that_has_been_delisted_meanwhile_are_found() -> None:
    async with model_server(0) as listed, model_server(0, "r") as delisted, client(listed, delisted) as captures:
        began = time.perf_counter()
        captures._peers.urls["policy"] = [listed]
        assert await segments(captures, "r", ONE_TURN, began) == [ANSWER]


async def test_a_replica_that_has_left_is_not_asked_about_later_rollouts() -> None:
    with reserved_port() as port:
        async with model_server(0, "r") as listed, client(listed, f"http://127.0.0.1:{port}") as captures:
            began = time.perf_counter()
            captures._peers.urls["policy"] = [listed]
            with pytest.raises(Unreachable):
                await segments(captures, "r", ONE_TURN, began)
            assert await segments(captures, "r", TWO_TURNS, time.perf_counter()) == [ANSWER]


async def test_a_rollout_whose_calls_ended_with_a_process_is_not_complete() -> None:
    with reserved_port() as port:
        async with model_server(0, "r", "whole") as other, client(other, f"http://127.0.0.1:{port}") as captures:
            began = time.perf_counter()
            with pytest.raises(Unreachable):
                await segments(captures, "r", ONE_TURN, began)
            async with model_server(port, "later"):
                await until(lambda: not captures._outages.was_down(f"http://127.0.0.1:{port}", time.perf_counter()))
                with pytest.raises(Unreachable, match="the trajectory has 2 model turns"):
                    await segments(captures, "r", TWO_TURNS, began)
                assert await segments(captures, "whole", ONE_TURN, began) == [ANSWER]
                assert await segments(captures, "later", TWO_TURNS, time.perf_counter()) == [ANSWER]


async def test_a_rollout_runs_again_if_its_server_started_again_between_two_contacts() -> None:
    found = await collected(starts_again=True)
    assert [type(outcome) for outcome in found] == [FailedAttempt, Rollout, Rollout]
    assert [len(outcome.row["ng"]["segments"]) for outcome in found[1:]] == [1, 1]
    failure = found[0].row["failure"]
    assert failure["class"] == "connect" and failure["retryable"] and failure["service"] == "policy"
    assert "started again" in failure["message"]
    assert "0 calls are captured, and the trajectory has 1 model turns" in failure["message"]


async def test_what_a_server_that_started_again_may_have_lost_is_compared_with_the_turns() -> None:
    """Neither server was contacted before."""
    old, young = model_server(0, "r", kept_s=1e6), model_server(0, "late", kept_s=0)
    async with old as other, young as new, client(other, new) as captures:
        began = time.perf_counter()
        assert await segments(captures, "r", ONE_TURN, began) == [ANSWER]
        for rollout in ("r", "late"):
            with pytest.raises(Unreachable, match=f"policy at {new} started again"):
                await segments(captures, rollout, TWO_TURNS, began)
        assert await segments(captures, "late", ONE_TURN, began) == [ANSWER]


async def test_a_server_that_has_lost_no_call_since_a_rollout_began_is_believed() -> None:
    async with model_server(0, "r", kept_s=50) as url, client(url) as captures:
        assert await segments(captures, "r", TWO_TURNS, time.perf_counter()) == [ANSWER]
        assert await segments(captures, "none", TWO_TURNS, time.perf_counter()) == []
        with pytest.raises(Unreachable):
            await segments(captures, "none", TWO_TURNS, time.perf_counter() - 100)


async def test_an_answer_that_takes_long_makes_no_doubt_about_a_server_that_has_lost_nothing_since_an_earlier_one() -> (
    None
):
    """Of each answer, the way here takes as long as the server has run."""
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        async with client(url) as captures:
            async with model_server(port, "r", kept_s=0, kept_id="a"):
                with pytest.raises(Unreachable, match="started again"):
                    await segments(captures, "r", TWO_TURNS, time.perf_counter())
                assert await segments(captures, "r", TWO_TURNS, time.perf_counter()) == [ANSWER]
            async with model_server(port, "r", kept_s=0, kept_id="b"):
                with pytest.raises(Unreachable, match="started again"):
                    await segments(captures, "r", TWO_TURNS, time.perf_counter())


@pytest.mark.parametrize("says", [{"kept_s": None}, {}], ids=["a new replica", "another make"])
async def test_a_server_that_does_not_say_when_it_has_lost_calls_is_believed(says: dict[str, None]) -> None:
    async with model_server(0, "r", **says) as url, client(url) as captures:
        assert await segments(captures, "r", TWO_TURNS, 0.0) == [ANSWER]
        assert await segments(captures, "none", TWO_TURNS, 0.0) == []


async def test_a_dead_replica_that_starts_between_two_probes_has_the_calls_of_a_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_outages, "PROBE_S", 10 * PATIENCE_S)
    with reserved_port() as port:
        async with model_server(0, "r", kept_s=1e6) as other, client(other, f"http://127.0.0.1:{port}") as captures:
            with pytest.raises(Unreachable):
                await segments(captures, "r", ONE_TURN, time.perf_counter())
            began = time.perf_counter()
            assert await segments(captures, "r", TWO_TURNS, began) == [ANSWER]  # refused again
            async with model_server(port, "r", kept_s=0):
                assert await segments(captures, "r", TWO_TURNS, began) == [ANSWER, ANSWER]
