"""The rate at which rollouts begin: turns in the agent, and the window of the collector."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from fastapi import Request
from local_services import local_services
from paths import ROOT

from ngym import VerifyRequest, gym_server
from ngym.collect import CollectionLimits, CollectionPlan, collect
from ngym.collect.rollout_scheduler import MIN_WINDOW, TARGET_QUEUE, Window
from ngym.convert import message_item, new_response, output_text
from ngym.errors import ServiceError
from ngym.services.agents.server import STARTS_PER_TURN, AdmissionQueue
from ngym.services.base.app import JsonResponse, add_route, load, service_app
from ngym.services.base.options import ServiceOptions
from ngym.services.base.request_bodies import json_body

SIMPLE_AGENT = ROOT / "agents" / "simple" / "app.py"
ROW = {"responses_create_params": {"input": "say something"}}
DEADLINE_S = 60.0


async def verify(task: VerifyRequest) -> float:
    return float(bool(task.text))


async def test_a_few_rollouts_begin_in_each_turn_of_the_loop_in_the_order_in_which_they_came():
    turns, started = AdmissionQueue(), []

    async def rollout(number: int) -> None:
        await turns.wait()
        started.append(number)

    count = 5 * STARTS_PER_TURN
    tasks = [asyncio.create_task(rollout(number)) for number in range(count)]
    counts = [0]
    async with asyncio.timeout(DEADLINE_S):
        while len(started) < count:
            await asyncio.sleep(0)
            counts.append(len(started))
    assert started == list(range(count))
    assert all(after - before <= STARTS_PER_TURN for before, after in pairwise(counts))
    assert turns.waiting == 0
    await asyncio.gather(*tasks)


async def test_a_rollout_that_is_cancelled_while_it_waits_costs_no_one_a_turn():
    turns = AdmissionQueue()
    tasks = [asyncio.create_task(turns.wait()) for _ in range(3 * STARTS_PER_TURN)]
    await asyncio.sleep(0)
    for task in tasks[: 2 * STARTS_PER_TURN]:
        task.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*tasks[2 * STARTS_PER_TURN :])
    assert turns.waiting == 0


async def test_a_rollout_whose_time_is_over_before_its_turn_calls_no_one():
    seeded = []

    async def seed(request: Request) -> JsonResponse:
        seeded.append(await json_body(request))
        return JsonResponse({})

    gym = service_app("gym_server", options=ServiceOptions)
    add_route(gym, "POST", "/seed_session", seed)
    model = service_app("model", options=ServiceOptions)
    options = {"agent": {"gym": "gym", "model": "model"}}
    async with local_services(options, gym=gym, model=model, agent=load(SIMPLE_AGENT).app) as peers:
        with pytest.raises(ServiceError, match="/run was not begun: the caller's deadline passed") as caught:
            await peers["agent"].request("POST", "/run", ROW, headers={"x-ng-deadline-ms": "0"})
    assert (caught.value.status, caught.value.failure) == (504, "timeout")
    assert seeded == []


async def test_an_agent_without_a_queue_gets_all_that_the_concurrency_allows():
    window = Window(10 * MIN_WINDOW)
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(10 * MIN_WINDOW):
            await window.enter()  # and no one ever comes back
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await window.enter()
    assert window.in_flight == 10 * MIN_WINDOW


async def test_an_agent_that_has_many_waiting_gets_fewer_but_never_less_than_a_few():
    window = Window(100 * MIN_WINDOW)
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(2 * MIN_WINDOW):
            await window.enter()
        for _ in range(MIN_WINDOW // 2):
            window.leave()
            window.record_queue(100 * TARGET_QUEUE)
        assert window.size <= 2 * MIN_WINDOW - MIN_WINDOW // 2
        for _ in range(MIN_WINDOW):
            window.leave()
            window.record_queue(100 * TARGET_QUEUE)
    assert window.size == MIN_WINDOW


async def test_one_that_waits_for_room_continues_when_one_leaves():
    window = Window(1)
    await window.enter()
    waiting = asyncio.create_task(window.enter())
    await asyncio.sleep(0)
    assert not waiting.done()
    window.leave()
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    assert window.in_flight == 1


async def test_rollouts_that_wait_for_one_another_are_all_in_flight_together():
    """The model answers no one before all have asked: a bound anywhere between collector and model would hang."""
    count = 4 * MIN_WINDOW
    barrier = asyncio.Barrier(count)

    async def answer(request: Request) -> JsonResponse:
        params = await json_body(request)
        await barrier.wait()
        output = [message_item([output_text("all here")], "msg_0")]
        return JsonResponse(new_response(params, output, response_id="resp_0", model="m", usage=None))

    model = service_app("model", options=ServiceOptions)
    add_route(model, "POST", "/v1/responses", answer)
    options = {"agent": {"gym": "gym", "model": "model"}}
    limits = CollectionLimits(concurrency=count, max_attempts=1)
    async with (
        local_services(
            options, crowd=True, gym=gym_server(verify=verify), model=model, agent=load(SIMPLE_AGENT).app
        ) as peers,
        asyncio.timeout(DEADLINE_S),
    ):
        rows = [o.row async for o in collect([ROW] * count, peers=peers, recipe=CollectionPlan("agent"), limits=limits)]
    assert [row["reward"] for row in rows] == [1.0] * count
