"""Seeds of gymnasium's environments, and for some of them the actions that a search or a rule found; no seed of validation is trained on.

PYTHON data/gymnasium_env/generate.py [FOLDER]  # train, validation, example and gold.jsonl; default: here

PYTHON: of the server's environment (.ngym/venvs/gymnasium_env-*/bin/python).
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import gymnasium

from ngym.files.jsonl import write_rows
from ngym.files.task_rows import assistant_message, output_folder, task_row

HERE = Path(__file__).resolve().parent
TRAIN, VALIDATION = 20, 5  # seeds of each environment
INSTRUCTIONS = "You act in an environment, one action a turn. Think briefly, then say your action in the last line."
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "FrozenLake-v1": {"is_slippery": False},
    "FrozenLake8x8-v1": {"is_slippery": False},
    "Taxi-v4": {},
    "Blackjack-v1": {},
    "CliffWalking-v1": {},
    "CartPole-v1": {"max_episode_steps": 40},
    "Acrobot-v1": {},
    "MountainCar-v0": {},
    "Pendulum-v1": {"max_episode_steps": 20},
}


def row(name: str, seed: int) -> dict[str, Any]:
    params = {"input": [], "instructions": INSTRUCTIONS}
    return task_row("gymnasium_env_agent", params, env_id=name, kwargs=ENVIRONMENTS[name], seed=seed)


def shortest(name: str, seed: int) -> list[int]:
    """Breadth first over an environment with a table of transitions (`P`) that leaves nothing to chance."""
    env = gymnasium.make(name, **ENVIRONMENTS[name])
    start, _ = env.reset(seed=seed)
    waiting: deque[tuple[int, list[int]]] = deque([(int(start), [])])
    table, visited = env.unwrapped.P, {int(start)}
    best = max(reward for actions in table.values() for outcomes in actions.values() for _, _, reward, _ in outcomes)
    while waiting:
        state, path = waiting.popleft()
        for action, [(_, after, reward, over)] in table[state].items():
            if over and reward == best:
                return [*path, action]
            if not over and after not in visited and reward > -10:  # into the lake, over the cliff: no way there
                visited.add(after)
                waiting.append((after, [*path, action]))
    raise ValueError(f"{name} {seed}: there is no way")


def balanced(seed: int) -> list[int]:
    """CartPole: push to where the pole falls."""
    env = gymnasium.make("CartPole-v1", **ENVIRONMENTS["CartPole-v1"])
    observation, _ = env.reset(seed=seed)
    actions, over = [], False
    while not over:
        actions.append(int(observation[2] + 0.5 * observation[3] > 0))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        over = terminated or truncated
    return actions


def conversation(actions: list[Any]) -> list[dict[str, Any]]:
    return [assistant_message(f"So:\n{action}") for action in actions]


def case(what: str, name: str, seed: int, actions: list[Any], **expect: Any) -> dict[str, Any]:
    task = {key: row(name, seed)[key] for key in ("env_id", "kwargs", "seed")}
    return {"case": f"{what}: {name} {seed}", "task": task, "output": conversation(actions), "expect": expect}


def gold() -> list[dict[str, Any]]:
    lines = []
    for name in ("FrozenLake-v1", "FrozenLake8x8-v1"):
        way = shortest(name, 1)
        lines += [
            case("there", name, 1, way, reward=1.0, over=True),
            case("halfway", name, 1, way[:-2], reward=0.0, over=False),
        ]
    lines.append(case("no action", "FrozenLake-v1", 1, ["up", "9", "[1]"], reward=0.0, over=False))
    for seed in (1, 2):
        way = shortest("Taxi-v4", seed)
        lines.append(case("delivered", "Taxi-v4", seed, way, reward=float(20 - (len(way) - 1)), over=True))
    lines.append(case("along the cliff", "CliffWalking-v1", 1, shortest("CliffWalking-v1", 1), reward=-13.0, over=True))
    lines += [case("balanced", "CartPole-v1", seed, balanced(seed), reward=40.0, over=True) for seed in (1, 2)]
    return lines


def main(folder: Path) -> None:
    parts: dict[str, list[dict[str, Any]]] = {"validation": [], "train": [], "example": [], "gold": gold()}
    for name in ENVIRONMENTS:
        parts["validation"] += [row(name, seed) for seed in range(10_000, 10_000 + VALIDATION)]
        parts["train"] += [row(name, seed) for seed in range(1, 1 + TRAIN)]
        parts["example"].append(row(name, 10_000))
    write_rows(folder, parts)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
