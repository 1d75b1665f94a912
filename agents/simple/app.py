"""simple: ask the model, call the tools it asks for, show it the results, until it answers or a limit is reached."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from ngym import AgentOptions, RolloutContext, agent


class Options(AgentOptions):
    max_steps: int = Field(default=16, ge=1, description="Model calls in one rollout.")


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    """The tool loop. The trajectory is every item that the model or a tool produced, in order."""
    prompt = _items(request.get("input"))
    parallel = request.get("parallel_tool_calls") is not False
    output: list[dict[str, Any]] = []
    while True:
        response = await rollout.sample({**request, "input": prompt + output})
        output += response["output"]
        if response.get("status") == "incomplete":
            return rollout.finish(response, output, "length" if _said_anything(response) else "context")
        calls = [item for item in response["output"] if item.get("type") == "function_call"]
        if not calls:
            return rollout.finish(response, output, "answer")
        if rollout.turns >= rollout.options.max_steps:
            return rollout.finish(response, output, "max_steps")
        if parallel:
            output += await asyncio.gather(*(rollout.call_tool(call) for call in calls))
        else:
            output += [await rollout.call_tool(call) for call in calls]


def _items(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])


def _said_anything(response: dict[str, Any]) -> bool:
    """An incomplete response without a single token means that the prompt itself did not fit."""
    usage = response.get("usage") or {}
    return usage.get("output_tokens") != 0


app = agent(respond=respond, options=Options)
