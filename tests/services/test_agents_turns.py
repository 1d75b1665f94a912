"""agents/multi_turn with scripted users and users that a model plays, and agents/remote."""

import importlib.util
import sys
from typing import Any

import httpx
import pytest
from local_services import local_services
from shipped_gym import ROOT, calls, says
from waiting import PATIENCE_S, reserved_port

from ngym import RolloutContext, agent, gym_server, model_server
from ngym.errors import ConfigError, ServiceError
from ngym.schema import SESSION_HEADER
from ngym.services.base.app import JsonResponse, add_route, load, service_app
from ngym.services.base.options import ServiceOptions
from ngym.services.base.request_bodies import json_body


def service(folder):
    return load(ROOT / folder / "app.py").app


ADDING = [
    {"match": "^add (-?\\d+)", "turn": 1, "tool_calls": [{"name": "add", "arguments": '{"amount": {1}}'}]},
    {"match": "^add (-?\\d+)", "turn": 3, "tool_calls": [{"name": "add", "arguments": '{"amount": {1}}'}]},
    {"text": "I added it."},
]


async def talk(row, *, replies=ADDING, user_replies=(), **options):
    apps = {
        "counter": service("gym_servers/counter"),
        "agent": service("agents/multi_turn"),
        "policy": service("models/scripted"),
        "person": a_second_scripted_model(),
    }
    configured = {
        "agent": {"gym": "counter", "model": "policy", **options},
        "policy": {"replies": replies, "tokens": True},
        "person": {"replies": list(user_replies)},
    }
    async with local_services(configured, **apps) as peers:
        return await peers["agent"].post("/run", row)


def a_second_scripted_model():
    """The same program again, as a separate module: in one process, an application is one service."""
    name, file = "_scripted_person", ROOT / "models" / "scripted" / "app.py"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].app


def roles(scored):
    return [item.get("role") or item["type"] for item in scored["response"]["output"]]


def task(text="add 3", **more):
    return {"responses_create_params": {"input": text}, "target": 7, **more}


async def test_a_scripted_user_speaks_in_turn_and_the_gyms_state_lasts():
    scored = await talk(task(user_turns=["add 4", "thanks"]))
    assert scored["reward"] == 1.0
    assert scored["ng"]["stop_reason"] == "user_done"
    assert roles(scored) == [
        *("function_call", "function_call_output", "assistant"),
        *("user", "function_call", "function_call_output", "assistant"),
        *("user", "assistant"),
    ]
    (segment,) = scored["ng"]["segments"]
    masked = [bytes(segment["token_ids"][start:end]).decode("utf-8", "replace") for start, end in segment["mask"]]
    assert len(masked) == scored["ng"]["turns"] == 5
    assert not any("thanks" in text for text in masked)


async def test_without_a_prompt_the_user_speaks_first():
    scored = await talk(task([], user_turns=["add 7"]))
    assert (scored["reward"], roles(scored)[0]) == (1.0, "user")


async def test_a_user_that_a_model_plays_sees_the_assistants_words_only_and_ends_the_talk():
    person = [
        {"match": "I added it", "turn": 2, "text": "add 4"},
        {"match": "I added it", "turn": 3, "text": "###DONE###"},
        {"text": "I should not be reached"},
    ]
    scored = await talk(task(user_scenario="You want 3 and then 4 added."), user_replies=person, user="person")
    user_texts = [item["content"] for item in scored["response"]["output"] if item.get("role") == "user"]
    assert (user_texts, scored["reward"], scored["ng"]["stop_reason"]) == (["add 4"], 1.0, "user_done")


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
QUESTION = {"type": "input_text", "text": "Which colour?"}


@pytest.mark.parametrize(("content", "text"), [([QUESTION, IMAGE], "Which colour?"), ([IMAGE], "(an image)"), ("", "")])
async def test_the_model_that_plays_the_user_gets_the_text_of_a_prompt_with_an_image(content, text):
    seen = []

    async def respond(request, call):
        seen.append(request["input"])
        return {"output": [says("###DONE###")]}

    apps = {
        "counter": service("gym_servers/counter"),
        "agent": service("agents/multi_turn"),
        "policy": service("models/scripted"),
        "person": model_server(respond=respond),
    }
    configured = {
        "agent": {"gym": "counter", "model": "policy", "user": "person"},
        "policy": {"replies": [{"text": "Red."}]},
    }
    row = task([{"role": "user", "content": content}], user_scenario="Ask.")
    async with local_services(configured, **apps) as peers:
        scored = await peers["agent"].post("/run", row)
    assert scored["ng"]["stop_reason"] == "user_done"
    said = [(item["role"], item["content"]) for item in seen[0]]
    assert said == [("assistant", text), ("user", "Red.")]


