"""Gym servers and agents over real sockets: the answers to what an author writes."""

import asyncio
import gzip
import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from fastapi import FastAPI, Request, Response
from local_services import local_services
from paths import ROOT
from pydantic import BaseModel, model_validator
from waiting import PATIENCE_S

from ngym import (
    ConfigError,
    RolloutContext,
    ServiceError,
    ServiceOptions,
    Session,
    Step,
    ToolError,
    VerifyGroup,
    VerifyRequest,
    agent,
    gym_server,
    step_server,
)
from ngym.errors import NotFound, Overloaded, Unreachable, UpstreamError
from ngym.grading.group_rewards import apply_outcome
from ngym.net.load_balancer import rendezvous
from ngym.peers import Peers
from ngym.services.base.app import JsonResponse, add_route, load, service_app
from ngym.services.base.request_bodies import json_body
from ngym.services.gym.sessions import SessionStore
from ngym.services.gym.step_server import turns_of

SIMPLE_AGENT = ROOT / "agents" / "simple" / "app.py"


@dataclass
class Prices:
    values: list[float]


class Add(BaseModel):
    amount: int


class Task(VerifyRequest):
    target: int


async def add(body: Add, session: Session) -> Any:
    """Add to this rollout's counter."""
    if body.amount == 13:
        raise ToolError("13 is unlucky")
    if body.amount == 14:
        raise RuntimeError("a bug of the author's")
    if body.amount == 15:
        return {"all of them", "a set"}
    if body.amount == 16:
        raise NotFound("what another service said")
    if body.amount == 17:
        sys.exit("a library gave up")
    if body.amount == 24:
        raise KeyboardInterrupt
    if body.amount == 25:
        raise ToolError(ValueError("no such unit"))
    if body.amount == 26:
        raise ToolError("")
    if body.amount == 19:
        parent: dict[str, Any] = {"children": []}
        parent["children"].append({"parent": parent})
        return parent
    if body.amount == 20:
        return {"prices": [1.5, float("nan")]}
    if body.amount == 21:
        return Prices([float("inf")])
    if body.amount == 22:
        return "x" * (17 << 20)
    if body.amount == 23:
        return '"' * (1 << 20)
    if body.amount == 18:
        await asyncio.Event().wait()
    session["total"] = session.get("total", 0) + body.amount
    return {"total": session["total"]}


async def verify(task: Task, session: Session) -> dict[str, Any]:
    return {"reward": float(session.get("total") == task.target), "total": session.get("total"), "said": task.text}


def counter():
    return gym_server(tools=[add], verify=verify)


def scripted_app(*turns: list[dict[str, Any]], **response: Any):
    """A model that says these output items, one list a turn (by the number of assistant turns so far)."""
    app = service_app("model", options=ServiceOptions)
    requests: list[dict[str, Any]] = []
    app.state.requests = requests

    async def responses(request: Request):
        body = await json_body(request)
        requests.append(body)
        turn = sum(1 for item in body["input"] if item.get("type") in ("function_call", "message"))
        output = turns[min(turn, len(turns) - 1)]
        usage = {
            "input_tokens": 10,
            "output_tokens": 2,
            "total_tokens": 12,
            "input_tokens_details": {"cached_tokens": None},
        }
        return JsonResponse(
            {"id": "resp_1", "object": "response", "status": "completed", "output": output, "usage": usage, **response}
        )

    add_route(app, "POST", "/v1/responses", responses)
    return app


def calls(name: str, arguments: str) -> list[dict[str, Any]]:
    return [{"type": "function_call", "call_id": "c1", "name": name, "arguments": arguments}]


def says(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]


def simple_house(model):
    return local_services(
        {"agent": {"gym": "gym", "model": "model", "max_steps": 3}},
        gym=counter(),
        model=model,
        agent=load(SIMPLE_AGENT).app,
    )


ROW = {"responses_create_params": {"input": "add 7"}, "target": 7, "_ng_task_index": 4, "colour": "red"}


