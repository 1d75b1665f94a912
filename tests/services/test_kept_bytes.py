"""What is kept takes about as much memory as it has bytes: orjson's buffers are several times as large."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import orjson
import pytest
from house import house
from pydantic import BaseModel

from ngym import Session, VerifyRequest, gym_server
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
    taken = tracemalloc.get_traced_memory()[0] - before
    assert taken < SPARE * KEPT * CHARACTERS
    assert orjson.loads(store.response("resp_7"))["output"] == "a" * CHARACTERS


async def test_answers_that_are_kept_to_be_given_again(traced: None) -> None:
    gym = gym_server(verify=verify, tools=[say])
    async with house(gym=gym) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", {"responses_create_params": {"input": ""}}, idempotent=True)
        await session.post("/say", {"times": CHARACTERS})
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(KEPT):
            await session.post("/say", {"times": CHARACTERS})
        taken = tracemalloc.get_traced_memory()[0] - before
    assert 0.9 * KEPT * CHARACTERS < taken < 2 * SPARE * KEPT * CHARACTERS
