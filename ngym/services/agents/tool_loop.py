"""One turn of an agent: sample and call tools until the model answers without a tool call."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from ngym.convert import finish_reason
from ngym.rollout import with_latest_tokens
from ngym.schema import Json, StopReason
from ngym.services.agents.rollout_context import RolloutContext


class Acted(NamedTuple):
    """The model's last response and the turn's stop reason; any reason but "answer" ends the rollout."""

    response: Json
    stop_reason: StopReason


async def act(
    request: Json, rollout: RolloutContext, output: list[Json], *, max_steps: int, execute_tools: bool = True
) -> Acted:
    """Run one turn and add the items of the model and the tools to `output`, in order.

    Args:
        request: create params; its input comes before `output`.
        max_steps: model calls of the whole rollout.
        execute_tools: if false, a response that calls tools ends the turn as an answer.
    """
    prompt = as_items(request.get("input"))
    parallel = request.get("parallel_tool_calls") is not False
    while True:
        response = await rollout.sample({**request, "input": prompt + with_latest_tokens(output)})
        output += response["output"]
        stopped = turn_stop_reason(response)
        if stopped != "answer":  # its calls, whole or not, are not run
            return Acted(response, stopped)
        calls = [item for item in response["output"] if item.get("type") == "function_call"]
        if not calls or not execute_tools:
            return Acted(response, "answer")
        if rollout.turns >= max_steps:
            return Acted(response, "max_steps")
        if parallel:
            output += await asyncio.gather(*(rollout.call_tool(call) for call in calls))
        else:
            output += [await rollout.call_tool(call) for call in calls]


def turn_stop_reason(response: Json) -> StopReason:
    """The stop reason of a response: an answer, or a cut-off turn that ends the rollout."""
    if response.get("status") != "incomplete":
        return "answer"
    return "context" if finish_reason(response) == "context" else "length"


def as_items(prompt: Any) -> list[Json]:
    """A request's `input` as items."""
    return [user(prompt)] if isinstance(prompt, str) else list(prompt or [])


def user(text: str) -> Json:
    """A user message."""
    return {"role": "user", "content": text}
