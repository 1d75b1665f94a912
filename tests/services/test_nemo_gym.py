"""NeMo Gym's side of the contract, as its programs use it: rows, collector, agents, gym servers."""

import json
from pathlib import Path

import httpx
import pytest
import yaml
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from local_services import local_services
from paths import ROOT
from pydantic import BaseModel
from waiting import PATIENCE_S

from ngym import ServiceOptions
from ngym.config.service_config import load_config
from ngym.config.shipped_files import app_file
from ngym.errors import UpstreamError
from ngym.peers import Peers
from ngym.services.base.app import load
from ngym.supervise.supervisor import Supervisor

SCRIPT = {
    "replies": [
        {"turn": 1, "tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]},
        {"text": "It is cold in Paris."},
    ]
}
WEATHER_ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "what is the weather in Paris?"}],
        "tools": [
            {
                "type": "function",
                "name": "get_weather",
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "description": ""}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
                "strict": True,
            }
        ],
    },
    "agent_ref": {"type": "responses_api_agents", "name": "weather_agent"},
}


def service(name: str) -> FastAPI:
    return load(app_file(name, ROOT)).app


def weather_house():
    options = {"policy": SCRIPT, "weather_agent": {"gym": "weather", "model": "policy"}}
    return local_services(
        options,
        policy=service("models/scripted"),
        weather=service("gym_servers/weather"),
        weather_agent=service("agents/simple"),
    )


