"""Agents on SDKs that only get a base_url yield trainable rollouts, through /run and through a collector."""

import asyncio
from collections.abc import Callable
from typing import Any

import chat_policy
import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI
from local_services import local_services
from paths import ROOT
from stub_agents import scored_row, text_item
from waiting import PATIENCE_S, reserved_port

from ngym import ModelCall, RolloutContext, VerifyRequest, agent, gym_server, model_server
from ngym.collect import CollectionLimits, CollectionPlan, Rollout, collect
from ngym.collect.rollout_rows import CaptureClient
from ngym.convert import chat_from_response, create_params, extra_body, overflow_response
from ngym.errors import NotReady, ServiceError
from ngym.peers import Peers
from ngym.services.base.app import load

NEEDS = {
    "openai_sdk": ("openai",),
    "openai_agents": ("agents",),
    "langgraph": ("langgraph", "langchain_openai"),
}
REPLIES: list[Any] = [
    {"turn": 1, "reasoning": "I add.", "tool_calls": [{"name": "add", "arguments": '{"amount":  2}'}]},
    {"turn": 2, "text": "More.", "tool_calls": [{"name": "add", "arguments": {"amount": 3}}]},
    {"turn": 3, "text": "Now it is {tool_output}."},
]


@pytest.mark.parametrize("name", list(NEEDS))
async def test_a_rollout_of_a_foreign_agent_is_scored_and_trainable(name: str):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    apps = {
        "policy": load(ROOT / "models" / "scripted" / "app.py").app,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / name / "app.py").app,
    }
    options = {"policy": {"replies": REPLIES, "tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    task = {"responses_create_params": {"input": "Count to five."}, "target": 5}
    async with local_services(options, **apps) as peers:
        recipe = CollectionPlan("actor", repeats=4)
        found = [
            outcome
            async for outcome in collect([task], peers=peers, recipe=recipe, limits=CollectionLimits(max_attempts=1))
        ]
        left = await peers["policy"].request("GET", "/metrics", None)
    assert [type(outcome) for outcome in found] == [Rollout] * 4, [outcome.row.get("failure") for outcome in found]
    assert [outcome.row["reward"] for outcome in found] == [1.0] * 4
    for outcome in found:
        trace = outcome.row["ng"]
        (segment,) = trace["segments"]
        sampled = [bytes(segment["token_ids"][start:end]).decode("latin-1") for start, end in segment["mask"]]
        assert sampled == [
            '<think>I add.</think><tool_call>add {"amount":  2}</tool_call>\xfe',
            'More.<tool_call>add {"amount":3}</tool_call>\xfe',
            'Now it is {"total":5}.\xfe',
        ]
        assert (trace["turns"], trace["tool_calls"], trace["policy_version"]) == (3, 2, [0])
        assert trace["finish_reasons"] == ["tool_calls", "tool_calls", "stop"]
        assert outcome.row["response"]["usage"]["output_tokens"] == sum(map(len, sampled))
        assert len(segment["logprobs"]) == sum(map(len, sampled))
        names, starts, seconds = zip(*trace["spans"], strict=True)
        assert sorted(names) == ["model", "model", "model", "seed", "tool:add", "tool:add", "verify"]
        assert list(starts) == sorted(starts) and starts[-1] + seconds[-1] <= trace["timings"]["total_s"]
        in_model = sum(took for name, took in zip(names, seconds, strict=True) if name == "model")
        assert trace["timings"]["model_s"] == pytest.approx(in_model, abs=1e-5)
        output = outcome.row["response"]["output"]
        assert [item["type"] for item in output] == [*["function_call", "function_call_output"] * 2, "message"]
        assert [item["call_id"] for item in output[:4:2]] == [item["call_id"] for item in output[1:4:2]]
    assert b"ngym_captured_rollouts 0.0" in left.body  # they were fetched


@pytest.mark.parametrize("name", list(NEEDS))
async def test_many_rollouts_of_a_foreign_agent_at_once_do_not_block_its_service(name: str):
    """`local_services` fails where the event loop was blocked: 32 HTTP clients of LangChain are 3 s without an answer to /health."""
    apps = {
        "policy": load(ROOT / "models" / "scripted" / "app.py").app,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / name / "app.py").app,
    }
    options = {"policy": {"replies": REPLIES}, "actor": {"gym": "env", "model": "policy"}}
    task = {"responses_create_params": {"input": "Count to five."}, "target": 5}
    async with local_services(options, **apps) as peers:
        await peers["actor"].post("/run", task)  # imports
        rows = await asyncio.gather(*(peers["actor"].post("/run", task) for _ in range(32)))
    assert [row["reward"] for row in rows] == [1.0] * 32


def cutting(last: str) -> Any:
    """models/scripted, whose second turn is cut off: by its limit, behind a whole call; or it does not fit the context."""

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        messages = create_params(request)["input"]
        if not any(item.get("type") == "function_call_output" for item in messages):
            return await chat_policy.respond(request, call)
        if last == "context":
            return chat_from_response(overflow_response({}, response_id="resp_0", model="m"))
        completion = await chat_policy.respond(request, call)
        completion["choices"][0]["finish_reason"] = "length"
        return completion

    return model_server(
        respond=respond, api="chat", options=chat_policy.SCRIPTED.Options, lifespan=chat_policy.SCRIPTED.replies
    )


@pytest.mark.parametrize("last", ["length", "context"])
@pytest.mark.parametrize("name", list(NEEDS))
async def test_a_turn_that_was_cut_off_ends_the_rollout_of_a_foreign_agent_and_it_is_scored(name: str, last: str):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    apps = {
        "policy": cutting(last),
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / name / "app.py").app,
    }
    options = {"policy": {"replies": REPLIES, "tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    task = {"responses_create_params": {"input": "Count to five."}, "target": 2}
    async with local_services(options, **apps) as peers:
        row = await peers["actor"].post("/run", task)
    trace = row["ng"]
    assert row["reward"] == 1.0, "the call of its first turn was run, that of the second was not"
    assert (trace["stop_reason"], trace["status"], trace["tool_calls"]) == (last, "truncated", 1)
    assert (trace["turns"], trace["finish_reasons"]) == (2, ["tool_calls", last])
    assert [len(segment["mask"]) for segment in trace["segments"]] == [1 if last == "context" else 2]


@pytest.mark.parametrize("name", ["simple", *NEEDS])
async def test_the_calls_of_the_last_turn_at_max_steps_are_not_run(name: str):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    apps = {
        "policy": load(ROOT / "models" / "scripted" / "app.py").app,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / name / "app.py").app,
    }
    for steps, expected in ((1, 0), (2, 2), (3, 5)):
        agent = {"gym": "env", "model": "policy", "max_steps": steps}
        options = {"policy": {"replies": REPLIES, "tokens": True}, "actor": agent}
        async with local_services(options, **apps) as peers:
            task = {"responses_create_params": {"input": "Count to five."}, "target": expected}
            row = await peers["actor"].post("/run", task)
        trace = row["ng"]
        assert (row["reward"], trace["turns"]) == (1.0, steps)
        assert (trace["stop_reason"], trace["status"]) == (("max_steps", "truncated"), ("answer", "ok"))[steps == 3]


ADD = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
    "strict": True,
}
PARAMETERS: dict[str, Any] = {
    "instructions": "Count.",
    "temperature": 0.25,
    "top_p": 0.5,
    "max_output_tokens": 300,
    "max_tool_calls": 9,
    "tools": [ADD],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "truncation": "disabled",
    "store": False,
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "service_tier": "flex",
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "metadata": {"extra_body": '{"repetition_penalty": 1.25}', "chat_template_kwargs": '{"enable_thinking": false}'},
    "frequency_penalty": 0.5,
    "presence_penalty": 0.75,
    "logit_bias": {"7": 1},
    "min_p": 0.125,
    "seed": 11,
    "stop": ["END"],
    "top_k": 20,
}
WITHOUT_CHAT_FORM = {"max_tool_calls", "metadata", "store", "truncation"}  # of no effect on a turn; see chat_requests


