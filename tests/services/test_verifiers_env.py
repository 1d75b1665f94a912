"""Environments of the real `verifiers` package in a Python of their own: one turn, tools, many turns."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from shipped_gym import ROOT, calls, rollout, says

from ngym.config.service_config import load_config
from ngym.errors import NgymError, ServiceError
from ngym.peers import Peers
from ngym.supervise.supervisor import Supervisor

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = "gym_servers/verifiers_env"
BRIDGE = {"kind": "gym_server", "app": FOLDER, "requirements": f"{FOLDER}/requirements.txt"}
MOVE = {"source": "alice", "target": "bob", "amount": 5}


def environment(name: str, **options: Any) -> dict[str, Any]:
    return {**BRIDGE, "environment": name, "path": str(ROOT / FOLDER / "examples"), **options}


def scripted_stanza(*texts: str) -> dict[str, Any]:
    replies = [{"turn": turn, "text": text} for turn, text in enumerate(texts, 1)]
    return {"kind": "model", "app": "models/scripted", "replies": replies}


GUESS = {
    "guess": environment("guess"),
    "player": {"kind": "agent", "app": "agents/gymnasium", "gym": "guess", "model": "guesses"},
    "guesses": scripted_stanza("50", "18"),
}
OTHERS = {
    "sums": environment("sums", deadline_s=8, taskset={"num_tasks": 3}),
    "ledger": environment("ledger"),
}


@asynccontextmanager
async def serve_verifiers(folder: Path, venvs: Path, stanzas: dict[str, Any]) -> AsyncIterator[Peers]:
    (folder / ".ngym").mkdir()
    (folder / ".ngym" / "venvs").symlink_to(venvs)
    (folder / "global_config.yaml").write_text(
        json.dumps({"ngym": {"head": {"port": 0}, "ready_timeout_s": 600}, **stanzas})
    )
    async with Supervisor(load_config([folder / "global_config.yaml"])) as stack:
        known = Peers(stack.urls, owner="the test")
        yield known
        await known.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peers(tmp_path_factory: pytest.TempPathFactory, shared_venvs: Path) -> AsyncIterator[Peers]:
    async with serve_verifiers(tmp_path_factory.mktemp("guess"), shared_venvs, GUESS) as known:
        yield known


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def others(tmp_path_factory: pytest.TempPathFactory, shared_venvs: Path) -> AsyncIterator[Peers]:
    async with serve_verifiers(tmp_path_factory.mktemp("others"), shared_venvs, OTHERS) as known:
        yield known


async def rows_of(peers: Peers, name: str, query: str = "?limit=3") -> list[dict[str, Any]]:
    answer = await peers[name].request("GET", f"/rows{query}", None)
    return [orjson.loads(line) for line in answer.body.splitlines()]


async def verify_sum(peers: Peers, text: str) -> dict[str, Any]:
    row = (await rows_of(peers, "sums"))[0]
    scored: dict[str, Any] = await peers["sums"].post("/verify", rollout(row, says(text)))
    return scored


async def test_the_tasks_of_an_endless_environment_are_rows(peers: Peers) -> None:
    assert [row["task_data"]["seed"] for row in await rows_of(peers, "guess", "?skip=5&limit=2")] == [5, 6]
    with pytest.raises(ServiceError, match="whole numbers"):
        await rows_of(peers, "guess", "?limit=all")


@pytest.mark.soak
async def test_the_tasks_of_an_environment_are_rows_with_its_prompts_and_tools(others: Peers) -> None:
    sums = await rows_of(others, "sums", "")
    assert [row["task_data"]["idx"] for row in sums] == [0, 1, 2]  # its own option says how many there are
    assert [item["role"] for item in sums[0]["responses_create_params"]["input"]] == ["system", "user"]
    (ledger,) = await rows_of(others, "ledger", "?limit=1")
    assert {tool["name"] for tool in ledger["responses_create_params"]["tools"]} == {"bank_balance", "bank_transfer"}


@pytest.mark.soak
async def test_the_environments_own_rewards_are_the_components(others: Peers) -> None:
    right = await verify_sum(others, "<answer>12</answer>")
    assert (right["reward"], right["reward_components"]) == (1.0, {"right": 0.8, "tagged": 0.2})
    assert right["metrics"] == {"characters": 19.0}
    assert (await verify_sum(others, "<answer>13</answer>"))["reward"] == 0.2
    assert (await verify_sum(others, "12"))["reward"] == 0.0


@pytest.mark.soak
async def test_a_rollout_on_which_a_reward_raises_or_never_ends_is_worth_nothing(others: Peers) -> None:
    raised = await verify_sum(others, "fail the rubric")
    assert (raised["reward"], raised["outcome"]) == (0.0, "verify_error")
    assert "this reward cannot be computed" in raised["reason"]
    endless = await verify_sum(others, "hang the rubric")
    assert (endless["reward"], endless["outcome"]) == (0.0, "too_heavy")
    assert (await verify_sum(others, "<answer>12</answer>"))["reward"] == 1.0


@pytest.mark.soak
async def test_a_row_brings_data_and_no_code(others: Peers) -> None:
    (row,) = await rows_of(others, "sums", "?limit=1")
    elsewhere = {**row, "environment": "os", "path": "/", "task": {"id": "os"}}
    assert (await others["sums"].post("/verify", rollout(elsewhere, says("<answer>12</answer>"))))["reward"] == 1.0
    with pytest.raises(ServiceError, match="answer"):
        await others["sums"].post("/verify", rollout({"task_data": {"prompt": "?", "answer": "os.system"}}, says("1")))


@pytest.mark.soak
async def test_its_tools_are_routes_with_the_rollouts_own_state(others: Peers) -> None:
    (row,) = await rows_of(others, "ledger", "?limit=1")
    one, other = others["ledger"].session(), others["ledger"].session()
    for session in (one, other):
        assert {tool["name"] for tool in (await session.post("/seed_session", row))["tools"]} == {
            "bank_balance",
            "bank_transfer",
        }
    assert (await one.request("/bank_transfer", MOVE)).body == b"moved 5"
    assert (await one.request("/bank_balance", {"account": "bob"})).body == b"10"
    assert (await other.request("/bank_balance", {"account": "bob"})).body == b"5"
    assert b"amount" in (await other.request("/bank_transfer", {"source": "alice"})).body  # its error is for the model
    assert (await one.post("/verify", rollout(row, says("done"))))["reward"] == 1.0
    assert (await other.post("/verify", rollout(row, says("done"))))["reward"] == 0.0


@pytest.mark.soak
async def test_a_stored_rollouts_calls_are_made_again(others: Peers) -> None:
    (row,) = await rows_of(others, "ledger", "?limit=1")
    done = await others["ledger"].post("/verify", rollout(row, *calls(("bank_transfer", MOVE)), says("done")))
    assert (done["reward"], done["reward_components"]) == (1.0, {"balanced": 1.0, "needless_calls": -0.0})


async def test_an_environment_with_turns_is_played_by_our_agent_and_scored_again_from_the_row(peers: Peers) -> None:
    row = (await rows_of(peers, "guess"))[1]
    scored = await peers["player"].post("/run", row)
    assert [item["content"] for item in scored["response"]["output"] if item.get("role") == "user"][1:] == ["lower"]
    assert scored["reward_components"] == {"spoke_in_numbers": 0.1, "found": pytest.approx(0.5 * (1 + 5 / 7))}
    again = await peers["guess"].post("/verify", {**row, "response": scored["response"]})
    assert again["reward"] == scored["reward"] == pytest.approx(0.1 + 0.5 * (1 + 5 / 7))


async def test_a_game_that_is_cut_off_is_scored_as_it_is(peers: Peers) -> None:
    (row,) = await rows_of(peers, "guess", "?limit=1")
    session = peers["guess"].session()
    await session.post("/reset", row)
    assert not (await session.post("/step", rollout(row, says("1"))))["terminated"]
    scored = await session.post("/verify", rollout(row, says("1")))
    assert scored["reward_components"] == {"spoke_in_numbers": 0.1, "found": 0.0}


SETUP = """
    async def setup(self, trace: vf.Trace) -> None:
        if not tries:
            tries.append(trace)
            raise OSError("the disk is not there yet")
