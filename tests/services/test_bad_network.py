"""A faulty network between services: every rollout ends with a typed result, and no tool is called twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, get_args

import pytest
from bad_network import BREAKING, KINDS, Kind, proxy
from fastapi import FastAPI
from local_services import local_services
from paths import ROOT
from pydantic import BaseModel

from ngym import ModelCall, Session, VerifyRequest, gym_server, model_server
from ngym.collect import CollectionLimits, CollectionPlan, FailedAttempt, Rollout, collect
from ngym.convert import message_item, new_response, output_text
from ngym.errors import FailureClass
from ngym.services.base.app import load

SIMPLE_AGENT = ROOT / "agents" / "simple" / "app.py"
STEPS = 3  # tool calls of a rollout
DEADLINE_S = 600.0
LINKS = (("collector", "agent"), ("agent", "model"), ("agent", "gym"))


class Add(BaseModel):
    amount: int


def counting(effects: Counter[str]) -> FastAPI:
    """A gym server that notes what its tool did, by session."""

    async def add(body: Add, session: Session) -> dict[str, int]:
        """Add."""
        effects[session.id] += body.amount
        session["total"] = session.get("total", 0) + body.amount
        return {"total": session["total"]}

    async def verify(task: VerifyRequest, session: Session) -> float:
        return float(session["total"] == STEPS)

    return gym_server(verify=verify, tools=[add])


async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    """Calls the tool until it has been called often enough."""
    done = sum(item.get("type") == "function_call_output" for item in request["input"])
    item: dict[str, Any] = message_item([output_text("done")], "msg_1")
    if done < STEPS:
        item = {"type": "function_call", "id": f"fc_{done}", "call_id": f"call_{done}", "name": "add"}
        item |= {"arguments": '{"amount": 1}', "status": "completed"}
    return new_response(request, [item], response_id="resp_1", model="policy")


async def rollouts_over(
    link: tuple[str, str], kind: Kind, count: int, limits: CollectionLimits, **how: float
) -> tuple[list[Rollout], list[FailedAttempt], Counter[str], int]:
    """The results of `count` rollouts with this kind of network on this link, the tool's calls, and the faults of the
    network.
    """
    effects: Counter[str] = Counter()
    agent = load(SIMPLE_AGENT).app
    options = {"agent": {"gym": "gym", "model": "model"}}
    apps = {"gym": counting(effects), "model": model_server(respond=respond), "agent": agent}
    done: list[Rollout] = []
    failed: list[FailedAttempt] = []
    async with local_services(options, **apps) as peers, asyncio.timeout(DEADLINE_S):
        caller, called = link
        async with proxy(peers.urls[called][0], kind, **how) as between:
            asking = peers if caller == "collector" else agent.state.context.peers
            asking.urls[called] = [between.url]
            tasks = ({"responses_create_params": {"input": f"count {number}"}} for number in range(count))
            async for outcome in collect(tasks, peers=peers, recipe=CollectionPlan(agent="agent"), limits=limits):
                if isinstance(outcome, Rollout):
                    done.append(outcome)
                else:
                    failed.append(outcome)
            assert between.connections > 0
            return done, failed, effects, between.broken


def check(count: int, done: list[Rollout], failed: list[FailedAttempt], effects: Counter[str]) -> None:
    given_up = [one for one in failed if one.final]
    assert len(done) + len(given_up) == count
    assert {(one.key.task_index, one.key.rollout_index) for one in [*done, *given_up]} == {(i, 0) for i in range(count)}
    assert all(one.row["reward"] == 1.0 for one in done)
    assert all(one.failure["class"] in get_args(FailureClass) and one.failure["message"] for one in failed)
    assert {one.failure["class"] for one in failed} <= {"connect", "timeout", "model_error", "tool_error"}
    assert max(effects.values()) <= STEPS, "a tool was called twice"
    assert len(effects) <= len(done) + len(failed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", LINKS, ids="-".join)
async def test_whatever_the_network_does_rollouts_end_typed_and_tools_are_called_once(
    link: tuple[str, str], kind: Kind
) -> None:
    count = 6
    patience_s = 2 if kind == "black hole" else 120  # only there does every attempt that meets it last so long
    limits = CollectionLimits(concurrency=6, timeout_s=patience_s, max_attempts=8, retry_s=(0.01,), poll_s=0.05)
    done, failed, effects, _ = await rollouts_over(link, kind, count, limits, latency_s=0.01, share=0.4)
    check(count, done, failed, effects)
    if kind not in BREAKING:
        assert len(done) == count
        assert not failed


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", LINKS, ids="-".join)
async def test_a_hundred_rollouts_over_each_link_and_each_kind_of_network(link: tuple[str, str], kind: Kind) -> None:
    count = 100
    patience_s = 20 if kind == "black hole" else 300
    limits = CollectionLimits(concurrency=16, timeout_s=patience_s, max_attempts=5, retry_s=(0.1, 1.0), poll_s=0.2)
    done, failed, effects, broken = await rollouts_over(
        link, kind, count, limits, latency_s=1.0, bytes_per_s=10_000, share=0.3
    )
    check(count, done, failed, effects)
    assert kind not in BREAKING or broken > 0
    assert kind in BREAKING or not failed
