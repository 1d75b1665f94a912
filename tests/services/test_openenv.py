"""Servers of the real OpenEnv package as environments: their own actions turn by turn, and MCP tools."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from shipped_gym import ROOT, calls, rollout, says
from waiting import reserved_port, wait_until

from ngym.config.service_config import load_config
from ngym.errors import NgymError, ServiceError
from ngym.peers import Peer, Peers
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.venvs import find_uv, make, venv_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = "gym_servers/openenv"
BRIDGE = {"kind": "gym_server", "app": FOLDER, "requirements": f"{FOLDER}/requirements.txt"}
ROW = {"responses_create_params": {"input": []}, "reset": {"seed": 3}}  # 17 are left; the key is on the left


@contextmanager
def environment(python: Path, name: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server that someone else would run."""
    file = ROOT / FOLDER / "examples" / f"{name}.py"
    process = subprocess.Popen([python, file, "--port", str(port)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


@asynccontextmanager
async def serve_openenv(folder: Path, venvs: Path, name: str, **more: Any) -> AsyncIterator[Peers]:
    """The environment's server, and ours in front of it. more: further stanzas; under `name`: further options."""
    (folder / ".ngym").mkdir()
    (folder / ".ngym" / "venvs").symlink_to(venvs)
    with reserved_port() as port:
        bridge = {**BRIDGE, "server": f"http://127.0.0.1:{port}", "episodes": 2, **more.pop(name, {})}
        (folder / "global_config.yaml").write_text(
            json.dumps({"ngym": {"head": {"port": 0}, "ready_timeout_s": 600}, name: bridge, **more})
        )
        config = load_config([folder / "global_config.yaml"])
        venv = venv_of(config, config.stanza(name))
        assert venv is not None
        python = await make(venv, print, find_uv())
        with environment(python, name, port):
            await asyncio.to_thread(wait_until, lambda: answers(port), 600)  # its first start compiles its packages
            async with Supervisor(config) as stack:
                known = Peers(stack.urls, owner="the test")
                yield known
                await known.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peers(tmp_path_factory: pytest.TempPathFactory, shared_venvs: Path) -> AsyncIterator[Peers]:
    replies = [{"turn": 1, "text": "9"}, {"turn": 2, "text": "8"}]
    player = {"kind": "agent", "app": "agents/gymnasium", "gym": "countdown", "model": "model"}
    model = {"kind": "model", "app": "models/scripted", "replies": replies}
    folder = tmp_path_factory.mktemp("countdown")
    async with serve_openenv(folder, shared_venvs, "countdown", player=player, model=model) as known:
        yield known


async def test_our_agent_plays_it_and_the_stored_rollout_is_worth_the_same(peers: Peers) -> None:
    scored = await peers["player"].post("/run", ROW)
    user_texts = [item["content"] for item in scored["response"]["output"] if item.get("role") == "user"]
    assert "JSON object" in user_texts[0] and "17 are left" in user_texts[0] and user_texts[1:] == ["8 are left."]
    assert scored["reward"] == pytest.approx(0.99)
    assert (await peers["countdown"].post("/verify", {**ROW, "response": scored["response"]}))["reward"] == scored[
        "reward"
    ]


async def test_what_is_not_an_action_is_shown_to_the_model_and_changes_nothing(peers: Peers) -> None:
    session = peers["countdown"].session()
    await session.post("/reset", ROW)
    for text in ("take away five", '{"amount": 77}', '{"type": "call_tool", "tool_name": "x"}', ""):
        step = await session.post("/step", rollout(ROW, says(text)))
        assert "JSON object" in step["observation"] and not step["terminated"]
    fine = await session.post("/step", rollout(ROW, says('```json\n{"amount": 7}\n```')))
    assert (fine["observation"], fine["reward"]) == ("10 are left.", -0.01)
    scored = await session.post("/verify", rollout(ROW, says("x")))
    assert (scored["reward"], scored["steps"], scored["over"]) == (-0.01, 1, False)


async def test_episodes_beyond_the_servers_places_wait_until_one_is_over(peers: Peers) -> None:
    async def one(seed: int) -> Any:
        row = {**ROW, "reset": {"seed": seed}}
        session = peers["countdown"].session()
        await session.post("/reset", row)
        await session.post("/step", rollout(row, says("9")))
        return (await session.post("/verify", rollout(row, says("9"))))["reward"]

    assert await asyncio.gather(*(one(seed) for seed in range(8))) == [-0.01] * 8


@pytest.mark.soak
async def test_its_mcp_tools_are_ours_and_their_rewards_add_up(tmp_path: Path, shared_venvs: Path) -> None:
    async with serve_openenv(tmp_path, shared_venvs, "drawers", drawers={"wait_s": 1}) as peers:
        await play_drawers(peers)
        await wait_for_a_place(peers["drawers"])


async def play_drawers(peers: Peers) -> None:
    session = peers["drawers"].session()
    seeded = await session.post("/seed_session", ROW)
    assert [tool["name"] for tool in seeded["tools"]] == ["open_drawer"]
    both = await asyncio.gather(*(session.request("/open_drawer", {"which": which}) for which in ("left", "right")))
    assert [answer.body for answer in both] == [b"the key", b"nothing"]
    assert b"there is no drawer" in (await session.request("/open_drawer", {"which": "upper"})).body
    scored = await session.post("/verify", rollout(ROW, says("I have it.")))
    assert (scored["reward"], scored["steps"]) == (pytest.approx(0.8), 3)
    stored = rollout(ROW, *calls(("open_drawer", {"which": "left"})), says("I have it."))
    assert (await peers["drawers"].post("/verify", stored))["reward"] == 1.0


async def wait_for_a_place(peer: Peer) -> None:
    """A first call without a free place is refused, and succeeds in the same session when a place is free."""
    playing = [peer.session() for _ in range(2)]
    for session in playing:
        await session.post("/seed_session", ROW)
        await session.request("/open_drawer", {"which": "left"})
    async with httpx.AsyncClient(base_url=peer.url(), timeout=60) as client:
        assert (await client.post("/seed_session", json=ROW)).is_success  # the client keeps the session's cookie
        response = await client.post("/open_drawer", json={"which": "left"})
        assert response.status_code == 429 and "`episodes` is 2: raise it" in response.json()["detail"]
        await playing[0].request("/session", None, method="DELETE")
        assert (await client.post("/open_drawer", json={"which": "left"})).text == "the key"
        assert (await client.post("/verify", json=rollout(ROW, says("I have it.")))).json()["reward"] == 1.0


async def test_a_row_can_not_say_which_server_is_played(peers: Peers) -> None:
    row = {**ROW, "server": "http://127.0.0.1:1", "reset": {"seed": 3, "base_url": "http://127.0.0.1:1"}}
    session = peers["countdown"].session()
    assert "17 are left" in (await session.post("/reset", row))["observation"]
    await session.request("/session", None, method="DELETE")
    with pytest.raises(ServiceError):
        await session.post("/step", rollout(row, says("9")))


@pytest.mark.soak
async def test_a_server_that_does_not_answer_stops_the_run_in_one_line(tmp_path: Path, shared_venvs: Path) -> None:
    (tmp_path / ".ngym").mkdir()
    (tmp_path / ".ngym" / "venvs").symlink_to(shared_venvs)
    with reserved_port() as port:
        stanza = {**BRIDGE, "server": f"http://127.0.0.1:{port}"}
        (tmp_path / "global_config.yaml").write_text(
            json.dumps({"ngym": {"head": {"port": 0}, "ready_timeout_s": 600}, "gone": stanza})
        )
        with pytest.raises(NgymError, match="no OpenEnv server answers"):
            async with Supervisor(load_config([tmp_path / "global_config.yaml"])):
                pass
