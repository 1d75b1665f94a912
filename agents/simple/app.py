"""simple: a tool loop. It calls the model and the tools that the model asks for, until an answer or a limit."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ngym import AgentOptions, RolloutContext, agent
from ngym.services.agents.rollout_context import act


class Options(AgentOptions):
    max_steps: int = Field(default=16, ge=1, description="Model calls in one rollout.")
    execute_tools: bool = Field(default=True, description="False: the rollout ends at the first tool calls.")


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    """The tool loop. The trajectory is every item that the model or a tool produced, in order."""
    options: Options = rollout.options
    output: list[dict[str, Any]] = []
    acted = await act(request, rollout, output, max_steps=options.max_steps, execute_tools=options.execute_tools)
    return rollout.finish(acted.response, output, acted.stop_reason)


app = agent(respond=respond, options=Options)
