"""gym_servers/gymnasium_env with the real package: actions and observations as text, and no reward for giving up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from bridge_service import alone, serve_bridged
from click.testing import CliRunner
from shipped_gym import rollout, rows, says

from ngym.cli.validate import main
from ngym.errors import ServiceError
from ngym.peers import Peer, PeerSession

NAME = "gymnasium_env"
LAKE: dict[str, Any] = {"env_id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "seed": 1}


class Player:
    """Plays one episode over the wire, as agents/gymnasium does."""

    def __init__(self, peer: Peer, **task: Any) -> None:
        self.task = task
        self.session: PeerSession = peer.session()
        self.output: list[dict[str, Any]] = []

    async def begin(self) -> str:
        row = {"responses_create_params": {"input": []}, **self.task}
        await self.session.post("/seed_session", row)
        observation: str = (await self.session.post("/reset", row))["observation"]
        return observation

    async def say(self, text: str) -> dict[str, Any]:
        self.output.append(says(text))
        found: dict[str, Any] = await self.session.post("/step", rollout(self.task, says(text)))
        return found

    async def end(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.session.post("/verify", rollout(self.task, *self.output))
        return found


def test_ng_validate_finds_it_right(tmp_path: Path, shared_venvs: Path) -> None:
    config = alone(NAME, tmp_path, shared_venvs)
    tried = CliRunner().invoke(main, ["--config", str(config), "--environment", NAME, "--within", "60"])
    assert tried.exit_code == 0, tried.output


async def test_an_episode_is_played_in_words(tmp_path: Path, shared_venvs: Path) -> None:
    async with serve_bridged(NAME, tmp_path, shared_venvs, "max_turns=7") as peer:
        lake = Player(peer, **LAKE)
        assert "An action is a whole number from 0 to 3" in await lake.begin()
        step = await lake.say("I go down, so:\n1")
        assert "Observation: 4" in step["observation"] and "FFFH" in step["observation"]
        for action in ("\\boxed{1}", "2", "2", "1"):
            step = await lake.say(action)
        assert not step["terminated"]
        step = await lake.say("2")
        assert (step["reward"], step["terminated"]) == (1.0, True)
        assert (await lake.end())["reward"] == 1.0

        walk = Player(peer, env_id="CliffWalking-v1", seed=1)
        await walk.begin()
        for _ in range(7):
            step = await walk.say("0")
        assert step["truncated"] and "The episode is over." in step["observation"]
        assert (await walk.end())["reward"] == -7.0

        cart = Player(peer, env_id="Pendulum-v1", seed=1)
        assert "a JSON list of shape [1] of numbers from -2 to 2" in await cart.begin()
        for action in ("[0.5]", "-1.25"):
            assert (await cart.say(action))["observation"].startswith("Reward: -")
        for action in ("[3]", "[NaN]", "1e999"):
            assert (await cart.say(action))["observation"].startswith("No action: it must be a JSON list of shape [1]")


async def test_what_is_not_an_action_is_reported_and_giving_up_never_pays(tmp_path: Path, shared_venvs: Path) -> None:
    async with serve_bridged(NAME, tmp_path, shared_venvs) as peer:
        silent, walked = [await _finish_walk(peer, moves) for moves in ([], ["0", *["1"] * 11, "2"])]
        assert walked["reward"] == -13.0 > silent["reward"] and silent["reward_components"]["return"] == 0.0
        lake = Player(peer, **LAKE)
        await lake.begin()
        for number, text in enumerate(("up", "[" * 5000, "true"), 1):
            step = await lake.say(text)
            assert f"({number} of 3)" in step["observation"] and not step["terminated"]
        assert "A random one was played" in (await lake.say("4"))["observation"]
        ended = await lake.end()
        again = await peer.post("/verify", rollout(LAKE, *lake.output))  # without its session: played again
        assert (ended["reward"], ended["over"]) == (again["reward"], again["over"])


async def _finish_walk(peer: Peer, moves: list[str]) -> dict[str, Any]:
    walk = Player(peer, env_id="CliffWalking-v1", seed=1)
    await walk.begin()
    for move in moves:
        await walk.say(move)
    return await walk.end()


async def test_observations_are_shown_as_images(tmp_path: Path, shared_venvs: Path) -> None:
    async with serve_bridged(NAME, tmp_path, shared_venvs, "images=true") as peer:
        lake = Player(peer, **LAKE)
        first = await lake.begin()
        moved, refused = (await lake.say("1"))["observation"], (await lake.say("north"))["observation"]
        for observation in (first, moved, refused):
            text, image = observation
            assert "Observation: " in text["text"] and image["image_url"].startswith("data:image/png;base64,")
        assert moved[1] == refused[1] != first[1]


async def test_a_row_cannot_import_and_what_cannot_be_made_gets_a_line(tmp_path: Path, shared_venvs: Path) -> None:
    async with serve_bridged(NAME, tmp_path, shared_venvs, "allowed=[FrozenLake-v1,Taxi-v4,ALE/Pong-v5]") as peer:
        for task, complaint in (
            ({"env_id": "os:system"}, "'os:system' is not allowed here"),
            ({"env_id": "Taxi-v5"}, "did you mean 'Taxi-v4'?"),
            ({"env_id": "ALE/Pong-v5"}, "cannot be made"),
            ({"env_id": "Taxi-v4", "kwargs": {"wings": 2}}, "Taxi-v4 cannot be made: TypeError"),
        ):
            with pytest.raises(ServiceError) as caught:
                await Player(peer, seed=1, **task).begin()
            assert complaint in caught.value.detail, caught.value.detail


async def test_all_shipped_seeds_can_be_begun_at_the_same_time_by_a_service_that_has_imported_no_environment(
    tmp_path: Path, shared_venvs: Path
) -> None:
    async with serve_bridged(NAME, tmp_path, shared_venvs) as peer:
        shipped = [{key: row[key] for key in ("env_id", "kwargs", "seed")} for row in rows(NAME, "example")]
        observations = await asyncio.gather(*(Player(peer, **task).begin() for task in [*shipped, *shipped]))
        assert all("Observation: " in observation for observation in observations)
