"""gymnasium: plays a turn-based environment (`/reset`, `/step`) until its episode ends or a limit is reached."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import Field

from ngym import AgentOptions, RolloutContext, ServiceError, agent
from ngym.errors import boundary
from ngym.rollout import without_tokens
from ngym.services.agents.rollout_context import act, user


class Options(AgentOptions):
    max_steps: int = Field(default=64, ge=1, description="Model calls in one rollout.")


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    """Each observation becomes a user message; each answer of the model, with its tool calls, is one step."""
    options: Options = rollout.options
    output: list[dict[str, Any]] = []
    state = await _post(rollout, "/reset", rollout.row)
    while True:
        output.append(user(_text(state["observation"])))
        begin = len(output)
        acted = await act(request, rollout, output, max_steps=options.max_steps)
        if acted.stop_reason != "answer":
            return rollout.finish(acted.response, output, acted.stop_reason)
        turn = {**acted.response, "output": without_tokens(output[begin:])}
        state = await _post(rollout, "/step", {**rollout.row, "response": turn})
        if state["terminated"]:
            return rollout.finish(acted.response, output, "answer")
        if state["truncated"] or rollout.turns >= options.max_steps:
            return rollout.finish(acted.response, output, "max_steps")


async def _post(rollout: RolloutContext, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with boundary("tool_error", f"{path} failed"):
        answer = await rollout.gym.post(path, body, timeout=rollout.options.tool_timeout_s)
    wanted = {"observation"} if path == "/reset" else {"observation", "terminated", "truncated"}
    if not isinstance(answer, dict) or wanted - answer.keys():
        raise ServiceError(
            f"the gym server's {path} answered without {', '.join(sorted(wanted))}", failure="tool_error"
        )
    return answer


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) else orjson.dumps(observation).decode()


app = agent(respond=respond, options=Options)
