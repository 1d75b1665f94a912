"""gymnasium: plays a turn-based environment (`/reset`, `/step`) until its episode ends or a limit is reached."""

from __future__ import annotations

import math
from typing import Any, Literal

import orjson
from pydantic import Field

from ngym import AgentOptions, RolloutContext, ServiceError, agent
from ngym.errors import Boundary
from ngym.net.json_limits import by_size, serialize
from ngym.rollout import without_tokens
from ngym.services.agents.rollout_context import act, is_content, user


class Options(AgentOptions):
    max_steps: int = Field(default=64, ge=1, description="Model calls in one rollout.")
    reward: Literal["auto", "verify", "steps"] = Field(
        default="auto",
        description="What scores a rollout. verify: the gym server's /verify. steps: the sum of the rewards of /step; "
        "for servers that have no /verify, such as those of NeMo Gym. auto: what the answer to /reset names "
        '(`info: {"scored_by": "/verify"}`), else steps.',
    )


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    """Each observation becomes a user message; each answer of the model, with its tool calls, is one step.

    Where the steps score, they also run the tools: their outputs are in `info.tool_outputs`, as with NeMo Gym.
    """
    options: Options = rollout.options
    output: list[dict[str, Any]] = []
    state = await _post(rollout, "/reset", rollout.row)
    source = "verify" if _info(state).get("scored_by") == "/verify" else "steps"
    by_steps = (source if options.reward == "auto" else options.reward) == "steps"
    total = 0.0
    while True:
        if (observation := state.get("observation")) not in (None, ""):
            is_shown = isinstance(observation, str) or is_content(observation)
            output.append(user(observation if is_shown else orjson.dumps(observation).decode()))
        begin = len(output)
        acted = await act(request, rollout, output, max_steps=options.max_steps, execute_tools=not by_steps)
        stopped = acted.stop_reason
        if stopped == "answer":
            turn = {**acted.response, "output": without_tokens(output[begin:])}
            state = await _post(rollout, "/step", {**rollout.row, "response": turn})
            if by_steps:
                total += _reward(state)
                output += [{"type": "function_call_output", **item} for item in _info(state).get("tool_outputs") or []]
            if not state["terminated"] and (state["truncated"] or rollout.turns >= options.max_steps):
                stopped = "max_steps"
        if stopped != "answer" or state["terminated"]:
            if by_steps:
                ended = {"terminated": state.get("terminated", False), "truncated": stopped != "answer"}
                rollout.scored = {"reward": total, **ended, "info": _info(state)}
            return rollout.finish(acted.response, output, stopped)


async def _post(rollout: RolloutContext, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with Boundary("tool_error", f"{path} failed"):
        raw = await by_size(rollout.request_bytes, serialize, body)
        answer = await rollout.gym.post(path, raw, timeout=rollout.options.tool_timeout_s)
    fields = {"observation"} if path == "/reset" else {"observation", "terminated", "truncated"}
    if not isinstance(answer, dict) or fields - answer.keys():
        raise ServiceError(
            f"the gym server's {path} answered without {', '.join(sorted(fields))}", failure="tool_error"
        )
    return answer


def _info(state: dict[str, Any]) -> dict[str, Any]:
    info = state.get("info")
    return info if isinstance(info, dict) else {}


def _reward(state: dict[str, Any]) -> float:
    reward = state.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ServiceError(
            f"the gym server's /step answered with reward {reward!r}, not a number", failure="tool_error"
        )
    return float(reward)


app = agent(respond=respond, options=Options, seeds=False)