"""


@pytest.mark.soak
async def test_a_setup_that_fails_is_tried_again_by_the_next_call_of_the_session(
    tmp_path: Path, shared_venvs: Path
) -> None:
    source = (ROOT / FOLDER / "examples" / "ledger.py").read_text("utf-8")
    head, task, rest = source.partition("class LedgerTask(vf.Task[LedgerData, LedgerState, LedgerConfig]):\n")
    (tmp_path / "late.py").write_text(f"{head}tries = []\n\n\n{task}{SETUP}\n{rest}", "utf-8")
    (tmp_path / "run").mkdir()
    stanzas = {"late": environment("late", path=str(tmp_path))}
    async with serve_verifiers(tmp_path / "run", shared_venvs, stanzas) as late:
        (row,) = await rows_of(late, "late", "?limit=1")
        session = late["late"].session(tool_errors="show")
        await session.post("/seed_session", row)
        with pytest.raises(ServiceError, match="the disk is not there yet"):
            await session.request("/bank_transfer", MOVE)
        assert (await session.request("/bank_transfer", MOVE)).body == b"moved 5"
        assert (await session.post("/verify", rollout(row, says("done"))))["reward"] == 1.0


SCREEN = """
import base64

import verifiers.v1 as vf
from mcp.server.mcpserver import Image

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)


class ScreenToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def look(self) -> list:
        return ["The screen:", Image(data=PNG, format="png")]


class ScreenConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ScreenTask(vf.Task[vf.TaskData, vf.State, ScreenConfig]):
    @classmethod
    def toolsets(cls, config: ScreenConfig) -> list[vf.Toolset]:
        return [ScreenToolset(config.tools)]

    @vf.reward
    async def seen(self, trace: vf.Trace) -> float:
        return float(sum(part.type == "image_url" for message in trace.tool_messages for part in message.content))


class ScreenTasksetConfig(vf.TasksetConfig):
    task: ScreenConfig = ScreenConfig()


class ScreenTaskset(vf.Taskset[ScreenTask, ScreenTasksetConfig]):
    def load(self) -> list[ScreenTask]:
        return [ScreenTask(vf.TaskData(prompt="Look."), self.config.task)]


__all__ = ["ScreenTaskset"]
"""


@pytest.mark.soak
async def test_the_model_and_the_rewards_see_images_of_tools(tmp_path: Path, shared_venvs: Path) -> None:
    (tmp_path / "screen.py").write_text(SCREEN)
    stanza = environment("screen") | {"path": str(tmp_path)}
    async with serve_verifiers(tmp_path, shared_venvs, {"screen": stanza}) as peers:
        (row,) = await rows_of(peers, "screen", "?limit=1")
        session = peers["screen"].session()
        seeded = await session.post("/seed_session", row)
        (tool,) = (tool["name"] for tool in seeded["tools"])
        text, image = parts = await session.post(f"/{tool}", {})
        assert text == {"type": "input_text", "text": "The screen:"} and image["type"] == "input_image"
        (call,) = calls((tool, {}))
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": parts}
        assert (await session.post("/verify", rollout(row, call, output, says("Red."))))["reward"] == 1.0


@pytest.mark.soak
async def test_what_cannot_be_served_is_refused_at_the_start_in_one_line(tmp_path: Path, shared_venvs: Path) -> None:
    with pytest.raises(NgymError, match="environment 'no_such_one' cannot be loaded: ModuleNotFoundError"):
        async with serve_verifiers(tmp_path, shared_venvs, {"lost": environment("no_such_one")}):
            pass
