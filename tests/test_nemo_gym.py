"""NeMo Gym's side of the contract, as its own programs speak it: its rows, its collector, its agents, its gym servers."""

import json
from pathlib import Path

import httpx
import yaml
from fastapi import FastAPI, Request, Response
from house import house
from machine import PATIENCE_S

from ngym import ServiceOptions
from ngym.config import load_config
from ngym.services.loader import load
from ngym.shipped import app_file
from ngym.supervise.supervisor import Supervisor

ROOT = Path(__file__).parent.parent
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
    return house(
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
        told = yaml.safe_load(json.loads((await client.get(f"{stack.head_url}/global_config_dict_yaml")).text))
        agent = next(iter(next(iter(told["weather_agent"].values())).values()))  # cfg[name].<only key>.<only key>
        base = f"http://{agent['host']}:{agent['port']}"
        row = (
            await client.post(f"{base}/run", json={**WEATHER_ROW, "_ng_task_index": 0, "_ng_rollout_index": 3})
        ).json()
        metrics = (await client.post(f"{base}/aggregate_metrics", json={"verify_responses": [row]})).json()
    assert row["reward"] == 1.0
    assert row["_ng_task_index"] == 0 and row["_ng_rollout_index"] == 3
    assert set(metrics) == {"group_level_metrics", "agent_metrics", "key_metrics"}
    assert metrics["agent_metrics"]["mean/reward"] == 1.0


async def test_its_agents_drive_our_gym_and_model_servers_with_nothing_but_cookies():
    async with weather_house() as peers, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        gym, model = peers.urls["weather"][0], peers.urls["policy"][0]
        seeded = await client.post(f"{gym}/seed_session", json=WEATHER_ROW)
        assert seeded.cookies  # the client sends them with every later call
        output = []
        params = WEATHER_ROW["responses_create_params"]
        while True:
            answer = (
                await client.post(f"{model}/v1/responses", json={**params, "input": params["input"] + output})
            ).json()
            output += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                result = await client.post(f"{gym}/{call['name']}", json=json.loads(call["arguments"]))
                output.append({"type": "function_call_output", "call_id": call["call_id"], "output": result.text})
        scored = await client.post(f"{gym}/verify", json={**WEATHER_ROW, "response": {**answer, "output": output}})
    assert scored.json()["reward"] == 1.0
    assert scored.json()["responses_create_params"] == params


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
    async with house(options, **services) as peers:
        rows = [await peers["weather_agent"].post("/run", WEATHER_ROW) for _ in range(2)]
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert rows[0]["ng"]["status"] == "ok"