async def model_requests(name: str, params: dict[str, Any]) -> list[dict[str, Any]]:
    """The model requests of this agent in the two turns of a rollout, without the conversation."""
    requests: list[dict[str, Any]] = []

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        requests.append(extra_body(request) | {name: value for name, value in request.items() if name != "input"})
        return await chat_policy.SCRIPTED.respond(request, call)

    policy = model_server(respond=respond, options=chat_policy.SCRIPTED.Options, lifespan=chat_policy.SCRIPTED.replies)
    apps = {
        "policy": policy,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / name / "app.py").app,
    }
    replies = [{"turn": 1, "tool_calls": [{"name": "add", "arguments": {"amount": 5}}]}, {"text": "Done."}]
    async with local_services(
        {"policy": {"replies": replies}, "actor": {"gym": "env", "model": "policy"}}, **apps
    ) as peers:
        row = {"responses_create_params": {"input": "Count to five.", **params}, "target": 5}
        assert (await peers["actor"].post("/run", row))["reward"] == 1.0
    return [{"model": "policy"} | request for request in requests]


@pytest.mark.parametrize("name", list(NEEDS))
async def test_a_foreign_agent_sends_every_parameter_of_the_row_in_every_turn(name: str):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    expected = await model_requests("simple", PARAMETERS)
    assert len(expected) == 2 and expected[1].keys() >= {*PARAMETERS, "repetition_penalty", "chat_template_kwargs"}
    sent = await model_requests(name, PARAMETERS)
    if name != "openai_agents":
        expected = [{key: value for key, value in each.items() if key not in WITHOUT_CHAT_FORM} for each in expected]
        for each in expected:  # messages have the instructions
            del each["instructions"]
    for one, other in zip(sent, expected, strict=True):
        assert one == other


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"temprature": 0.5}, "field 'temprature': is not known.*temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
@pytest.mark.parametrize("name", ["openai_sdk", "langgraph"])
async def test_a_parameter_that_chat_completions_cannot_carry_is_refused(
    name: str, params: dict[str, Any], problem: str
):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    with pytest.raises(ServiceError, match=problem):
        await model_requests(name, params)