async def test_a_rollout_calls_the_tool_and_is_scored():
    async with simple_house(scripted_app(calls("add", '{"amount": 7}'), says("done"))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert row["reward"] == 1.0 and row["said"] == "done" and row["colour"] == "red"
    assert [item["type"] for item in row["response"]["output"]] == ["function_call", "function_call_output", "message"]
    assert row["response"]["output"][1]["output"] == '{"total":7}'
    assert row["response"]["usage"] == {
        "input_tokens": 20,
        "output_tokens": 4,
        "total_tokens": 24,
        "input_tokens_details": {"cached_tokens": None},
    }
    ng = row["ng"]
    assert (ng["status"], ng["stop_reason"], ng["turns"], ng["tool_calls"], ng["tool_errors"]) == (
        "ok",
        "answer",
        2,
        1,
        0,
    )
    assert set(ng["timings"]) == {"model_s", "tools_s", "verify_s", "total_s"}
    assert [name for name, _, _ in ng["spans"]] == ["seed", "model", "tool:add", "model", "verify"]
    ends = 0.0
    for _, start, seconds in ng["spans"]:
        assert start >= ends - 1e-5  # each number is rounded
        ends = start + seconds
    assert ends <= ng["timings"]["total_s"] + 1e-5
    assert ng["timings"]["model_s"] == pytest.approx(sum(s for name, _, s in ng["spans"] if name == "model"), abs=1e-5)


async def test_the_gym_servers_tools_are_offered_when_the_row_declares_none():
    model = scripted_app(says("done"))
    async with simple_house(model) as peers:
        await peers["agent"].post("/run", ROW)
    assert [tool["name"] for tool in model.state.requests[0]["tools"]] == ["add"]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("verify", "{}", "there is no tool 'verify'. Tools: add."),
        ("../verify", "{}", "there is no tool '../verify'"),
        (["add"], "{}", "there is no tool ['add']"),
        ("add", "{amount: 7", "the arguments of add are not JSON"),
        ("add", "[7]", "must be a JSON object, not list"),
        ("add", '{"amount": "x"}', "field 'amount'"),
        ("add", '{"amount": 13}', "13 is unlucky"),
    ],
)
async def test_what_the_model_does_wrong_is_shown_to_the_model(name: Any, arguments: str, expected: str):
    async with simple_house(scripted_app(calls(name, arguments), says("sorry"))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert expected in row["response"]["output"][1]["output"]
    assert row["reward"] == 0.0
    assert (row["ng"]["tool_calls"], row["ng"]["tool_errors"]) == (1, 1)
    spans = [span for span, _, _ in row["ng"]["spans"]]
    assert spans == ["seed", "model", "tool:add" if name == "add" else "tool", "model", "verify"]


@pytest.mark.parametrize("name", ["seed_session", "verify", "add?x=1", "add#"])
async def test_a_row_that_declares_other_routes_as_tools_reaches_none_of_them(name: str):
    tool = {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    params = {**ROW["responses_create_params"], "tools": [tool]}
    async with simple_house(scripted_app(calls(name, '{"amount": 7}'), says("sorry"))) as peers:
        if name.isidentifier():
            row = await peers["agent"].post("/run", {**ROW, "responses_create_params": params})
            assert f"there is no tool '{name}'" in row["response"]["output"][1]["output"]
        else:
            with pytest.raises(UpstreamError, match="gym has no tool 'add"):
                await peers["agent"].post("/run", {**ROW, "responses_create_params": params})


async def test_a_number_that_the_model_makes_too_large_for_json_breaks_neither_tool_nor_verifier():
    large = "9" * 30
    async with simple_house(scripted_app(calls("add", f'{{"amount": "{large}"}}'), says("done"))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert row["response"]["output"][1]["output"] == f'{{"total":{large}}}'
    assert (row["reward"], row["total"]) == (0.0, large)


async def test_a_result_with_half_a_character_is_readable():
    class Nothing(BaseModel):
        pass

    async def half(body: Nothing) -> Any:
        return {"cut": ["\ud83d", 1], "\udc00": None}

    async def verify(task: VerifyRequest) -> float:
        return 0.0

    async with local_services(gym=gym_server(tools=[half], verify=verify)) as peers:
        assert await peers["gym"].post("/half", {}) == {"cut": ["?", 1], "?": None}


CRASHES = {
    14: (r"add failed: RuntimeError: a bug of the author's \(test_services.py:\d+\)", True),
    15: (r"add returned a value that is not JSON: .*set \(test_services.py:\d+\)", False),
    16: ("what another service said", False),
    17: (r"add failed: SystemExit: a library gave up \(test_services.py:\d+\)", True),
    24: (r"add failed: KeyboardInterrupt \(test_services.py:\d+\)", True),
    19: (r"add returned a value that is not JSON: it contains itself \(test_services.py:\d+\)", False),
    21: (r"add returned a value that is not JSON: it contains NaN or an infinity \(test_services.py:\d+\)", False),
    20: (r"add returned a value that is not JSON: it contains NaN or an infinity \(test_services.py:\d+\)", False),
    22: (
        r"add returned 17.0 MiB, more than 16 \(test_services.py:\d+\); return less, or raise the stanza's max_body_mib",
        False,
    ),
    18: ("gym at .* did not answer POST /add within", True),
}


@pytest.mark.parametrize("amount", CRASHES)
async def test_a_tool_that_crashes_fails_the_rollout_and_says_where(amount: int):
    words, again = CRASHES[amount]
    options = {"agent": {"gym": "gym", "model": "model", "tool_timeout_s": 0.5 if amount == 18 else 60}}
    model = scripted_app(calls("add", f'{{"amount": {amount}}}'), says("done"))
    async with local_services(options, gym=counter(), model=model, agent=load(SIMPLE_AGENT).app) as peers:
        with pytest.raises(UpstreamError, match=words) as caught:
            await peers["agent"].post("/run", {**ROW, "target": 0})
    assert (caught.value.failure, caught.value.retryable) == ("tool_error", again)
    assert caught.value.upstream["service"] == "gym"
    if amount == 16:
        assert re.search(r"\(test_services.py:\d+\) \(the model reads a ToolError; NotFound fails", str(caught.value))


@pytest.mark.parametrize("amount", [14, 15, 16, 17, 22])
async def test_with_tool_errors_show_the_model_reads_a_crash_and_is_scored(amount: int):
    options = {"agent": {"gym": "gym", "model": "model", "tool_errors": "show"}}
    model = scripted_app(calls("add", f'{{"amount": {amount}}}'), says("sorry"))
    async with local_services(options, gym=counter(), model=model, agent=load(SIMPLE_AGENT).app) as peers:
        row = await peers["agent"].post("/run", ROW)
    output = row["response"]["output"][1]["output"]
    assert re.match(f"Error: {CRASHES[amount][0]}", output)
    assert (row["reward"], row["ng"]["tool_errors"]) == (0.0, 1)


@pytest.mark.parametrize(("amount", "text"), [(25, "Error: no such unit"), (26, "Error: The tool cannot do this")])
async def test_a_tool_error_of_an_exception_or_without_a_text_is_readable(amount: int, text: str):
    async with simple_house(scripted_app(calls("add", f'{{"amount": {amount}}}'), says("sorry"))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert row["response"]["output"][1]["output"] == text and row["reward"] == 0.0


async def test_a_rollout_that_called_a_tool_that_crashed_gets_no_reward():
    """A caller that shows the model whatever comes back, as the loops of other frameworks do."""
    async with local_services(gym=counter()) as peers:
        for path, headers, status in (("/add", {}, 500), ("/add", {"x-ng-tool-errors": "show"}, 200)):
            session = peers["gym"].session()
            await session.post("/seed_session", {**ROW, "target": 7})
            assert (await session.post("/add", {"amount": 7}))["total"] == 7
            headers |= {"x-ng-session": session.id}
            async with httpx.AsyncClient(base_url=peers.urls["gym"][0], headers=headers, timeout=PATIENCE_S) as client:
                problem = (await client.post(path, json={"amount": 14})).json()
                scored = await client.post("/verify", json={**ROW, "response": {"output": []}})
            assert "a bug of the author's" in problem["detail"] and problem.get("for_the_model", False) == (
                status == 200
            )
            assert scored.status_code == status
            if status == 500:
                assert scored.json()["failure"] == "tool_error" and "a bug of the author's" in scored.json()["detail"]


async def test_an_agent_that_swallows_the_environments_failure_gets_no_reward():
    async def respond(request: Any, rollout: RolloutContext) -> Any:
        with suppress(ServiceError):
            await rollout.call_tool(calls("add", '{"amount": 14}')[0])
        return rollout.answer("done")

    async with local_services(
        {"agent": {"gym": "gym", "model": "model"}},
        gym=counter(),
        model=scripted_app(says("x")),
        agent=agent(respond=respond),
    ) as peers:
        with pytest.raises(UpstreamError, match="a bug of the author's") as caught:
            await peers["agent"].post("/run", {**ROW, "target": 0})
    assert caught.value.failure == "tool_error"


@pytest.mark.parametrize("amount", [2**64, 123456789012345678901, -(10**308) - 1])
async def test_a_tool_gets_all_digits_of_a_long_integer(amount: int):
    async with simple_house(scripted_app(calls("add", f'{{"amount": {amount}}}'), says("done"))) as peers:
        row = await peers["agent"].post("/run", {**ROW, "target": 7})
    assert row["response"]["output"][1]["output"] == f'{{"total":{amount}}}' and row["reward"] == 0


def test_a_last_turn_that_was_not_stepped_is_left_out():
    (call,) = calls("add", "{}")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    first, observation = says("one move"), {"role": "user", "content": "go on"}
    stepped = [*first, observation, call, output, *says("the last move")]
    assert turns_of({"output": stepped}) == [first, stepped[2:]]
    assert turns_of({"output": stepped, "status": "incomplete"}) == [first]
    assert turns_of({"output": [*first, observation, call]}) == [first]  # the limit of model calls


async def test_a_step_that_crashes_leaves_no_reward():
    async def reset(task: VerifyRequest, session: Session) -> str:
        return "go"

    async def step(task: VerifyRequest, session: Session) -> Step:
        raise RuntimeError("the board is gone")

    async with local_services(gym=step_server(task=VerifyRequest, reset=reset, step=step)) as peers:
        session = peers["gym"].session()
        row = {"responses_create_params": {"input": "play"}}
        await session.post("/reset", row)
        turn = {**row, "response": {"output": says("a move")}}
        for path in ("/step", "/verify"):
            with pytest.raises(
                UpstreamError, match=r"step failed: RuntimeError: the board is gone \(test_serv"
            ) as caught:
                await session.post(path, turn)
            assert caught.value.failure == "tool_error" and not caught.value.is_for_the_model


async def test_a_session_that_was_never_seeded_is_not_verified_where_verify_needs_its_state():
    async with local_services(gym=counter()) as peers, httpx.AsyncClient(base_url=peers.urls["gym"][0]) as client:
        scored = {**ROW, "target": 0, "response": {"output": []}}
        bare = await client.post("/verify", json=scored)
        response = await client.post("/add", json={"amount": 7})
        lost = await client.post(
            "/verify", json={**scored, "target": 7}, headers={"x-ng-session": response.headers["x-ng-session"]}
        )
    for rejected_response in (bare, lost):
        assert (
            rejected_response.status_code == 409
            and "POST /seed_session begins its session" in rejected_response.json()["detail"]
        )


@pytest.mark.parametrize("keeps_cookies", [True, False])
async def test_every_answer_in_a_session_shows_it_by_header_and_to_callers_with_cookies_by_cookie(keeps_cookies: bool):
    async with local_services(gym=counter()) as peers, httpx.AsyncClient(base_url=peers.urls["gym"][0]) as client:
        headers = {"x-ng-session": "of-this-test-0123456789"}
        requests = [
            ("POST", "/seed_session", ROW, 200),
            ("POST", "/add", {"amount": 7}, 200),
            ("POST", "/add", {"amount": 13}, 422),
            ("POST", "/add", {"amount": 14}, 500),
            ("POST", "/add", {"amount": "x"}, 422),
            ("POST", "/subtract", {}, 404),
            ("GET", "/add", None, 405),
            ("POST", "/verify", {**ROW, "response": {"output": 7}}, 422),
            ("DELETE", "/session", None, 200),
            ("POST", "/add", {"amount": 7}, 404),
        ]
        for method, path, body, status in requests:
            answer = await client.request(method, path, json=body, headers=headers)
            if not keeps_cookies:
                client.cookies.clear()
            assert answer.status_code == status, path
            assert answer.headers["x-ng-session"] == headers["x-ng-session"], path
            cookie = f"ng_session={headers['x-ng-session']};" if keeps_cookies or path == "/seed_session" else ""
            assert answer.headers.get("set-cookie", "").partition(" ")[0] == cookie, path
        client.cookies.clear()
        odd = await client.post("/add", json={"amount": 7}, headers={"x-ng-session": "<script>"})
        assert odd.status_code == 404 and "x-ng-session" not in odd.headers, "only what can be an id is said again"


async def test_verify_answers_only_what_it_adds_to_a_caller_that_prefers_it():
    row = {**ROW, "response": {"output": []}}
    answers = []
    async with local_services(gym=counter()) as peers:
        for prefer in (None, "return=minimal"):
            session = peers["gym"].session()
            await session.post("/seed_session", ROW)
            answers.append(await session.request("/verify", row, prefer=prefer))
    full, short = answers
    assert "preference-applied" not in full.headers
    assert short.headers["preference-applied"] == "return=minimal"
    assert short.json().keys().isdisjoint(row) and {**row, **short.json()} == full.json()


async def test_a_response_with_thousands_of_calls_is_bounded_and_the_model_gets_an_error():
    one = calls("add", '{"amount": 1}')[0]
    model = scripted_app([{**one, "call_id": f"c{number}"} for number in range(3000)], says("phew"))
    async with simple_house(model) as peers:
        row = await peers["agent"].post("/run", {**ROW, "target": 1000})
    results = [item["output"] for item in row["response"]["output"] if item["type"] == "function_call_output"]
    assert row["reward"] == 1.0, "the first thousand were made, each once"
    assert len(results) == 3000 and set(results[1000:]) == {"Error: no more than 1000 tool calls in a rollout."}
    assert (row["ng"]["tool_calls"], row["ng"]["tool_errors"]) == (3000, 2000)


async def test_a_rollout_whose_results_fit_no_request_is_scored_and_the_model_gets_an_error(caplog):
    one = calls("add", '{"amount": 23}')[0]
    model = scripted_app([{**one, "call_id": f"c{number}"} for number in range(40)], says("phew"))
    async with simple_house(model) as peers:
        row = await peers["agent"].post("/run", {**ROW, "target": 0})
    results = [item["output"] for item in row["response"]["output"] if item["type"] == "function_call_output"]
    errors = [result for result in results if result.startswith("Error: the results of this rollout's tool calls")]
    assert (row["reward"], row["said"], row["ng"]["tool_errors"]) == (0.0, "phew", len(errors))
    assert len(results) == 40 and len(errors) == 37, "escaped twice, three of 4 MiB fit into 16"
    [warning] = [message for message in caplog.messages if "left out" in message]
    assert row["ng"]["rollout_id"] in warning and "max_body_mib" in warning


async def test_a_result_of_a_foreign_gym_server_that_fits_no_request_fails_the_rollout():
    foreign = service_app("gym_server", options=ServiceOptions)

    async def large(request: Request):
        return Response(b"x" * (17 << 20))

    async def seed(request: Request):
        return JsonResponse({})

    add_route(foreign, "POST", "/seed_session", seed)
    add_route(foreign, "POST", "/add", large)
    options = {"agent": {"gym": "gym", "model": "model"}}
    model = scripted_app(calls("add", '{"amount": 7}'), says("done"))
    row = {**ROW, "responses_create_params": {"input": "add 7", "tools": [{"type": "function", "name": "add"}]}}
    async with local_services(options, gym=foreign, model=model, agent=load(SIMPLE_AGENT).app) as peers:
        with pytest.raises(UpstreamError, match=r"add returned 17\.0 MiB, more than 16") as caught:
            await peers["agent"].post("/run", row)
    assert caught.value.failure == "tool_error"


async def test_arguments_of_megabytes_are_the_tools_affair():
    text = '{"amount": 7, "note": "' + "x" * (5 << 20) + '"}'
    async with simple_house(scripted_app(calls("add", text), says("done"))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert row["reward"] == 1.0
    nested = '{"amount": ' + "[" * 100_000 + "]" * 100_000 + "}"
    async with simple_house(scripted_app(calls("add", nested), says("done"))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert row["reward"] == 0.0 and "not JSON" in row["response"]["output"][1]["output"]
    nested = '{"amount": ' + "[" * 300 + "]" * 300 + "}"  # orjson reads it, and does not write it
    async with simple_house(scripted_app(calls("add", nested), says("done"))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert row["reward"] == 0.0 and "deeper than 250 levels" in row["response"]["output"][1]["output"]


def tokens(ids: list[Any], logprobs: list[float]) -> bytes:
    """A Response with this token data."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    data = {"prompt_token_ids": [1, 2], "generation_token_ids": ids, "generation_log_probs": logprobs}
    return orjson.dumps({"output": [message | data]})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "model answered /v1/responses with no JSON .*; it begins '<html>'"),
        (b"null", "model answered /v1/responses without an output that is a list of items: null"),
        (b'{"error": "overloaded"}', "without an output that is a list of items: .*overloaded"),
        (b'{"output": ["a"]}', "without an output that is a list of items"),
        (b'{"output": [], "usage": []}', r"model answered /v1/responses with a usage that is not an object: \[\]"),
        (
            b'{"status": "failed", "output": [], "error": {"code": "server_error", "message": "GPU died"}}',
            "model answered /v1/responses with the status 'failed' and the error 'GPU died'",
        ),
        (b'{"status": "queued", "output": []}', "with the status 'queued'$"),
        (
            b'{"status": "completed", "output": [], "error": {"message": "GPU died"}}',
            "'completed' and the error 'GPU died'",
        ),
        (tokens(["x"], [-0.5]), "token ids must be integers from 0 on"),
        (tokens([-1], [-0.5]), "token ids must be integers from 0 on"),
        (tokens([1], [5.0]), "logprobs must be finite and at most 0"),
        (b'{"output": ' + b"[" * 300 + b"]" * 300 + b"}", "model answered /v1/responses with JSON nested deeper"),
    ],
)
async def test_a_model_whose_answer_is_invalid_is_named_with_what_it_said(body: bytes, words: str):
    async def answers(request: Request):
        return Response(body, media_type="application/json")

    model = service_app("model", options=ServiceOptions)
    add_route(model, "POST", "/v1/responses", answers)
    options = {"agent": {"gym": "gym", "model": "model"}}
    async with local_services(options, gym=counter(), model=model, agent=load(SIMPLE_AGENT).app) as peers:
        with pytest.raises(UpstreamError, match=words) as caught:
            await peers["agent"].post("/run", ROW)
    assert caught.value.failure == "model_error" and caught.value.upstream["service"] == "model"


@pytest.mark.parametrize("tools", ["add", ["add"], [{"type": "function", "name": ["add"]}], {"name": "add"}])
async def test_a_gym_server_whose_tools_are_invalid_is_named(tools: Any):
    gym = service_app("gym_server", options=ServiceOptions)

    async def begins(request: Request):
        return JsonResponse({"tools": tools})

    add_route(gym, "POST", "/seed_session", begins)
    options = {"agent": {"gym": "gym", "model": "model"}, "model": {}}
    async with local_services(
        options, gym=gym, model=scripted_app(says("done")), agent=load(SIMPLE_AGENT).app
    ) as peers:
        with pytest.raises(
            UpstreamError, match="gym answered /seed_session with tools that are not a list of objects"
        ) as caught:
            await peers["agent"].post("/run", ROW)
    assert (caught.value.failure, caught.value.retryable) == ("config", False)


async def test_a_tool_that_is_broken_is_not_a_fault_of_the_agents():
    """A gym server without ngym: its 500 is a page, without a failure class."""
    gym = service_app("gym_server", options=ServiceOptions)

    async def begins(request: Request):
        return JsonResponse({"tools": [{"type": "function", "name": "add"}]})

    async def broken(request: Request):
        return Response("<html>Internal Server Error", status_code=500)

    add_route(gym, "POST", "/seed_session", begins)
    add_route(gym, "POST", "/add", broken)
    options = {"agent": {"gym": "gym", "model": "model"}, "model": {}}
    model = scripted_app(calls("add", '{"amount": 7}'), says("done"))
    async with local_services(options, gym=gym, model=model, agent=load(SIMPLE_AGENT).app) as peers:
        with pytest.raises(UpstreamError, match="gym answered 500 to POST /add: <html>") as caught:
            await peers["agent"].post("/run", ROW)
    assert caught.value.failure == "tool_error" and caught.value.retryable


async def test_a_session_that_the_gym_server_lost_ends_the_rollout_and_is_not_shown_to_the_model():
    gym = counter()

    async def forgets(request: Request):
        gym.state.sessions.end(next(iter(gym.state.sessions._sessions)))
        return JsonResponse({"status": "completed", "output": calls("add", '{"amount": 7}')})

    model = service_app("model", options=ServiceOptions)
    add_route(model, "POST", "/v1/responses", forgets)
    options = {"agent": {"gym": "gym", "model": "model"}}
    async with local_services(options, gym=gym, model=model, agent=load(SIMPLE_AGENT).app) as peers:
        with pytest.raises(UpstreamError, match="no such session") as caught:
            await peers["agent"].post("/run", ROW)
    assert caught.value.retryable


async def test_a_model_that_never_answers_is_stopped_and_still_scored():
    async with simple_house(scripted_app(calls("add", '{"amount": 1}'))) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert (row["ng"]["stop_reason"], row["ng"]["status"], row["ng"]["turns"]) == ("max_steps", "truncated", 3)
    assert row["response"]["output"][-1]["type"] == "function_call"


@pytest.mark.parametrize(("tokens", "stop"), [(5, "length"), (0, "context")])
async def test_an_incomplete_response_distinguishes_length_from_context(tokens: int, stop: str):
    model = scripted_app(
        says("half"),
        status="incomplete",
        incomplete_details={"reason": "max_output_tokens"},
        usage={"output_tokens": tokens},
    )
    async with simple_house(model) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert (row["ng"]["stop_reason"], row["ng"]["status"], row["ng"]["finish_reasons"]) == (stop, "truncated", [stop])


async def test_a_call_of_a_turn_that_was_cut_off_is_not_run_and_the_rollout_is_scored():
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    async with simple_house(scripted_app(calls("add", '{"amount": 7}'), **cut)) as peers:
        row = await peers["agent"].post("/run", ROW)
    ng = row["ng"]
    assert (row["reward"], ng["tool_calls"], ng["stop_reason"], ng["status"]) == (0.0, 0, "length", "truncated")


@pytest.mark.parametrize(
    ("finishes", "stop", "status"),
    [
        (["stop", "tool_calls"], "answer", "ok"),
        (["stop", "length"], "length", "truncated"),
        (["stop", "context"], "context", "truncated"),
        (["length", "stop"], "answer", "truncated"),
    ],
)
async def test_an_agent_that_does_not_look_how_its_turns_ended_leaves_a_row_that_shows_it(
    finishes: list[str], stop: str, status: str
):
    left = list(finishes)

    async def says_how(request: Request):
        finish = left.pop(0)
        answer = {"status": "completed", "output": calls("add", "{}") if finish == "tool_calls" else says("7")}
        if finish in ("length", "context"):
            answer |= {"status": "incomplete", "incomplete_details": None}
        return JsonResponse(answer | {"usage": {"input_tokens": 3, "output_tokens": int(finish != "context")}})

    async def heedless(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
        for _ in finishes:
            response = await rollout.sample(request)
        return rollout.finish(response, response["output"], "answer")

    model = service_app("model", options=ServiceOptions)
    add_route(model, "POST", "/v1/responses", says_how)
    options = {"agent": {"gym": "gym", "model": "model"}}
    async with local_services(options, gym=counter(), model=model, agent=agent(respond=heedless)) as peers:
        row = await peers["agent"].post("/run", ROW)
    ng = row["ng"]
    assert (ng["finish_reasons"], ng["stop_reason"], ng["status"]) == (finishes, stop, status)
    assert apply_outcome(row, {"reward": 1.0})["ng"]["status"] == status


async def test_a_row_without_a_verifier_field_is_refused_before_the_model_is_called():
    model = scripted_app(says("done"))
    async with simple_house(model) as peers:
        with pytest.raises(UpstreamError, match=r"row 4: field 'target': Field required") as caught:
            await peers["agent"].post("/run", {key: value for key, value in ROW.items() if key != "target"})
        with pytest.raises(UpstreamError, match=r"field 'target': Field required \(is 'traget' meant to be it\?\)$"):
            await peers["gym"].post("/seed_session", {"traget" if key == "target" else key: ROW[key] for key in ROW})
    assert (caught.value.status, caught.value.failure, caught.value.retryable) == (422, "config", False)
    assert model.state.requests == []


async def test_a_row_that_is_refused_as_a_whole_names_no_field():
    class Bounded(VerifyRequest):
        low: int
        high: int

        @model_validator(mode="after")
        def _in_order(self):
            if self.low > self.high:
                raise ValueError("low is more than high")
            return self

    async def verify_(task: Bounded) -> float:
        return 1.0

    async with local_services(gym=gym_server(verify=verify_)) as peers:
        with pytest.raises(UpstreamError, match=r"the row: Value error, low is more than high"):
            await peers["gym"].post("/seed_session", {"responses_create_params": {}, "low": 2, "high": 1})


async def test_a_model_server_that_is_down_is_a_connect_failure_that_names_it():
    async with local_services(
        {"agent": {"gym": "gym", "model": "model"}}, gym=counter(), agent=load(SIMPLE_AGENT).app
    ) as peers:
        load(SIMPLE_AGENT).app.state.context.peers.urls["model"] = ["http://127.0.0.1:9"]
        with pytest.raises(UpstreamError, match=r"model cannot be reached at http://127.0.0.1:9") as caught:
            await peers["agent"].post("/run", ROW)
    assert (caught.value.failure, caught.value.retryable, caught.value.upstream["service"]) == (
        "connect",
        True,
        "model",
    )


async def test_an_error_of_the_model_server_is_a_model_error_with_its_words():
    async def refuse(request: Request):
        raise ServiceError("401 from upstream: set OPENAI_API_KEY", status=502, retryable=False)

    model = service_app("model", options=ServiceOptions)
    add_route(model, "POST", "/v1/responses", refuse)
    async with simple_house(model) as peers:
        with pytest.raises(UpstreamError, match="401 from upstream: set OPENAI_API_KEY") as caught:
            await peers["agent"].post("/run", ROW)
    assert (caught.value.failure, caught.value.retryable) == ("model_error", False)


def refusing(status: int, error: Any) -> FastAPI:
    """A remote endpoint that refuses as OpenAI does."""

    async def refuse(request: Request):
        return Response(orjson.dumps({"error": error}), status, media_type="application/json")

    model = service_app("model", options=ServiceOptions)
    add_route(model, "POST", "/v1/responses", refuse)
    return model


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"message": "too many tokens", "type": "invalid_request_error", "code": "context_length_exceeded"}),
        (
            400,
            {"message": "This model's maximum context length is 40960 tokens.", "type": "BadRequestError", "code": 400},
        ),
        (413, "prompt is too long: 210000 tokens > 200000 maximum"),
    ],
)
async def test_what_does_not_fit_a_foreign_models_context_ends_the_rollout_and_it_is_scored(status: int, error: Any):
    async with simple_house(refusing(status, error)) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert (row["ng"]["stop_reason"], row["ng"]["status"], row["reward"]) == ("context", "truncated", 0.0)


async def test_another_refusal_of_a_foreign_model_is_reported_in_its_own_words():
    error = {"message": "Invalid value: 'frequency_penalty'.", "type": "invalid_request_error", "code": None}
    async with simple_house(refusing(400, error)) as peers:
        with pytest.raises(UpstreamError) as caught:
            await peers["agent"].post("/run", ROW)
    assert caught.value.failure == "model_error"
    assert caught.value.detail == "model answered 400 to POST /v1/responses: Invalid value: 'frequency_penalty'."


async def test_token_data_becomes_segments_and_verifiers_never_see_it():
    first = [
        {
            **calls("add", '{"amount": 7}')[0],
            "prompt_token_ids": [1, 2],
            "generation_token_ids": [3],
            "generation_log_probs": [-0.1],
        }
    ]
    second = [
        {
            **says("done")[0],
            "prompt_token_ids": [1, 2, 3, 4],
            "generation_token_ids": [5],
            "generation_log_probs": [-0.2],
        }
    ]
    model = scripted_app(first, second, ng={"policy_version": [[0, 1, 6]]})
    async with simple_house(model) as peers:
        row = await peers["agent"].post("/run", ROW)
    assert row["ng"]["segments"] == [
        {
            "token_ids": [1, 2, 3, 4, 5],
            "mask": [[2, 3], [4, 5]],
            "logprobs": [-0.1, -0.2],
            "policy_version": [[2, 3, 6], [4, 5, 6]],
        }
    ]
    assert row["ng"]["policy_version"] == [6]
    assert model.state.requests[1]["input"][1]["generation_token_ids"] == [3]  # sent back unchanged
    assert row["response"]["output"][-1]["generation_token_ids"] == [5]  # NeMo Gym's readers find them


async def test_two_hundred_rollouts_at_once_do_not_mix_their_sessions():
    async with simple_house(scripted_app(calls("add", '{"amount": 7}'), says("done"))) as peers:
        rows = await asyncio.gather(
            *(peers["agent"].post("/run", {**ROW, "target": 7 if i % 2 else 8}) for i in range(200))
        )
    assert [row["reward"] for row in rows] == [float(i % 2) for i in range(200)]


async def test_a_session_ends_with_verify_and_is_not_started_afresh():
    async with local_services(gym=counter()) as peers:
        session = peers["gym"].session()
        await session.post("/seed_session", ROW)
        await session.post("/add", {"amount": 7})
        scored = await session.post("/verify", {**ROW, "response": {"output": []}})
        assert scored["reward"] == 1.0
        with pytest.raises(UpstreamError, match="no such session"):
            await session.post("/add", {"amount": 7})


async def test_a_tool_that_wants_the_task_of_a_session_without_one_says_so():
    async def look(body: Add, session: Session) -> int:
        """Look at the task."""
        return int(session["task"]["target"])

    async with local_services(gym=gym_server(tools=[look], verify=verify)) as peers:
        with pytest.raises(UpstreamError, match="this session has no task: begin it with its row") as raised:
            await peers["gym"].post("/look", {"amount": 7})
    assert raised.value.status == 422


async def test_references_of_the_openapi_document_lead_to_what_they_name():
    class Shelf(BaseModel):
        items: list[Add]

    async def put(body: Shelf) -> int:
        """Put items on the shelf."""
        return len(body.items)

    async with local_services(gym=gym_server(tools=[put], verify=verify)) as peers:
        document = await peers["gym"].get("/openapi.json")
    found = list(_references(document))
    assert found
    for reference in found:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part.replace("~1", "/").replace("~0", "~")]
        assert place["title"] == reference.rpartition("/")[2]


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _references(part)


async def test_a_caller_that_keeps_only_cookies_keeps_its_session():
    async with (
        local_services(gym=counter()) as peers,
        httpx.AsyncClient(base_url=peers.urls["gym"][0], timeout=PATIENCE_S) as client,
    ):
        await client.post("/seed_session", json=ROW)
        await client.post("/add", json={"amount": 7})
        scored = (await client.post("/verify", json={**ROW, "response": {"output": []}})).json()
    assert scored["reward"] == 1.0 and scored["target"] == 7


async def test_every_service_answers_health_readiness_metrics_and_its_schema():
    async with local_services(gym=counter()) as peers:
        assert await peers["gym"].get("/") == {"status": "ok"}
        assert await peers["gym"].get("/ready") == {"status": "ready"}
        schema = await peers["gym"].get("/openapi.json")
        assert {"/verify", "/seed_session", "/add", "/tools"} <= set(schema["paths"])
        metrics = (await peers["gym"].request("GET", "/metrics", None)).body.decode()
    assert 'ngym_requests_total{route="/ready",status="200"} 1.0' in metrics


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"[]", 422), (b"", 400), (b'{"a": NaN}', 400), (b"\xff", 400)]
)
async def test_a_bad_body_is_a_problem_document(body: bytes, status: int):
    async with (
        local_services(gym=counter()) as peers,
        httpx.AsyncClient(base_url=peers.urls["gym"][0], timeout=PATIENCE_S) as client,
    ):
        answer = await client.post("/verify", content=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["service"] == "gym" and "Traceback" not in answer.text


async def outcome_of(result: Any) -> dict[str, Any]:
    async def verify_(task: VerifyRequest) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    async with local_services(gym=gym_server(verify=verify_)) as peers:
        return await peers["gym"].post("/verify", {"responses_create_params": {}, "response": {}})


async def test_an_answer_in_another_form_is_refused_and_not_scored():
    async def verify_(task: VerifyRequest) -> float:
        return float("95" in task.text)

    async with local_services(gym=gym_server(verify=verify_)) as peers:
        url = f"{peers.urls['gym'][0]}/verify"
        async with httpx.AsyncClient() as client:
            body = {"responses_create_params": {}, "response": {"choices": [{"message": {"content": "95"}}]}}
            answer = await client.post(url, json=body)
            assert answer.status_code == 422 and "this is a Chat Completion; send a Response" in answer.json()["detail"]
            packed = await client.post(url, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
            assert packed.status_code == 415 and "content-encoding gzip" in packed.json()["detail"]


async def test_verify_may_return_a_number_none_or_a_record():
    assert (await outcome_of(1))["reward"] == 1.0
    assert (await outcome_of(None))["reward"] is None
    scored = await outcome_of({"reward": 0.75, "reward_components": {"right": 1.0, "length": -0.25}, "why": "long"})
    assert (scored["reward"], scored["why"]) == (0.75, "long")
    assert (await outcome_of(np.float32(0.5)))["reward"] == 0.5 and (await outcome_of(np.bool_(True)))["reward"] == 1.0
    scored = await outcome_of({"reward": np.float32(0.5), "seen": np.array([1, 2])})
    assert (scored["reward"], scored["seen"]) == (0.5, [1, 2])


async def begin(task: VerifyRequest, session: Session) -> str:
    return "Begin."


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (None, r"step returned None; return Step\(observation, reward, terminated, truncated, info\)"),
        ("Over.", "step returned 'Over.'; return Step"),
        (("Over.", math.nan), "step returned the reward nan; it must be a finite number"),
        (("Over.", 1.0, True, False, "none"), "step returned info of type str; it must be a dict or None"),
    ],
)
async def test_what_a_step_may_not_return_is_named(outcome: Any, line: str):
    async def step(task: VerifyRequest, session: Session) -> Any:
        return outcome

    async with local_services(env=step_server(task=VerifyRequest, reset=begin, step=step)) as peers:
        session = peers["env"].session()
        await session.post("/reset", ROW)
        with pytest.raises(ServiceError, match=line) as caught:
            await session.post("/step", {**ROW, "response": {"output": []}})
    assert caught.value.failure == "tool_error"


async def test_a_step_may_be_a_tuple_in_gymnasiums_order():
    async def step(task: VerifyRequest, session: Session) -> Any:
        return "Over.", 0.5, True, False, {"moves": 1}

    async with local_services(env=step_server(task=VerifyRequest, reset=begin, step=step)) as peers:
        session = peers["env"].session()
        await session.post("/reset", ROW)
        stepped = await session.post("/step", {**ROW, "response": {"output": []}})
    assert stepped == {
        "observation": "Over.",
        "reward": 0.5,
        "terminated": True,
        "truncated": False,
        "info": {"moves": 1},
    }


def test_a_step_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"<lambda>: write `async def step\(task, session\)`"):
        step_server(task=VerifyRequest, reset=begin, step=lambda task, session: Step("Over."))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("outcomes", "line"),
    [(None, "verify_group returned None; return a list"), ("1", "verify_group returned '1'; return a list")],
)
async def test_outcomes_of_a_group_other_than_a_list_are_named(outcomes: Any, line: str):
    def later(task: VerifyRequest) -> dict[str, Any]:
        return {"reward": None, "reward_pending": "group"}

    def together(group: VerifyGroup) -> Any:
        return outcomes

    async with local_services(env=gym_server(verify=later, verify_group=together)) as peers:
        with pytest.raises(ServiceError, match=line):
            await peers["env"].post("/verify_group", {"rollouts": [{**ROW, "response": {"output": []}}]})


async def test_a_verifier_that_returns_the_whole_task_leaves_the_row_as_it_was():
    scored = await outcome_of({"reward": 1.0, "responses_create_params": {"input": "other"}, "response": {"id": "x"}})
    assert (scored["reward"], scored["responses_create_params"], scored["response"]) == (1.0, {}, {})


async def test_a_reward_outside_of_the_declared_range_is_an_error_of_the_environment():
    async def verify_(task: VerifyRequest) -> float | None:
        return task.responses_create_params.get("temperature")

    def row(reward: float | None) -> dict[str, Any]:
        return {"responses_create_params": {"temperature": reward}, "response": {}}

    app = gym_server(verify=verify_, reward_range=(-1, 1))
    async with local_services(gym=app) as peers:
        assert (await peers["gym"].post("/verify", row(-1)))["reward_range"] == [-1, 1]
        assert (await peers["gym"].post("/verify", row(None)))["reward"] is None
        assert (await peers["gym"].post("/verify", row(1.0000000000000002)))["reward"] == 1.0  # as of nine ninths
        with pytest.raises(
            UpstreamError, match=r"the reward 1\.5; its gym_server declares reward_range=\(-1, 1\)"
        ) as caught:
            await peers["gym"].post("/verify", row(1.5))
    assert caught.value.failure == "verify_error"
    answer = app.openapi()["paths"]["/verify"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["properties"]["reward"] == {"type": ["number", "null"], "minimum": -1, "maximum": 1}
    for wrong in ((1, 0), (0, math.inf), 1):
        with pytest.raises(ValueError, match="give two finite numbers, the lower one first"):
            gym_server(verify=verify_, reward_range=wrong)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (math.nan, r"must be None or a number within ±3.4e\+38"),
        (1e39, r"verify returned 1e\+39 as reward; it must be None or a number within ±3.4e\+38"),
        ("1.0", "verify must return a number, None, or a record with 'reward'; it returned str"),
        ({"score": 1.0, "why": ""}, "; it returned a record of score, why"),
        ({"reward": 1.0, "response": "my view"}, "a field 'response', which every row has; give it another name"),
        ({"reward": 1.0, "parts": [0.5, math.nan]}, "NaN or an infinity in 'parts', which JSON does not have"),
        ({"reward": 1.0, "found": {1, 2}}, "in 'found' what is not JSON: Type is not JSON serializable: set"),
        ({"reward": 1.0, ("a", "b"): 1}, "what is not JSON: "),
        ({"reward": 1.0, "reward_components": {"a": 0.5}}, "reward_components sum to 0.5"),
        (
            ZeroDivisionError("division by zero"),
            r"verify failed: ZeroDivisionError: division by zero \(test_services.py:\d+\)",
        ),
    ],
)
async def test_a_verifier_that_fails_is_an_error_and_never_a_zero(result: Any, message: str):
    with pytest.raises(UpstreamError, match=message) as caught:
        await outcome_of(result)
    assert caught.value.failure == "verify_error"


def test_an_author_sees_at_load_what_is_missing():
    with pytest.raises(TypeError, match="verify"):
        gym_server(tools=[add])  # type: ignore[call-arg]

    async def untyped(task):
        return 1.0

    with pytest.raises(TypeError, match="parameter 'task' needs a type"):
        gym_server(verify=untyped)

    async def seed_session(body: Add) -> int:
        return 1

    with pytest.raises(TypeError, match="cannot be called 'seed_session'"):
        gym_server(verify=verify, tools=[seed_session])
    with pytest.raises(TypeError, match="two tools are called 'add'; rename one"):
        gym_server(verify=verify, tools=[add, add])
    with pytest.raises(TypeError, match="give a list of functions"):
        gym_server(verify=verify, tools=add)  # type: ignore[arg-type]

    async def yields(task: VerifyRequest) -> Any:
        yield 1.0

    with pytest.raises(TypeError, match="yields: it is a generator; return the value instead of yielding it"):
        gym_server(verify=yields)

    class Strict(ServiceOptions):
        tolerance: float = 0.1

    async def tolerant(task: VerifyRequest, options: Strict) -> float:
        return options.tolerance

    with pytest.raises(TypeError, match=r"'options' is a Strict, but the gym server has ServiceOptions: write"):
        gym_server(verify=tolerant)
    gym_server(verify=tolerant, options=Strict)


def test_sessions_are_bounded_and_expire(monkeypatch: pytest.MonkeyPatch):
    store = SessionStore(ttl_s=0.0, limit=2)
    first = store.start()
    with pytest.raises(NotFound):
        store.get(first.id)  # its time is over
    store = SessionStore(limit=2)
    store.start(), store.start()
    with pytest.raises(Overloaded):
        store.start()


async def test_a_peer_that_no_one_runs_is_unreachable_within_its_retries():
    peers = Peers({"gone": ["http://127.0.0.1:9"]})
    with pytest.raises(Unreachable, match="gone cannot be reached"):
        await peers["gone"].post("/x", {})
    with pytest.raises(NotFound, match="no service named 'gon'"):
        peers["gon"]
    await peers.close()


async def test_429_and_503_are_retried_and_500_is_not():
    paths: list[str] = []

    async def answer(request: Request):
        paths.append(request.url.path)
        if len(paths) < 3:
            raise Overloaded("later") if request.url.path == "/busy" else ServiceError("broken")
        return JsonResponse({"ok": True})

    app = service_app("model", options=ServiceOptions)
    add_route(app, "POST", "/busy", answer)
    add_route(app, "POST", "/broken", answer)
    async with local_services(model=app) as peers:
        with pytest.raises(UpstreamError, match="broken"):
            await peers["model"].post("/broken", {})
        assert len(paths) == 1
        assert await peers["model"].post("/busy", {}) == {"ok": True}
    assert len(paths) == 3


def test_a_session_sticks_to_its_replica_and_a_lost_replica_moves_only_its_own():
    urls = [f"http://10.0.0.{i}" for i in range(4)]
    before = {f"s{i}": rendezvous(f"s{i}", urls) for i in range(400)}
    after = {session: rendezvous(session, urls[:-1]) for session in before}
    assert all(after[s] == before[s] for s in before if before[s] != urls[-1])
    assert all(60 < sum(1 for url in before.values() if url == one) < 140 for one in urls)
