"""Mutated and random requests to a model server: no answer is a 5xx."""

import random
from typing import Any

import chat_policy
import httpx
import orjson
import pytest
from local_services import local_services
from request_bodies import WHOLE, mutate
from waiting import PATIENCE_S


def garbage(luck: random.Random) -> bytes:
    body = orjson.dumps(luck.choice(list(WHOLE.values())))
    match luck.randrange(4):
        case 0:
            return luck.randbytes(luck.randrange(200))
        case 1:
            return body[: luck.randrange(len(body))]
        case 2:
            at = luck.randrange(len(body))
            return body[:at] + luck.randbytes(3) + body[at:]
        case _:
            return b'{"input":' + b"[" * luck.choice([10, 1000, 100_000])


async def fuzz(app: Any, cases: int, seed: int) -> dict[str, int]:
    """The count of each status; the test fails at the first 5xx and shows its request."""
    luck = random.Random(seed)
    statuses: dict[str, int] = {}
    async with (
        local_services({"policy": {"tokens": True}}, policy=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        for case in range(cases):
            path = luck.choice(list(WHOLE))
            body = garbage(luck) if case % 5 == 0 else orjson.dumps(_jsonable(mutate(WHOLE[path], luck)))
            prefix = luck.choice(["", f"/rollouts/r{luck.randrange(9)}", "/rollouts/%00"])
            answer = await client.post(prefix + path, content=body)
            assert answer.status_code < 500, (prefix + path, body[:3000], answer.text[:1000])
            assert "response.failed" not in answer.text, (path, body[:3000], answer.text[-1000:])
            statuses[str(answer.status_code)] = statuses.get(str(answer.status_code), 0) + 1
    return statuses


def _jsonable(value: Any) -> Any:
    """orjson knows no whole number beyond 64 bits."""
    if isinstance(value, dict):
        return {key: _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_jsonable(inner) for inner in value]
    return float(value) if isinstance(value, int) and abs(value) >= 2**63 else value


@pytest.mark.parametrize("native", ["responses", "chat"])
async def test_no_request_is_a_5xx(native: str):
    app = chat_policy.SCRIPTED.app if native == "responses" else chat_policy.app
    statuses = await fuzz(app, 400, seed=1)
    assert statuses["200"] > 20
    assert statuses["400"] > 20


@pytest.mark.soak
@pytest.mark.parametrize("native", ["responses", "chat"])
async def test_none_of_ten_thousand_requests_is_a_5xx(native: str):
    app = chat_policy.SCRIPTED.app if native == "responses" else chat_policy.app
    assert (await fuzz(app, 10_000, seed=2))["200"] > 500


@pytest.mark.parametrize("path", list(WHOLE))
@pytest.mark.parametrize("native", ["responses", "chat"])
async def test_the_request_that_is_mutated_is_sound(path: str, native: str):
    app = chat_policy.SCRIPTED.app if native == "responses" else chat_policy.app
    async with (
        local_services({"policy": {"tokens": True}}, policy=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        for body in (WHOLE[path], WHOLE[path] | {"stream": False, "stream_options": None}):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
