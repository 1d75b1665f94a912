"""The cost of one request: parsed JSON, reported problems, and the thread that does the work."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import httpx
import pytest
from local_services import local_services
from pydantic import BaseModel, field_validator
from shipped_gym import rollout, says, serving
from waiting import PATIENCE_S

from ngym import ModelCall, ServiceOptions, VerifyRequest, did_you_mean, gym_server, model_server
from ngym.errors import MAX_DETAIL, BadRequest, ServiceError
from ngym.net import json_limits
from ngym.net.json_limits import BYTES_OF_WEIGHT, NODE_WEIGHT
from ngym.schema import Json
from ngym.services.base import request_bodies
from ngym.services.base.request_bodies import CALL_WEIGHT, ROW_WEIGHT, is_light, parse_body

MB = 1_000_000
HOSTILE_TEXTS = ["", "a", ",,,[{:", '"', "\\", '\\"', '\\\\",{', "\U0001f600,", "[" * 50, "x" * 200]


def counted(value: Any) -> int:
    """The weight of a value beside that of its bytes."""
    if isinstance(value, dict):
        return NODE_WEIGHT * (1 + len(value)) + max(0, len(value) - 1) + sum(map(counted, value.values()))
    if isinstance(value, list):
        return NODE_WEIGHT + max(0, len(value) - 1) + sum(map(counted, value))
    return 0


def draw_value(luck: random.Random, depth: int) -> Any:
    kind = luck.randrange(5 if depth else 3)
    if kind == 3:
        return [draw_value(luck, depth - 1) for _ in range(luck.randrange(6))]
    if kind == 4:
        return {
            luck.choice(HOSTILE_TEXTS) + str(number): draw_value(luck, depth - 1) for number in range(luck.randrange(6))
        }
    return luck.choice([1.5, True, None] if kind == 0 else HOSTILE_TEXTS)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words for which the nearest of others was looked for."""
    words: list[str] = []
    real = did_you_mean.difflib.get_close_matches

    def counted(word: str, *args: Any, **options: Any) -> list[str]:
        words.append(word)
        return real(word, *args, **options)

    monkeypatch.setattr(did_you_mean.difflib, "get_close_matches", counted)
    return words


async def echo(request: Json, call: ModelCall) -> Json:
    return {"id": "resp_1", "output": [says("4")], "status": "completed", "model": "m"}


