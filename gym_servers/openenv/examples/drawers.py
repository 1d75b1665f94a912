"""An OpenEnv environment of MCP tools: find the key. Start it: `python drawers.py --port 8000`."""

import argparse
import random
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import CallToolAction, CallToolObservation, MCPEnvironment, Observation, State, create_app

DRAWERS = ("left", "middle", "right")


class Drawers(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._key = DRAWERS[0]
        self._has_treasure = False
        self._state = State()
        mcp = FastMCP("drawers")

        @mcp.tool
        def open_drawer(which: str) -> str:
            """Open a drawer: left, middle or right."""
            if which not in DRAWERS:
                raise ValueError(f"there is no drawer {which!r}")
            self._has_treasure = self._has_treasure or which == self._key
            return "the key" if which == self._key else "nothing"

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._key = random.Random(seed).choice(DRAWERS)
        self._has_treasure = False
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation()

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        before = self._has_treasure
        return self._with_reward(super().step(action, timeout_s, **kwargs), before)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        before = self._has_treasure
        return self._with_reward(await super().step_async(action, timeout_s, **kwargs), before)

    def _with_reward(self, observation: Observation, before: bool) -> Observation:
        if isinstance(observation, CallToolObservation):
            observation.reward = 1.0 if self._has_treasure and not before else -0.1
        return observation

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("this environment takes calls of tools")

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    app = create_app(Drawers, CallToolAction, CallToolObservation, env_name="drawers", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")