async def test_a_user_who_never_ends_is_cut_off():
    scored = await talk(task(user_turns=["more"] * 50), max_turns=3)
    assert roles(scored).count("user") == 3
    assert (scored["ng"]["stop_reason"], scored["ng"]["status"]) == ("max_steps", "truncated")


async def test_the_models_calls_of_all_turns_together_are_at_most_max_steps():
    scored = await talk(task("hello", user_turns=["more"] * 50), max_steps=2)
    assert (scored["ng"]["turns"], scored["ng"]["stop_reason"]) == (2, "max_steps")
    scored = await talk(task("hello", user_turns=["more"]), max_steps=2)
    assert (scored["ng"]["turns"], scored["ng"]["stop_reason"]) == (2, "user_done")


async def test_a_scenario_without_a_model_to_play_it_says_what_to_configure():
    with pytest.raises(ServiceError, match="set `user: MODEL`"):
        await talk(task(user_scenario="x"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"user_turns": "add 4"}, "user_turns must be a list of texts, not str"),
        ({"user_turns": ["add 4", None]}, r"user_turns\[1\] must be a text that is not empty"),
        ({"user_turns": [" "]}, r"user_turns\[0\] must be a text"),
        ({"user_turns": ["add 4"], "user_scenario": "x"}, "only one of them can be the user"),
    ],
)
async def test_a_user_that_is_written_wrongly_is_named(row: dict[str, Any], message: str):
    with pytest.raises(ServiceError, match=message) as caught:
        await talk(task(**row))
    assert caught.value.failure == "config"


async def test_a_row_in_which_no_one_speaks_says_so():
    with pytest.raises(ServiceError, match="neither input nor user_turns"):
        await talk(task([]))


async def test_a_wrong_row_is_named_by_its_index_for_the_collector():
    row = {"responses_create_params": {"input": 5}, "_ng_task_index": 3}
    with pytest.raises(
        ServiceError, match=r"^row 3: field 'responses_create_params\.input': must be a string or a list"
    ):
        await talk(row)


async def test_an_unknown_stop_reason_is_an_error_of_the_agent():
    async def respond(request: dict[str, Any], rollout: RolloutContext) -> Any:
        return rollout.finish({}, [], "bored")  # type: ignore[arg-type]

    apps = {"counter": service("gym_servers/counter"), "policy": service("models/scripted")}
    options = {"agent": {"gym": "counter", "model": "policy"}}
    async with local_services(options, agent=agent(respond=respond), **apps) as peers:
        with pytest.raises(ServiceError, match="the stop reason 'bored' is not one of answer, max_steps") as caught:
            await peers["agent"].post("/run", task())
    assert caught.value.failure == "agent_error"


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (None, "the agent's respond returned None: a Response has `output`, a list of items"),
        ({"text": "7"}, "the agent's respond returned {'text': '7'}: a Response has"),
        ({"output": None}, "output must be a list of items, not NoneType"),
        ({"output": [3]}, r"output\[0\] must be an object, not int"),
    ],
)
async def test_what_an_agent_may_not_return_is_named(returned: Any, line: str):
    async def respond(request: dict[str, Any], rollout: RolloutContext) -> Any:
        return returned

    apps = {"counter": service("gym_servers/counter"), "policy": service("models/scripted")}
    async with local_services(
        {"agent": {"gym": "counter", "model": "policy"}}, agent=agent(respond=respond), **apps
    ) as peers:
        with pytest.raises(ServiceError, match=line) as caught:
            await peers["agent"].post("/run", task())
    assert caught.value.failure == "agent_error"


