"""An OpenEnv environment with its own action type: bring a number to zero. Start: `python countdown.py --port 8000`."""

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class Subtract(Action):
    amount: int = Field(ge=1, le=9, description="How much to take away.")


class Left(Observation):
    message: str = ""


class Countdown(Environment[Subtract, Left, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._remaining = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Left:
        self._remaining = random.Random(seed).randint(10, 30)
        self._state = State(episode_id=episode_id, step_count=0)
        return Left(message=f"{self._remaining} are left. Bring it to 0, not below.")

    def step(self, action: Subtract, timeout_s: float | None = None, **kwargs: Any) -> Left:
        self._state.step_count += 1
        self._remaining -= action.amount
        if self._remaining < 0:
            return Left(message="Below 0.", done=True, reward=-1.0)
        if self._remaining == 0:
            return Left(message="0, well done.", done=True, reward=1.0)
        return Left(message=f"{self._remaining} are left.", reward=-0.01)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--episodes", type=int, default=4)
    given = parser.parse_args()
    app = create_app(Countdown, Subtract, Left, env_name="countdown", max_concurrent_envs=given.episodes)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")
