"""remote: an agent that runs as an external service. It gets the task and returns a Response, which is scored here."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ngym import AgentOptions, RolloutContext, ServiceError, ServiceName, agent
from ngym.errors import Boundary
from ngym.grading.answers import response_problem
from ngym.rollout import function_calls, without_tokens
from ngym.services.agents.rollout_context import turn_stop_reason

FORWARDED_TWICE = (
    "an agents/remote sent this task to another agents/remote, which only forwards it, perhaps in a ring; `remote` names "
    "the service that does the task"
)


class Options(AgentOptions):
    remote: ServiceName = Field(description="The stanza (kind: agent, with a url) of the external service.")
    path: str = Field(default="/run", pattern="^/", description="The path that receives the POST.")
    show: tuple[str, ...] = Field(default=(), description="Fields of the row that it receives. Leave out the answers.")
    remote_timeout_s: float = Field(default=1800, gt=0, description="For the whole task.")


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    """Send one POST. Only tokens sampled at `ng.model_base_url` count; tokens and rewards in the answer are ignored."""
    options: Options = rollout.options
    sender = rollout.row.get("ng")
    if isinstance(sender, dict) and "gym_session" in sender:
        raise ServiceError(FORWARDED_TWICE, failure="config")
    task = {
        **{name: rollout.row[name] for name in options.show if name in rollout.row},
        "responses_create_params": request,
        "ng": {
            "rollout_id": rollout.rollout_id,
            "model_base_url": rollout.model_base_url,
            "api_key": rollout.model_api_key,  # the key of the model and the gym server in a locked run
            "gym_url": rollout.gym.url,
            "gym_session": rollout.gym.id,
        },
    }
    with Boundary("agent_error", f"{options.remote} failed"):
        answer = await rollout.peers[options.remote].post(options.path, task, timeout=options.remote_timeout_s)
    response = _response(answer, options.remote)
    output = without_tokens(response["output"])
    rollout.tool_calls = len(list(function_calls(output)))
    finished = rollout.finish(response, output, turn_stop_reason(response))
    return {**finished, "usage": response.get("usage")}


def _response(answer: Any, service: str) -> dict[str, Any]:
    """The Response in an answer: the answer itself, or its field `response`."""
    if isinstance(answer, dict) and isinstance(answer.get("ng"), dict) and "schema_version" in answer["ng"]:
        raise ServiceError(
            f"{service} is an agent of ngym, whose tools and verifier ran in a session of its own; use it as an agent: "
            "{kind: agent, url: ...}, without agents/remote",
            failure="config",
        )
    response = answer.get("response", answer) if isinstance(answer, dict) else None
    fields = dict(response) if isinstance(response, dict) else {}
    if problem := response_problem(fields) or (None if fields else "its `output` must be a list of items"):
        raise ServiceError(f"{service} answered with no Response: {problem}", failure="agent_error")
    return fields


app = agent(respond=respond, options=Options)