def test_an_agent_that_cannot_be_called_is_refused_at_once():
    async def respond(request: dict[str, Any], rollout: RolloutContext) -> Any:
        return {"output": []}

    with pytest.raises(ConfigError, match=r"write `async def respond\(request, rollout\)`"):
        agent(respond=lambda request, rollout: request)
    with pytest.raises(ConfigError, match=r"agent\(options=.*: give a class that derives from AgentOptions"):
        agent(respond=respond, options=ServiceOptions)
    with pytest.raises(ConfigError, match=r"gym_server\(verify=None\): give a function"):
        gym_server(verify=None)  # type: ignore[arg-type]


def somebody_elses(do):
    """Their service: a POST /run that knows nothing but what it is sent."""
    app = service_app("agent", options=ServiceOptions)
    app.state.requests = []

    async def run(request):
        body = await json_body(request)
        app.state.requests.append(body)
        return JsonResponse(await do(body))

    add_route(app, "POST", "/run", run)
    return app


async def their_work(task):
    """Samples once if the row says so, calls a tool of the gym, claims a reward."""
    ng = task["ng"]
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        request = {"model": "policy", "input": task["responses_create_params"]["input"]}
        sampled = (await client.post(f"{ng['model_base_url']}/responses", json=request)).json()
        header = {SESSION_HEADER: ng["gym_session"]}
        total = (await client.post(f"{ng['gym_url']}/add", json={"amount": 7}, headers=header)).text
    (call,) = calls(("add", {"amount": 7}))
    output = [call, {"type": "function_call_output", "call_id": "c0", "output": total}, *sampled["output"]]
    return {"reward": 99.0, "response": {"output": output, "status": "completed"}}


async def send(do, row, **options):
    remote = somebody_elses(do)
    apps = {
        "counter": service("gym_servers/counter"),
        "agent": service("agents/remote"),
        "policy": service("models/scripted"),
        "theirs": remote,
    }
    configured = {
        "agent": {"gym": "counter", "model": "policy", "remote": "theirs", **options},
        "policy": {"replies": [{"text": "Done, 7."}], "tokens": True},
    }
    async with local_services(configured, **apps) as peers:
        return await peers["agent"].post("/run", row), remote.state.requests


async def test_a_remote_agent_is_scored_here_and_its_samples_become_segments():
    scored, _ = await send(their_work, task())
    assert scored["reward"] == 1.0
    assert roles(scored) == ["function_call", "function_call_output", "assistant"]
    trace = scored["ng"]
    assert (trace["turns"], trace["tool_calls"], trace["stop_reason"]) == (1, 1, "answer")
    (segment,) = trace["segments"]
    ((start, end),) = segment["mask"]
    assert bytes(segment["token_ids"][start:end]).decode("utf-8", "replace").startswith("Done, 7.")


async def test_a_remote_agent_does_not_see_what_the_verifier_compares_with():
    row = task(answer="secret", hint="open")
    _, (body,) = await send(their_work, row, show=["hint"])
    assert body.keys() == {"responses_create_params", "ng", "hint"}


async def test_tokens_that_a_remote_agent_only_claims_are_not_believed():
    async def claims(task):
        fake = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [0.0]}
        return {"output": [{**says("7"), **fake}], "ng": {"reward": 1.0}, "reward": 1.0}

    scored, _ = await send(claims, task())
    assert scored["reward"] == 0.0
    assert scored["ng"]["segments"] == []
    assert "prompt_token_ids" not in scored["response"]["output"][0]


async def test_the_calls_of_a_remote_agent_that_answers_with_chat_messages_are_counted():
    async def chats(task):
        calls = [{"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": "{}"}} for n in range(2)]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "no"} for call in calls]
        return {"output": [{"role": "assistant", "content": None, "tool_calls": calls}, *results, says("7")]}

    scored, _ = await send(chats, task())
    assert scored["ng"]["tool_calls"] == 2