def counter_played_by(name: str) -> dict[str, FastAPI]:
    """The services of a rollout of this agent, with a scripted policy. Skips the test without the agent's libraries."""
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    return {
        "policy": load(ROOT / "models" / "scripted" / "app.py").app,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / name / "app.py").app,
    }


ARGUMENTS = {
    "5": "must be a JSON object, not int",
    '"x"': "must be a JSON object, not str",
    "[1]": "must be a JSON object, not list",
    "[]": "must be a JSON object, not list",
    "true": "must be a JSON object, not bool",
    "null": "must be a JSON object, not NoneType",
    "{amount: 7}": "are not JSON",
    '{"amount": NaN}': "are not JSON",
    "": "amount",
    '{"self": 1}': "amount",
    '{"amount": 1e400}': "Error",
    '{"amount":  7, "amount" : 8}': '{"total":8}',
    '{"amount":  7}': '{"total":7}',
}


@pytest.mark.parametrize("name", ["simple", *NEEDS])
async def test_arguments_of_any_form_reach_the_tool_and_the_next_turn_as_the_model_wrote_them(name: str):
    apps = counter_played_by(name)
    replies = [
        {"turn": 1, "contains": f"row {index}.", "tool_calls": [{"name": "add", "arguments": arguments}]}
        for index, arguments in enumerate(ARGUMENTS)
    ]
    options = {
        "policy": {"replies": [*replies, {"text": "{tool_output}"}], "tokens": True},
        "actor": {"gym": "env", "model": "policy"},
    }
    async with local_services(options, **apps) as peers:
        for index, (arguments, answer) in enumerate(ARGUMENTS.items()):
            task = {"responses_create_params": {"input": f"This is row {index}."}, "target": 0}
            row = await peers["actor"].post("/run", task)
            (segment,) = row["ng"]["segments"]
            ids = bytes(segment["token_ids"]).decode("latin-1")
            (start, end), (last_start, last_end) = segment["mask"]
            assert ids[start:end] == f"<tool_call>add {arguments}</tool_call>\xfe"
            assert answer in ids[last_start:last_end]
            call = next(item for item in row["response"]["output"] if item["type"] == "function_call")
            assert call["arguments"] == arguments
            assert row["ng"]["tool_errors"] == (0 if "total" in answer else 1)