async def test_its_collector_finds_an_agent_through_the_head_and_runs_a_row(tmp_path: Path):
    (tmp_path / "global_config.yaml").write_text(
        yaml.safe_dump(
            {
                "policy": {"kind": "model", "app": "models/scripted", **SCRIPT},
                "weather": {"kind": "gym_server", "app": "gym_servers/weather"},
                "weather_agent": {"kind": "agent", "app": "agents/simple", "gym": "weather", "model": "policy"},
                "ngym": {"head": {"port": 0}},
            }
        )
    )
    async with (
        Supervisor(load_config([tmp_path / "global_config.yaml"])) as stack,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        config = yaml.safe_load(json.loads((await client.get(f"{stack.head_url}/global_config_dict_yaml")).text))
        agent = next(iter(next(iter(config["weather_agent"].values())).values()))  # cfg[name].<only key>.<only key>
        base = f"http://{agent['host']}:{agent['port']}"
        row = (
            await client.post(f"{base}/run", json={**WEATHER_ROW, "_ng_task_index": 0, "_ng_rollout_index": 3})
        ).json()
        metrics = (await client.post(f"{base}/aggregate_metrics", json={"verify_responses": [row]})).json()
    assert row["reward"] == 1.0
    assert row["_ng_task_index"] == 0 and row["_ng_rollout_index"] == 3
    assert set(metrics) == {"group_level_metrics", "agent_metrics", "key_metrics"}
    assert metrics["agent_metrics"]["mean/reward"] == 1.0


class LastCookies:
    """NeMo Gym's client: each request carries the cookies that the last answer of that server set, and no others."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.cookies: dict[str, str] = {}

    async def post(self, url: str, body: object) -> httpx.Response:
        self.client.cookies.clear()
        headers = {"cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        answer = await self.client.post(url, json=body, headers=headers if self.cookies else None)
        self.cookies = dict(answer.cookies)
        return answer


async def its_agent(peers: Peers, gym: str, row: dict) -> httpx.Response:
    """The result of NeMo Gym's simple_agent for a row, on our servers: the last answer, of /verify."""
    at, model = peers.urls[gym][0], peers.urls["policy"][0]
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        to_gym, to_model = LastCookies(client), LastCookies(client)
        assert (await to_gym.post(f"{at}/seed_session", row)).cookies
        params, output = row["responses_create_params"], []
        while True:
            request = {**params, "input": params["input"] + output}
            answer = (await to_model.post(f"{model}/v1/responses", request)).json()
            output += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                result = await to_gym.post(f"{at}/{call['name']}", json.loads(call["arguments"]))
                assert result.cookies, "of an error, too"
                output.append({"type": "function_call_output", "call_id": call["call_id"], "output": result.text})
        return await to_gym.post(f"{at}/verify", {**row, "response": {**answer, "output": output}})


async def test_its_agents_drive_our_gym_and_model_servers_with_nothing_but_cookies():
    async with weather_house() as peers:
        scored = (await its_agent(peers, "weather", WEATHER_ROW)).json()
    assert scored["reward"] == 1.0
    assert scored["responses_create_params"] == WEATHER_ROW["responses_create_params"]


@pytest.mark.parametrize(("target", "reward"), [(7, 1.0), (3, 0.0)])
async def test_its_agents_stay_in_their_session_from_call_to_call_though_one_is_refused(target: int, reward: float):
    def calls(amount: object) -> dict:
        return {"tool_calls": [{"name": "add", "arguments": {"amount": amount}}]}

    script = {"replies": [{"turn": turn, **calls(amount)} for turn, amount in ((1, 4), (2, "x"), (3, 3))]}
    script["replies"].append({"text": "Done."})
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    params = {"input": [{"role": "user", "content": "Add up."}], "tools": [tool]}
    services = {"policy": service("models/scripted"), "counter": service("gym_servers/counter")}
    async with local_services({"policy": script}, **services) as peers:
        scored = await its_agent(peers, "counter", {"responses_create_params": params, "target": target})
    assert scored.json()["reward"] == reward
    assert len(scored.json()["response"]["output"]) == 7


def nemo_gym_server() -> FastAPI:
    """A gym server that knows a rollout by its cookie only, as NeMo Gym's do."""
    app = FastAPI()
    totals: dict[str, int] = {}

    @app.post("/seed_session")
    async def seed_session(request: Request, response: Response) -> dict:
        response.set_cookie("Counter___counter", f"session-{len(totals)}")
        totals[f"session-{len(totals)}"] = 0
        return {}

    @app.post("/get_weather")
    async def get_weather(request: Request) -> dict:
        totals[request.cookies["Counter___counter"]] += 1
        return {"weather_description": "cold"}

    @app.post("/verify")
    async def verify(request: Request) -> dict:
        return {**await request.json(), "reward": float(totals[request.cookies["Counter___counter"]])}

    app.state.kind, app.state.options_model = "gym_server", ServiceOptions
    return app


async def test_our_agent_drives_a_gym_server_that_knows_rollouts_by_cookie():
    options = {"policy": SCRIPT, "weather_agent": {"gym": "theirs", "model": "policy"}}
    services = {
        "policy": service("models/scripted"),
        "theirs": nemo_gym_server(),
        "weather_agent": service("agents/simple"),
    }
    async with local_services(options, **services) as peers:
        rows = [await peers["weather_agent"].post("/run", WEATHER_ROW) for _ in range(2)]
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert rows[0]["ng"]["status"] == "ok"


REFUSING = {
    "argument": (422, {"detail": [{"loc": ["body", "city"], "msg": "Field required"}]}),
    "crash": (500, "RuntimeError('the database is gone')"),
}


@pytest.mark.parametrize("how", REFUSING)
@pytest.mark.parametrize("tool_errors", ["fail", "show"])
async def test_what_its_gym_servers_refuse_fails_the_rollout_or_is_shown_as_the_stanza_says(how: str, tool_errors: str):
    gym = FastAPI()
    status, body = REFUSING[how]

    @gym.post("/seed_session")
    async def seed_session() -> dict:
        return {}

    @gym.post("/get_weather")
    async def get_weather() -> JSONResponse:
        return JSONResponse(body, status)

    @gym.post("/verify")
    async def verify(request: Request) -> dict:
        return {**await request.json(), "reward": 0.0}

    gym.state.kind, gym.state.options_model = "gym_server", ServiceOptions
    options = {"policy": SCRIPT, "weather_agent": {"gym": "theirs", "model": "policy", "tool_errors": tool_errors}}
    services = {"policy": service("models/scripted"), "weather_agent": service("agents/simple")}
    async with local_services(options, theirs=gym, **services) as peers:
        if tool_errors == "fail":
            with pytest.raises(UpstreamError, match="tool_errors: show in the agent's stanza") as caught:
                await peers["weather_agent"].post("/run", WEATHER_ROW)
            assert caught.value.failure == "tool_error"
            return
        row = await peers["weather_agent"].post("/run", WEATHER_ROW)
    assert (row["reward"], row["ng"]["tool_errors"]) == (0.0, 1)
    output = row["response"]["output"][1]["output"]
    assert "Field required" in output if how == "argument" else "the database is gone" in output


async def test_a_gym_server_of_another_make_can_say_what_is_for_the_model():
    gym = FastAPI()

    @gym.post("/seed_session")
    async def seed_session() -> dict:
        return {}

    @gym.post("/get_weather")
    async def get_weather(request: Request) -> JSONResponse:
        problem = {"detail": "no such city", "for_the_model": True, "session": request.headers["x-ng-session"]}
        return JSONResponse(problem, 422, media_type="application/problem+json")

    @gym.post("/verify")
    async def verify(request: Request) -> dict:
        return {**await request.json(), "reward": 0.5}

    gym.state.kind, gym.state.options_model = "gym_server", ServiceOptions
    options = {"policy": SCRIPT, "weather_agent": {"gym": "theirs", "model": "policy"}}
    services = {"policy": service("models/scripted"), "weather_agent": service("agents/simple")}
    async with local_services(options, theirs=gym, **services) as peers:
        row = await peers["weather_agent"].post("/run", WEATHER_ROW)
    assert "no such city" in row["response"]["output"][1]["output"] and row["reward"] == 0.5


def its_gymnasium_server() -> FastAPI:
    """A step-wise server of its kind: a session by cookie, tools run by /step, no /seed_session, no /verify."""
    app = FastAPI()
    steps: dict[str, int] = {}

    @app.post("/reset")
    async def reset(response: Response) -> dict:
        session = f"session-{len(steps)}"
        response.set_cookie("Blackjack___blackjack", session)
        steps[session] = 0
        return {"observation": None, "info": {}}

    @app.post("/step")
    async def step(request: Request) -> dict:
        session = request.cookies["Blackjack___blackjack"]
        steps[session] += 1
        body = await request.json()
        called = [item for item in body["response"]["output"] if item["type"] == "function_call"]
        outputs = [{"call_id": call["call_id"], "output": json.dumps({"city": call["arguments"]})} for call in called]
        over = {
            "terminated": not called,
            "truncated": False,
            "info": {"tool_outputs": outputs, "steps": steps[session]},
        }
        return {"observation": None, "reward": 0.25 * steps[session], **over}

    app.state.kind, app.state.options_model = "gym_server", ServiceOptions
    return app


async def test_our_gymnasium_agent_plays_its_servers_and_sums_their_rewards():
    options = {"policy": SCRIPT, "player": {"gym": "theirs", "model": "policy"}}
    services = {"policy": service("models/scripted"), "player": service("agents/gymnasium")}
    async with local_services(options, theirs=its_gymnasium_server(), **services) as peers:
        row = await peers["player"].post("/run", WEATHER_ROW)
    kinds = [item["type"] for item in row["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]
    assert (row["reward"], row["terminated"], row["truncated"], row["info"]["steps"]) == (0.75, True, False, 2)
    assert (row["ng"]["status"], row["ng"]["turns"], row["ng"]["tool_calls"]) == ("ok", 2, 0)


async def test_with_reward_verify_tools_are_routes_of_the_server():
    services = {"policy": service("models/scripted"), "player": service("agents/gymnasium")}
    options = {"policy": SCRIPT, "player": {"gym": "theirs", "model": "policy", "reward": "verify"}}
    async with local_services(options, theirs=its_gymnasium_server(), **services) as peers:
        with pytest.raises(UpstreamError, match="get_weather"):
            await peers["player"].post("/run", WEATHER_ROW)


async def test_its_gymnasium_agent_can_read_our_steps():
    class StepAnswer(BaseModel):
        """The fields and types that its agent requires of an answer to /step."""

        observation: str | None = None
        reward: float = 0.0
        terminated: bool = False
        truncated: bool = False
        info: dict = {}

    row = {"responses_create_params": {"input": "Play."}, "game": "wordle", "seed": 3}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "crane"}]}
    async with local_services({}, games=service("gym_servers/games")) as peers, httpx.AsyncClient() as client:
        to_gym, at = LastCookies(client), peers.urls["games"][0]
        reset = (await to_gym.post(f"{at}/reset", row)).json()
        answer = await to_gym.post(f"{at}/step", {**row, "response": {"output": [message]}})
    assert isinstance(reset["observation"], str) and isinstance(reset["info"], dict)
    assert StepAnswer.model_validate(answer.json(), strict=True).info == {}
