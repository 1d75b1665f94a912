"""Memory that services keep; the bodies of failed requests are freed without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from local_services import local_services
from pydantic import BaseModel
from shipped_gym import ROOT
from waiting import PATIENCE_S, until

from ngym import BadRequest, Session, ToolError, VerifyRequest, gym_server
from ngym.schema import DEADLINE_HEADER
from ngym.services.base.app import load
from ngym.services.models.request_handler import ResponseStore

KEPT = 200
CHARACTERS = 5000
SPARE = 1.5


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


class Say(BaseModel):
    times: int


async def say(body: Say, session: Session) -> dict[str, str]:
    """Say it."""
    return {"said": "a" * body.times}


async def verify(task: VerifyRequest) -> float:
    return 1.0


def test_stored_responses(traced: None) -> None:
    store = ResponseStore()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(KEPT):
        store.keep(f"resp_{number}", b"{}", orjson.dumps({"output": "a" * CHARACTERS}), None)
    allocated = tracemalloc.get_traced_memory()[0] - before
    assert allocated < SPARE * KEPT * CHARACTERS
    assert orjson.loads(store.response("resp_7"))["output"] == "a" * CHARACTERS


async def test_answers_that_are_kept_to_be_given_again(traced: None) -> None:
    gym = gym_server(verify=verify, tools=[say])
    async with local_services(gym=gym) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", {"responses_create_params": {"input": ""}}, idempotent=True)
        await session.post("/say", {"times": CHARACTERS})
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(KEPT):
            await session.post("/say", {"times": CHARACTERS})
        allocated = tracemalloc.get_traced_memory()[0] - before
    assert 0.9 * KEPT * CHARACTERS < allocated < 2 * SPARE * KEPT * CHARACTERS


class Fail(BaseModel):
    how: str


async def fail(body: Fail) -> str:
    """Fail in this way."""
    if body.how == "hangs":
        await asyncio.Event().wait()
    raise ToolError("not possible") if body.how == "refuses" else RuntimeError("the database is gone")


def fail_in_thread(body: Fail) -> str:
    """The same, as a plain function."""
    raise ToolError("not possible") if body.how == "refuses" else RuntimeError("the database is gone")


class FailingTask(VerifyRequest):
    how: str


async def failing_verify(task: FailingTask) -> float:
    if task.how == "scores":
        return 1.0
    raise BadRequest("not for this row") if task.how == "refuses" else RuntimeError("the disk is gone")


def one_call(tool: str, how: str) -> list[dict[str, Any]]:
    call = {"name": tool, "arguments": orjson.dumps({"how": how}).decode()}
    return [{"turn": 1, "tool_calls": [call]}, {"text": "done"}]


def garbage_errors() -> list[BaseException]:
    """The exceptions that only a garbage collection would free, with the requests in the frames of their tracebacks."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [each for each in gc.garbage if isinstance(each, BaseException)]
    gc.garbage.clear()
    return found


@pytest.mark.parametrize(
    ("route", "row", "tool"),
    [
        ("/run", {"how": "refuses"}, None),
        ("/run", {"how": "crashes"}, None),
        ("/run", {}, None),
        ("/run", {"how": "scores"}, "fail: refuses"),
        ("/run", {"how": "scores"}, "fail: crashes"),
        ("/run", {"how": "scores"}, "fail_in_thread: refuses"),
        ("/run", {"how": "scores"}, "fail_in_thread: crashes"),
        ("/run", {"how": "scores", "responses_create_params": {"input": 7}}, None),
        ("/run within 200 ms", {"how": "scores"}, "fail: hangs"),
        ("/verify_group", {"rollouts": []}, None),
        ("/aggregate_metrics", {"verify_responses": 3}, None),
        ("/v1/responses", {"input": 7}, None),
    ],
)
async def test_a_failed_request_leaves_no_error_that_keeps_its_body_alive(
    route: str, row: dict[str, Any], tool: str | None
) -> None:
    apps = {
        "agent": load(ROOT / "agents" / "simple" / "app.py").app,
        "gym": gym_server(verify=failing_verify, tools=[fail, fail_in_thread]),
        "policy": load(ROOT / "models" / "scripted" / "app.py").app,
    }
    replies = [{"text": "done"}] if tool is None else one_call(*tool.split(": "))
    options = {"agent": {"gym": "gym", "model": "policy"}, "policy": {"replies": replies}}
    body = row if route.startswith("/v1") else {"responses_create_params": {"input": "go"}} | row
    path, _, limited = route.partition(" ")
    headers = {DEADLINE_HEADER: "200"} if limited else {}

    async with local_services(options, **apps) as peers, httpx.AsyncClient(base_url=peers.urls["agent"][0]) as client:
        tasks = len(asyncio.all_tasks())
        gc.collect()
        gc.disable()
        try:
            answer = await client.post(path, json=body, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code >= 400 or tool is not None
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
            assert not garbage_errors()
        finally:
            gc.enable()
