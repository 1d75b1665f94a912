"""multi_turn: a conversation with a user, scripted in the row or played by a model; the gym's session lasts through it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ngym import AgentOptions, RolloutContext, ServiceError, ServiceName, agent
from ngym.errors import BadRequest, boundary
from ngym.grading.answers import last_text, without_reasoning
from ngym.services.agents.tool_loop import act, as_items, user

DONE = "###DONE###"
USER_PROMPT = (
    "You play a person who talks to an assistant. Never leave this role and never do the assistant's work. Say one short message at a "
    "time, and only what this person would say. When the person has what they want, or cannot get it, say only {done}.\n\n{scenario}"
)


class Options(AgentOptions):
    user: ServiceName | None = Field(
        default=None, description="The model that plays the user of rows with user_scenario."
    )
    max_turns: int = Field(default=8, ge=1, description="What the user says after the prompt, at most.")
    max_steps: int = Field(default=64, ge=1, description="Model calls in one rollout.")


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    """User, assistant with its tools, user ... until the user has nothing more to say."""
    options: Options = rollout.options
    prompt = as_items(request.get("input"))
    output: list[dict[str, Any]] = []
    turns = 0
    if not prompt:
        begun = await _next(rollout, [], 1)
        if begun is None:
            raise BadRequest("nobody begins: the row has neither input nor user_turns", failure="config")
        output.append(user(begun))
        turns = 1
    while True:
        acted = await act(request, rollout, output, max_steps=options.max_steps)
        if acted.stop_reason != "answer":
            return rollout.finish(acted.response, output, acted.stop_reason)
        if turns == options.max_turns:
            return rollout.finish(acted.response, output, "max_steps")
        turns += 1
        said = await _next(rollout, prompt + output, turns)
        if said is None:
            return rollout.finish(acted.response, output, "user_done")
        output.append(user(said))


async def _next(rollout: RolloutContext, dialogue: list[dict[str, Any]], turn: int) -> str | None:
    """What the user says in this turn, counted from 1; None when they have nothing more to say."""
    row = rollout.row
    script = row.get("user_turns") or []
    if "user_scenario" not in row:
        return str(script[turn - 1]) if turn <= len(script) else None
    options: Options = rollout.options
    if options.user is None:
        raise ServiceError(
            "the row has a user_scenario, and no model plays it: give the agent `user: MODEL`", failure="config"
        )
    asked = {
        "instructions": USER_PROMPT.format(done=DONE, scenario=row["user_scenario"]),
        "input": _seen_by_the_user(dialogue) or [user("(The assistant is ready. Begin.)")],
    }
    with boundary("agent_error", "the user simulator failed"):
        model = rollout.peers[options.user]
        reply = await model.post("/v1/responses", asked, timeout=options.model_timeout_s, idempotent=True)
    said = without_reasoning(last_text(reply)).strip()
    if not said:
        raise ServiceError(f"{options.user}, which plays the user, said nothing", failure="agent_error", retryable=True)
    return None if DONE in said else said


def _seen_by_the_user(dialogue: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The dialogue from the other side: what the assistant says is put to the model, calls and reasoning are not shown."""
    turned = []
    for item in dialogue:
        if item.get("role") == "user":
            turned.append({"role": "assistant", "content": item["content"]})
        elif item.get("role") == "assistant":
            turned.append(user(without_reasoning(last_text({"output": [item]}))))
    return turned


app = agent(respond=respond, options=Options)