async def post_body(peers: Any, path: str, body: bytes) -> httpx.Response:
    (url,) = next(iter(peers.urls.values()))
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.post(url + path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize(("window", "quotes"), [(1, 0), (7, 0), (1 << 20, 0), (1 << 20, 12), (1 << 20, 256)])
def test_the_weight_of_json_is_that_of_its_values_whatever_its_texts_hold(
    monkeypatch: pytest.MonkeyPatch, window: int, quotes: int
) -> None:
    monkeypatch.setattr(request_bodies, "WINDOW", window)
    monkeypatch.setattr(request_bodies, "MAX_QUOTES", quotes)
    monkeypatch.setattr(json_limits, "BYTES_OF_WEIGHT", 1 << 40)
    luck = random.Random(0)
    for _ in range(300):
        value = draw_value(luck, 4)
        raw = json.dumps(value, ensure_ascii=luck.random() < 0.5).encode()
        weight = counted(value)
        assert is_light(raw, weight) and (weight == 0 or not is_light(raw, weight - 1)), raw


def test_json_of_too_many_values_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parses: list[bytes] = []
    monkeypatch.setattr(request_bodies, "_loads", lambda raw: parses.append(raw) or {})
    for one, weight in ((b"[]", NODE_WEIGHT + 1), (b"{}", NODE_WEIGHT + 1), (b"300", 1), (b'{"a":1}', 17), (b'"a"', 1)):
        for most in (CALL_WEIGHT, ROW_WEIGHT):
            with pytest.raises(BadRequest, match="too many values") as caught:
                parse_body(b'{"input":[' + (one + b",") * (most // weight) + one + b"]}", "/verify", most)
            assert caught.value.status == 413
    with pytest.raises(BadRequest, match="too many values"):
        parse_body(b'{"input":' + b"7" * (BYTES_OF_WEIGHT * ROW_WEIGHT) + b"}", "/verify", ROW_WEIGHT)
    assert not parses


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mcqa", {"options": [{"A": "x" * 1_000_001}], "expected_answer": "A"}),
        ("math", {"expected_answer": "7" * 1_000_001}),
        ("qa_short", {"expected_answer": ["4", "x" * 1_000_001]}),
        ("safety", {"kind": "refuse", "banned": ["x" * 1_000_001]}),
    ],
)
async def test_a_reference_text_that_would_hold_its_server_is_refused(name: str, row: Json) -> None:
    row = {"responses_create_params": {"input": "q"}, "response": {"output": [says("4")]}, **row}
    async with serving(name) as peers:
        answer = await post_body(peers, "/verify", json.dumps(row).encode())
    assert answer.status_code == 422 and "1000000 characters" in answer.text


def test_long_conversations_images_and_token_ids_are_light_enough() -> None:
    message = {"role": "user", "content": [{"type": "input_text", "text": 'He said: "{[,:]}" ' * 100}]}
    image = {
        "role": "user",
        "content": [{"type": "input_image", "image_url": "data:image/png;base64," + "A" * 60 * MB}],
    }
    ids = {"prompt_token_ids": list(range(100_000, 1_000_000)), "generation_token_ids": [1] * 100_000}
    for items in ([message] * 20_000, [image], [{**message, **ids}]):
        body = parse_body(json.dumps({"input": items}).encode(), "/v1/responses", ROW_WEIGHT)
        assert len(body["input"]) == len(items)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
async def test_of_unknown_fields_eight_are_named_and_no_more_are_looked_at(compared: list[str], path: str) -> None:
    fields = {f"field{number}": 1 for number in range(40_000)}
    async with local_services(policy=model_server(respond=echo)) as peers:
        answer = await post_body(peers, path, json.dumps(fields).encode())
    problem = answer.json()
    assert answer.status_code == 400 and len(problem["errors"]) == 8 and problem["detail"].endswith("; and more")
    assert len(compared) <= 9 and len(answer.content) < 8_000


async def test_a_long_name_is_cut_where_it_is_named_and_compared_with_nothing(compared: list[str]) -> None:
    async with local_services(policy=model_server(respond=echo)) as peers:
        for body in ({"x" * MB: 1}, {"input": [{"type": "y" * MB}]}, {"input": "a", "tool_choice": {"z" * MB: 1}}):
            answer = await post_body(peers, "/v1/responses", json.dumps(body).encode())
            assert answer.status_code == 400 and len(answer.content) < 4_000
    assert not compared


async def test_of_a_groups_problems_eight_are_named_whatever_the_group() -> None:
    bad = {"responses_create_params": {}, "response": {}, "mode": "rubric", "question": 1, "rubric": [1] * 100}
    async with serving("judge") as peers:
        for rollouts in ([bad] * 100, [bad] * 1000, [{}] * 1000, [{}] * 37_500, [1] * 100_000):
            body = json.dumps({"rollouts": rollouts}).encode()
            answer = await post_body(peers, "/verify_group", body)
            assert answer.status_code == 422 and 1 <= len(answer.json()["errors"]) <= 8
            assert len(answer.content) < 4_000 < len(body) and "field 'rollouts.0" in answer.json()["detail"]


class Guarded(BaseModel):
    model_config = {"extra": "forbid"}
    numbers: list[int] = []
    by_name: dict[str, int] = {}


async def count(body: Guarded) -> int:
    """Count."""
    return len(body.numbers)


async def nothing(task: VerifyRequest) -> float:
    return 0.0


async def test_of_an_authors_model_no_more_problems_are_made_than_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """pydantic makes the whole list or none of it."""
    monkeypatch.setattr(request_bodies, "MAX_LISTED_PROBLEMS", 100)
    problems: list[int] = []
    monkeypatch.setattr(
        request_bodies, "_location", lambda problem: problems.append(1) or ".".join(map(str, problem["loc"]))
    )
    wrong = (
        {"numbers": ["x"] * 1000},
        {"numbers": ["x"] * 100_000},
        {f"n{number}": 1 for number in range(1000)},
        {"by_name": {f"n{number}": "x" for number in range(1000)}},
    )
    async with local_services(gym=gym_server(verify=nothing, tools=[count])) as peers:
        for arguments in wrong:
            answer = await post_body(peers, "/count", json.dumps(arguments).encode())
            assert answer.status_code == 422 and 1 <= len(answer.json()["errors"]) <= 8, answer.text
            assert len(answer.content) < 4_000
    assert len(problems) <= 9 * len(wrong)


threads: set[str] = set()


class ThreadRecorder(VerifyRequest):
    @field_validator("responses_create_params")
    @classmethod
    def _record_thread(cls, params: Json) -> Json:
        threads.add(threading.current_thread().name)
        return params


async def scores(task: ThreadRecorder) -> float:
    return 1.0


async def test_a_large_body_is_parsed_validated_and_written_beside_the_event_loop() -> None:
    loop = threading.current_thread().name
    async with local_services(gym=gym_server(verify=scores)) as peers:
        for size, in_thread in ((1_000, False), (MB, True)):
            threads.clear()
            body = rollout({"responses_create_params": {"input": "x" * size}}, says("a"))
            assert (await post_body(peers, "/verify", json.dumps(body).encode())).json()["reward"] == 1.0
            assert (loop not in threads) is in_thread


async def test_a_stanza_may_take_larger_or_smaller_bodies() -> None:
    options = {"gym": {"max_body_mib": 1, "max_json_weight": 1000}}
    async with local_services(options, gym=gym_server(verify=nothing, options=ServiceOptions)) as peers:
        for row, status in (({}, 200), ({"x": "a" * (1 << 20)}, 413), ({"x": [1] * 1001}, 413)):
            body = json.dumps(rollout(row, says("a"))).encode()
            assert (await post_body(peers, "/verify", body)).status_code == status


def test_an_error_is_not_a_longer_than_a_line_may_be_and_has_its_statuss_title() -> None:
    error = ServiceError("x" * MB, status=409)
    assert len(error.detail) < MAX_DETAIL + 100 and error.title == "Conflict"
    assert ServiceError("x").title == "Internal error" and ServiceError("x", status=599).title == "Internal error"


@pytest.mark.parametrize("number", ["1", "1" * 30])
def test_the_depth_of_a_value_with_an_integer_beyond_64_bits_is_known(number: str) -> None:
    wide = f"[{'[1],' * 400}{number}]"
    assert not json_limits.is_deep(wide.encode(), json.loads(wide))
    for depth in (json_limits.MAX_DEPTH, json_limits.MAX_DEPTH + 1):
        text = "[" * depth + number + "]" * depth
        assert json_limits.is_deep(text.encode(), json.loads(text)) == (depth > json_limits.MAX_DEPTH)