async def test_tasks_go_to_a_replica_of_the_remote_agent_that_is_up():
    agent = service("agents/remote")
    apps = {
        "counter": service("gym_servers/counter"),
        "agent": agent,
        "policy": service("models/scripted"),
        "theirs": somebody_elses(their_work),
    }
    configured = {
        "agent": {"gym": "counter", "model": "policy", "remote": "theirs", "show": ["target"]},
        "policy": {"replies": [{"text": "Done, 7."}], "tokens": True},
    }
    with reserved_port() as port:
        async with local_services(configured, **apps) as peers:
            agent.state.context.peers.urls["theirs"].append(f"http://127.0.0.1:{port}")
            rows = [await peers["agent"].post("/run", task()) for _ in range(8)]
    assert [row["reward"] for row in rows] == [1.0] * 8


async def test_an_agent_of_ngym_is_not_a_remote_agent():
    """Its tools run in a session of its own, so the verifier here would see a session in which nothing happened."""
    apps = {
        "theirs": service("agents/simple"),
        "counter": service("gym_servers/counter"),
        "agent": service("agents/remote"),
        "policy": service("models/scripted"),
    }
    called = [{"tool_calls": [{"name": "add", "arguments": {"amount": 7}}]}, {"text": "Done."}]
    configured = {
        "agent": {"gym": "counter", "model": "policy", "remote": "theirs", "show": ["target"]},
        "theirs": {"gym": "counter", "model": "policy"},
        "policy": {"replies": called},
    }
    async with local_services(configured, **apps) as peers:
        with pytest.raises(ServiceError, match=r"theirs is an agent of ngym, .* without agents/remote") as caught:
            await peers["agent"].post("/run", task())
    assert caught.value.failure == "config"


@pytest.mark.parametrize("answer", [[], {"output": "text"}, {"response": None}, {"output": [1]}, {}])
async def test_an_answer_that_is_not_a_response_is_the_agents_failure(answer):
    async def nonsense(task):
        return answer

    with pytest.raises(ServiceError, match="theirs answered with no Response") as failure:
        await send(nonsense, task())
    assert failure.value.failure == "agent_error"


async def test_a_ring_of_remote_agents_is_refused_before_a_second_round():
    apps = {name: service("agents/remote") for name in ("a", "b")}
    apps |= {"counter": service("gym_servers/counter"), "policy": service("models/scripted")}
    shared = {"gym": "counter", "model": "policy", "show": ["target"]}
    configured = {"a": {**shared, "remote": "b"}, "b": {**shared, "remote": "a"}, "policy": {"replies": [{"text": ""}]}}
    async with local_services(configured, **apps) as peers:
        with pytest.raises(ServiceError, match="sent this task to another agents/remote") as caught:
            await peers["a"].post("/run", task(ng={"rollout_id": "of an earlier collection"}))
    assert (caught.value.failure, caught.value.retryable) == ("config", False)


CALCULATOR = {"type": "function", "name": "calculator", "parameters": {"type": "object"}, "strict": False}


def a_gym_of_another_make():
    """A gym server that does not say which tools it lacks; the paths of tools have no route."""
    app = service_app("gym_server", options=ServiceOptions)

    async def seed(request):
        return JsonResponse({})

    async def verify(request):
        return JsonResponse({**await json_body(request), "reward": 1.0})

    add_route(app, "POST", "/seed_session", seed)
    add_route(app, "POST", "/verify", verify)
    return app


@pytest.mark.parametrize(("ours", "calls_it"), [(True, False), (False, True), (False, False)])
async def test_a_tool_that_the_gym_server_does_not_have_is_a_mistake_of_the_row(ours, calls_it):
    gym = service("gym_servers/counter") if ours else a_gym_of_another_make()
    replies = [{"turn": 1, "tool_calls": [{"name": "calculator"}]}] if calls_it else []
    options = {"agent": {"gym": "gym", "model": "policy"}, "policy": {"replies": replies}}
    row = {"responses_create_params": {"input": "2 + 2?", "tools": [CALCULATOR]}, "target": 4}
    async with local_services(
        options, gym=gym, agent=service("agents/simple"), policy=service("models/scripted")
    ) as peers:
        if not ours and not calls_it:
            assert (await peers["agent"].post("/run", row))["reward"] == 1.0
            return
        for _ in range(2):  # the second time, the agent may know the gym server's answer
            with pytest.raises(ServiceError, match="gym has no tool 'calculator', which the row declares") as error:
                await peers["agent"].post("/run", row)
            assert (error.value.failure, error.value.retryable) == ("config", False)
