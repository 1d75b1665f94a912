"""gym_server(stateless=True): agents send a row to /seed_session once; tools and /verify need no session."""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from fastapi import FastAPI
from local_services import local_services
from pydantic import BaseModel
from shipped_gym import ROOT

from ngym import RolloutContext, Session, VerifyRequest, agent, gym_server
from ngym.errors import ServiceError
from ngym.peers import Peer
from ngym.schema import IDEMPOTENCY_HEADER, SESSION_HEADER
from ngym.services.agents import server as agents
from ngym.services.agents.rollout_context import act
from ngym.services.base.app import SignatureError, load

ROW = {"responses_create_params": {"input": "Say 3."}, "answer": "3"}


class Task(VerifyRequest):
    answer: str


class Amount(BaseModel):
    amount: int


async def verify(task: Task) -> float:
    if task.answer == "bug":
        raise ValueError("a bug")
    return float(task.text == task.answer)


async def with_session(task: Task, session: Session) -> float:
    return float(len(session))


async def add(body: Amount) -> int:
    """Add."""
    if body.amount < 0:
        raise ValueError("a negative amount")
    return body.amount


async def remember(body: Amount, session: Session) -> int:
    """Remember."""
    return session.setdefault("amount", body.amount)


class Counted:
    """An ASGI application that counts the paths of its requests."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.paths: Counter[str] = Counter()
        app.add_middleware(self._around)  # type: ignore[arg-type]

    def _around(self, app: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.paths[scope["path"]] += 1
            await app(scope, receive, send)

        return call


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    acted = await act(request, rollout, output, max_steps=2, execute_tools=True)
    return rollout.finish(acted.response, output, acted.stop_reason)


def others() -> dict[str, FastAPI]:
    return {"agent": agent(respond=respond), "policy": load(ROOT / "models" / "scripted" / "app.py").app}


OPTIONS: dict[str, Any] = {"agent": {"gym": "gym", "model": "policy"}, "policy": {"replies": [{"text": "3"}]}}


@pytest.fixture(autouse=True)
def remembered_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "STATELESS_S", 3600.0)


async def test_a_row_without_parameters_is_refused_in_the_same_way_once_the_server_is_known() -> None:
    async with local_services(OPTIONS, gym=gym_server(verify=verify), **others()) as peers:
        await peers["agent"].post("/run", ROW)
        with pytest.raises(ServiceError, match="'responses_create_params': Field required"):
            await peers["agent"].post("/run", {"answer": "3"})


@pytest.mark.parametrize(
    ("declared", "stateless"),
    [
        ({"stateless": True}, True),
        ({}, True),
        ({"tools": [add]}, True),
        ({"stateless": False}, False),
        ({"tools": [add, remember]}, False),
        ({"verify": with_session}, False),
    ],
)
async def test_only_the_first_rollout_of_a_row_begins_a_session_if_none_is_needed(
    declared: dict[str, Any], stateless: bool
) -> None:
    counted = Counted(gym_server(**{"verify": verify, **declared}))
    async with local_services(OPTIONS, gym=counted.app, **others()) as peers:
        rows = [await peers["agent"].post("/run", {**ROW, "_ng_rollout_index": index}) for index in range(3)]
    assert [row["reward"] for row in rows] == [1.0] * 3
    assert counted.paths["/seed_session"] == (1 if stateless else 3) and counted.paths["/verify"] == 3
    seeded = [any("seed" in span for span in row["ng"]["spans"]) for row in rows]
    assert seeded == [True, not stateless, not stateless]


def attempt(row: dict[str, Any], index: int) -> dict[str, Any]:
    """A rollout of a row as a trainer asks for it: with a seed of its own."""
    metadata = {"extra_body": f'{{"seed":{index}}}'}
    return {**row, "_ng_rollout_index": index, "responses_create_params": {"input": "Say 3.", "metadata": metadata}}


async def test_rollouts_of_a_row_that_begin_together_wait_for_the_first_one() -> None:
    counted = Counted(gym_server(verify=verify, stateless=True))
    async with local_services(OPTIONS, gym=counted.app, **others()) as peers:
        await peers["agent"].post("/run", attempt({"answer": "other"}, 0))
        requests = [peers["agent"].post("/run", attempt(ROW, index)) for index in range(8)]
        rows = await asyncio.gather(*requests)
    assert [row["reward"] for row in rows] == [1.0] * 8
    assert counted.paths["/seed_session"] == 2 and counted.paths["/verify"] == 9


async def test_each_rollout_of_a_row_that_does_not_fit_is_refused() -> None:
    counted = Counted(gym_server(verify=verify, stateless=True))
    async with local_services(OPTIONS, gym=counted.app, **others()) as peers:
        await peers["agent"].post("/run", ROW)
        requests = [peers["agent"].post("/run", attempt({"answer": 3}, index)) for index in range(4)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(one, ServiceError) and one.failure == "config" for one in errors)
    assert counted.paths["/seed_session"] == 5 and counted.paths["/verify"] == 1


async def test_accepted_rows_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "STATELESS_S", 0.0)
    counted = Counted(gym_server(verify=verify, stateless=True))
    async with local_services(OPTIONS, gym=counted.app, **others()) as peers:
        for _ in range(2):
            await peers["agent"].post("/run", ROW)
    assert counted.paths["/seed_session"] == 2


async def test_accepted_rows_are_forgotten_after_a_failure_of_verify() -> None:
    counted, bug = Counted(gym_server(verify=verify, stateless=True)), {**ROW, "answer": "bug"}
    seeded = []
    async with local_services(OPTIONS, gym=counted.app, **others()) as peers:
        for row in (ROW, bug, bug, ROW, ROW):
            with suppress(ServiceError):
                await peers["agent"].post("/run", row)
            seeded.append(counted.paths["/seed_session"])
    assert seeded == [1, 2, 2, 3, 3]


async def test_another_row_that_does_not_fit_is_refused_before_the_model_is_asked() -> None:
    counted = Counted(gym_server(verify=verify, stateless=True))
    async with local_services(OPTIONS, gym=counted.app, **others()) as peers:
        await peers["agent"].post("/run", ROW)
        with pytest.raises(ServiceError, match="answer") as caught:
            await peers["agent"].post("/run", {**ROW, "answer": 3})
        await peers["agent"].post("/run", ROW)
    assert caught.value.failure == "config"  # of /seed_session
    assert counted.paths["/seed_session"] == 2 and counted.paths["/verify"] == 2


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"verify": with_session}, "`verify` takes the Session"),
        ({"verify": verify, "tools": [add, remember]}, "the tool `remember` takes the Session"),
    ],
)
def test_what_needs_a_session_is_not_stateless(declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(SignatureError, match=f"stateless=True.: {reason}; leave stateless out"):
        gym_server(**declared, stateless=True)


def calling(amount: int) -> dict[str, Any]:
    call = {"tool_calls": [{"name": "add", "arguments": {"amount": amount}}]}
    return {**OPTIONS, "policy": {"replies": [{"turn": 2, "text": "3"}, call]}}


async def test_tools_that_take_no_session_are_offered_and_called_without_one() -> None:
    counted = Counted(gym_server(verify=verify, tools=[add], stateless=True))
    async with local_services(calling(3), gym=counted.app, **others()) as peers:
        rows = [await peers["agent"].post("/run", attempt(ROW, index)) for index in range(3)]
    for row in rows:
        outputs = [item["output"] for item in row["response"]["output"] if item["type"] == "function_call_output"]
        assert (row["reward"], outputs, [tool["name"] for tool in row["response"]["tools"]]) == (1.0, ["3"], ["add"])
    assert counted.paths["/seed_session"] == 1 and counted.paths["/add"] == 3 and "/session" not in counted.paths


async def test_a_tool_that_fails_fails_its_rollout_and_the_next_one_begins_a_session() -> None:
    counted = Counted(gym_server(verify=verify, tools=[add], stateless=True))
    async with local_services(calling(-1), gym=counted.app, **others()) as peers:
        for seeded in (1, 1, 2):
            with pytest.raises(ServiceError, match="a negative amount") as failed:
                await peers["agent"].post("/run", ROW)
            assert failed.value.failure == "tool_error" and counted.paths["/seed_session"] == seeded
    assert counted.paths["/verify"] == 0


async def test_a_repeated_call_of_a_tool_without_a_session_runs_once_until_verify() -> None:
    headers = {SESSION_HEADER: "0123456789abcdef", IDEMPOTENCY_HEADER: "1"}

    async def call_add(gym: Peer, amount: int) -> bytes:
        return (await gym.request("POST", "/add", {"amount": amount}, headers=headers)).body

    async with local_services({}, gym=gym_server(verify=verify, tools=[add], stateless=True)) as peers:
        gym = peers["gym"]
        assert [await call_add(gym, 1), await call_add(gym, 2)] == [b"1", b"1"]
        await gym.session(headers[SESSION_HEADER]).post("/verify", {**ROW, "response": {"output": []}})
        assert await call_add(gym, 2) == b"2"