@pytest.mark.parametrize("name", ["simple", *NEEDS])
async def test_calls_in_the_input_of_a_row_reach_the_model_unchanged(name: str):
    apps = counter_played_by(name)
    calls = [f"call_{index}" for index in range(len(ARGUMENTS))]
    items: list[dict[str, Any]] = [{"role": "user", "content": "Count."}]
    for call_id, arguments in zip(calls, ARGUMENTS, strict=True):
        items.append({"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": call_id, "output": "no"})
    options = {"policy": {"replies": [{"text": "Done."}], "tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, **apps) as peers:
        row = await peers["actor"].post("/run", {"responses_create_params": {"input": items}, "target": 0})
    ids = bytes(row["ng"]["segments"][0]["token_ids"]).decode("latin-1")
    assert ids.count("<tool_call>") == len(ARGUMENTS)
    assert all(f"<tool_call>add {arguments}</tool_call>" in ids for arguments in ARGUMENTS)


async def configure(config: str, run_manager: str, callbacks: str, runtime: str, state: str, store: str) -> list[str]:
    """Return the arguments, whose names a library may use for its own."""
    return [config, run_manager, callbacks, runtime, state, store]


async def full_reward(task: VerifyRequest) -> float:
    return 1.0


@pytest.mark.parametrize("name", ["simple", *NEEDS])
async def test_a_tool_gets_its_parameters_whatever_their_names(name: str):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    apps = {
        "policy": load(ROOT / "models" / "scripted" / "app.py").app,
        "env": gym_server(tools=[configure], verify=full_reward),
        "actor": load(ROOT / "agents" / name / "app.py").app,
    }
    arguments = dict.fromkeys(("config", "run_manager", "callbacks", "runtime", "state", "store"), "A")
    replies = [{"turn": 1, "tool_calls": [{"name": "configure", "arguments": arguments}]}, {"text": "{tool_output}"}]
    async with local_services(
        {"policy": {"replies": replies}, "actor": {"gym": "env", "model": "policy"}}, **apps
    ) as peers:
        row = await peers["actor"].post("/run", {"responses_create_params": {"input": "Go."}})
    assert row["response"]["output"][-1]["content"][0]["text"] == '["A","A","A","A","A","A"]'


async def test_the_failure_of_an_agent_names_the_cause_of_a_librarys_error():
    async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
        raise RuntimeError("Connection error.") from OSError("no route\nto the host")

    apps = {"env": load(ROOT / "gym_servers" / "counter" / "app.py").app, "actor": agent(respond=respond)}
    apps["policy"] = load(ROOT / "models" / "scripted" / "app.py").app
    reason = r"RuntimeError: Connection error\. \(caused by OSError: no route to the host\) \(test_foreign_agents"
    async with local_services({"actor": {"gym": "env", "model": "policy"}}, **apps) as peers:
        with pytest.raises(ServiceError, match=reason):
            await peers["actor"].post("/run", {"responses_create_params": {"input": "Go."}, "target": 1})


@pytest.mark.parametrize(("first", "second"), [("subtract", "multiply"), ("apply_patch", "shell")])
@pytest.mark.parametrize("name", ["simple", *NEEDS])
async def test_a_call_of_a_tool_that_is_not_offered_is_answered_and_counted_and_the_policy_continues(
    name: str, first: str, second: str
):
    apps = counter_played_by(name)
    calls = [{"name": first, "arguments": '{"amount":  1}'}, {"name": "add", "arguments": {"amount": 2}}]
    replies = [
        {"turn": 1, "tool_calls": calls},
        {"turn": 2, "tool_calls": [{"name": second, "arguments": ""}]},
        {"turn": 3, "text": "Done."},
    ]
    options = {"policy": {"replies": replies, "tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, **apps) as peers:
        row = await peers["actor"].post("/run", {"responses_create_params": {"input": "Count."}, "target": 2})
    trace = row["ng"]
    assert (row["reward"], trace["stop_reason"], trace["turns"]) == (1.0, "answer", 3)
    assert (trace["tool_calls"], trace["tool_errors"]) == (3, 2)
    messages = [f"Error: there is no tool {unknown!r}. Tools: add." for unknown in (first, second)]
    items = [item for item in row["response"]["output"] if item["type"] == "function_call"]
    assert sorted((item["name"], item["arguments"]) for item in items) == sorted(
        [("add", '{"amount":2}'), (second, ""), (first, '{"amount":  1}')]
    )
    (segment,) = trace["segments"]
    assert all(text in bytes(segment["token_ids"]).decode("latin-1") for text in messages)


async def test_a_collector_picks_up_what_an_agent_of_another_framework_had_captured():
    """It takes the rollout's id from its header, and returns neither token data nor `ng`."""
    policy = load(ROOT / "models" / "scripted" / "app.py").app
    async with local_services({"policy": {"tokens": True}}, policy=policy) as peers:
        url = peers.urls["policy"][0]

        async def run(request: web.Request) -> web.Response:
            rollout = f"{url}/rollouts/{request.headers['x-ng-rollout-id']}/v1"
            async with httpx.AsyncClient(base_url=rollout, timeout=PATIENCE_S) as client:
                items = (await client.post("/responses", json={"input": "one two"})).json()["output"]
            return web.json_response(scored_row(await request.json(), 0.5, text_item(items[0]["content"][0]["text"])))

        app = web.Application()
        app.add_routes([web.post("/run", run)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        peers.urls["agent"] = [f"http://127.0.0.1:{runner.addresses[0][1]}"]
        try:
            recipe = CollectionPlan("agent", repeats=3)
            row = {"responses_create_params": {"input": "x"}}
            found = [outcome.row async for outcome in collect([row], peers=peers, recipe=recipe, models=["policy"])]
            left = await peers["policy"].request("GET", "/metrics", None)
        finally:
            await runner.cleanup()
    assert [row["reward"] for row in found] == [0.5] * 3
    for row in found:
        (segment,) = row["ng"]["segments"]
        assert bytes(segment["token_ids"]).endswith(b"\xffassistant\none two\xfe")
        assert row["ng"]["policy_version"] == [0]
        assert row["ng"]["finish_reasons"] == ["stop"]
        ((name, start, seconds),) = row["ng"]["spans"]
        assert name == "model" and 0 < seconds < start + seconds < row["ng"]["timings"]["total_s"]
    assert b"ngym_captured_rollouts 0.0" in left.body


@pytest.mark.parametrize("token", [None, "a-token-of-some-length"])
async def test_the_head_shows_a_collector_whom_to_ask_for_captured_calls(token: str | None):
    requests: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if token and request.headers.get("authorization") != f"Bearer {token}":
            return web.json_response({}, status=401)
        match request.path.split("/")[1:]:
            case ["servers"]:
                kinds = {"agent": "agent", "other": "agent", "env": "gym_server", "policy": "model", "judge": "model"}
                return web.json_response([{"name": name, "kind": kind, "url": url} for name, kind in kinds.items()])
            case ["config"]:
                judge = {"urls": [f"{url}/held", f"{url}/judge"]}  # the head does not list one that has no weights
                return web.json_response({"agent": {"model": "policy", "max_steps": 3}, "other": {}, "judge": judge})
            case [model, "rollouts", rollout, "segments"]:
                requests.append(f"{rollout} at {model}")
        return web.json_response({}, status=404)

    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    peers = Peers({name: [f"{url}/{name}"] for name in ("policy", "judge")}, url, token)
    try:
        pickup = CaptureClient(peers, None)
        await pickup.begin()
        for agent in ("agent", "other"):
            await pickup.complete(agent, f"r-{agent}", {"response": {"output": [text_item("4")]}}, 0.0)
        await pickup.complete("agent", "ours", {"response": {"output": []}, "ng": {"segments": []}}, 0.0)
    finally:
        await peers.close()
        await runner.cleanup()
    assert requests == ["r-agent at policy", "r-other at policy", "r-other at held", "r-other at judge"]


async def test_with_replicas_all_calls_of_a_rollout_go_to_one_and_its_segments_come_from_there():
    apps = {
        "policy": chat_policy.SCRIPTED.app,
        "other": chat_policy.app,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / "openai_sdk" / "app.py").app,
    }
    options = {name: {"replies": REPLIES, "tokens": True} for name in ("policy", "other")}
    options["actor"] = {"gym": "env", "model": "policy"}
    async with local_services(options, **apps) as peers:
        replicas = apps["actor"].state.context.peers.urls["policy"]
        replicas += peers.urls["other"]
        tasks = [{"responses_create_params": {"input": f"Count to five, {n}."}, "target": 5} for n in range(40)]
        before = [await _calls(peers, name) for name in ("policy", "other")]
        found = [
            outcome.row
            async for outcome in collect(tasks, peers=peers, recipe=CollectionPlan("actor"), limits=CollectionLimits())
        ]
        after = [await _calls(peers, name) for name in ("policy", "other")]
    assert [len(row["ng"]["segments"]) for row in found] == [1] * 40
    calls = [now - earlier for earlier, now in zip(before, after, strict=True)]
    assert sum(calls) == 3 * 40
    assert min(calls) > 0


async def _calls(peers: Peers, name: str) -> float:
    line = 'ngym_requests_total{route="/rollouts/{rollout_id}/v1/chat/completions",status="200"} '
    metrics = (await peers[name].request("GET", "/metrics", None)).body.decode()
    return float(metrics.partition(line)[2].partition("\n")[0] or 0)


async def test_with_a_dead_replica_of_the_model_rollouts_of_an_sdk_agent_go_to_the_others():
    pytest.importorskip("openai")
    apps = {
        "policy": chat_policy.SCRIPTED.app,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": load(ROOT / "agents" / "openai_sdk" / "app.py").app,
    }
    options = {"policy": {"replies": REPLIES, "tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    tasks = [{"responses_create_params": {"input": f"Count to five, {n}."}, "target": 5} for n in range(40)]
    limits = CollectionLimits(concurrency=4, max_attempts=3, retry_s=(0.01,))
    with reserved_port() as port:
        async with local_services(options, **apps) as peers:
            apps["actor"].state.context.peers.urls["policy"].append(f"http://127.0.0.1:{port}")
            found = [
                outcome async for outcome in collect(tasks, peers=peers, recipe=CollectionPlan("actor"), limits=limits)
            ]
    failed = [outcome.row["failure"] for outcome in found if not isinstance(outcome, Rollout)]
    assert sum(isinstance(outcome, Rollout) for outcome in found) == 40
    assert {failure["class"] for failure in failed} <= {"connect"} and len(failed) < 10


def sampling(model_calls: int, after: Callable[[int], object]) -> FastAPI:
    """An agent that samples this often under its model_base_url. after: called after each call, with its number."""

    async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=rollout.model_base_url, timeout=PATIENCE_S) as model:
            for number in range(1, model_calls + 1):
                (await model.post("/responses", json={"input": f"one {number}"})).raise_for_status()
                after(number)
        return rollout.answer("done")

    return agent(respond=respond)


@pytest.mark.parametrize("lost_after", [1, 2])
async def test_a_rollout_whose_model_server_started_again_after_a_call_has_to_run_again(lost_after: int):
    """After the last call it has nothing of the rollout, after the first one only the second call."""
    policy = load(ROOT / "models" / "scripted" / "app.py").app

    def restart(number: int) -> None:
        if number == lost_after:
            policy.state.captures.begin(1000)  # what its lifespan begins with

    apps = {
        "policy": policy,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": sampling(2, restart),
    }
    options = {"policy": {"tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, **apps) as peers:
        with pytest.raises(ServiceError, match="started again") as caught:
            await peers["actor"].post("/run", {"responses_create_params": {"input": "x"}, "target": 0})
    assert caught.value.failure == "connect" and caught.value.retryable
    assert caught.value.upstream == {"service": "policy", "url": peers.urls["policy"][0], "status": None}


async def test_an_answer_that_takes_long_fails_no_rollout_where_no_call_was_lost_since_an_earlier_answer(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of each answer, the way here takes as long as the model server has run."""
    policy = load(ROOT / "models" / "scripted" / "app.py").app
    monkeypatch.setattr(policy.state.captures, "kept_s", lambda: 0.0)
    restarts: list[int] = []

    def restart(number: int) -> None:
        if restarts:
            policy.state.captures.begin(restarts.pop())  # what its lifespan begins with

    apps = {
        "policy": policy,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": sampling(1, restart),
    }
    options = {"policy": {"tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    row = {"responses_create_params": {"input": "x"}, "target": 0}
    async with local_services(options, **apps) as peers:
        with pytest.raises(ServiceError, match="started again"):
            await peers["actor"].post("/run", row)
        for _ in range(2):
            assert len((await peers["actor"].post("/run", row))["ng"]["segments"]) == 1
        restarts.append(1000)
        with pytest.raises(ServiceError, match="started again"):
            await peers["actor"].post("/run", row)


async def test_captured_calls_are_fetched_where_they_are_after_a_short_503(monkeypatch: pytest.MonkeyPatch):
    """With other replicas, which have none of the rollout's calls."""
    servers = {"policy": chat_policy.SCRIPTED.app, "other": chat_policy.app}
    refusals: list[str] = []
    for app in servers.values():
        monkeypatch.setattr(app.state.captures, "segments", refusing_once(app.state.captures.segments, refusals))
    apps = {
        **servers,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": sampling(1, lambda number: None),
    }
    options = {name: {"tokens": True} for name in servers} | {"actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, **apps) as peers:
        apps["actor"].state.context.peers.urls["policy"] += peers.urls["other"]
        row = await peers["actor"].post("/run", {"responses_create_params": {"input": "x"}, "target": 0})
    assert len(refusals) == 1 and len(row["ng"]["segments"]) == 1


async def test_captured_calls_that_cannot_be_deleted_fail_no_rollout(monkeypatch: pytest.MonkeyPatch):
    policy = load(ROOT / "models" / "scripted" / "app.py").app

    def forget(rollout_id: str) -> bool:
        raise ServiceError("a bug")

    monkeypatch.setattr(policy.state.captures, "forget", forget)
    env = load(ROOT / "gym_servers" / "counter" / "app.py").app
    options = {"policy": {"tokens": True}, "actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, policy=policy, env=env, actor=sampling(1, lambda number: None)) as peers:
        row = await peers["actor"].post("/run", {"responses_create_params": {"input": "x"}, "target": 0})
    assert len(row["ng"]["segments"]) == 1


def refusing_once(segments: Callable[[str], Any], refusals: list[str]) -> Callable[[str], Any]:
    """`Captures.segments`, with a 503 for the first of all requests."""

    def answer(rollout_id: str) -> Any:
        if not refusals:
            refusals.append(rollout_id)
            raise NotReady("too few file descriptors are left", retry_after_s=0.01)
        return segments(rollout_id)

    return answer


async def test_captured_calls_of_a_replica_that_left_are_lost_and_the_rollout_has_to_run_again():
    servers = {"policy": chat_policy.SCRIPTED.app, "other": chat_policy.app}

    def leave(number: int) -> None:
        urls = apps["actor"].state.context.peers.urls
        at = next(url for name, url in both.items() if len(servers[name].state.captures._rollouts))
        urls["policy"] = [url for url in both.values() if url != at]

    apps = {
        **servers,
        "env": load(ROOT / "gym_servers" / "counter" / "app.py").app,
        "actor": sampling(1, leave),
    }
    options = {name: {"tokens": True} for name in servers} | {"actor": {"gym": "env", "model": "policy"}}
    async with local_services(options, **apps) as peers:
        both = {name: peers.urls[name][0] for name in servers}
        apps["actor"].state.context.peers.urls["policy"] += peers.urls["other"]
        with pytest.raises(ServiceError, match="is no longer served at") as caught:
            await peers["actor"].post("/run", {"responses_create_params": {"input": "x"}, "target": 0})
    assert caught.value.failure == "connect" and caught.value.retryable
