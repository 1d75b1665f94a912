"""multi_turn: a conversation with a user, scripted in the row or played by a model, in one gym session."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ngym import AgentOptions, ModelName, RolloutContext, ServiceError, agent
from ngym.convert import content_text
from ngym.errors import BadRequest, Boundary
from ngym.grading.answers import last_text, without_reasoning
from ngym.services.agents.rollout_context import act, as_items, user

DONE = "###DONE###"
USER_PROMPT = (
    "You play a person who talks to an assistant. Never leave this role and never do the assistant's work. Say one short message at a "
    "time, and only what this person would say. When the person has what they want, or cannot get it, say only {done}.\n\n{scenario}"
)


class Options(AgentOptions):
    user: ModelName | None = Field(
        default=None, description="The model that plays the user of rows with user_scenario."
    )
    max_turns: int = Field(default=8, ge=1, description="Messages of the user after the prompt, at most.")
    max_steps: int = Field(default=64, ge=1, description="Model calls in one rollout.")


async def respond(request: dict[str, Any], rollout: RolloutContext) -> dict[str, Any]:
    """Alternates user and assistant (with its tools) until the user has nothing more to say or a limit is reached."""
    options: Options = rollout.options
    prompt = as_items(request.get("input"))
    output: list[dict[str, Any]] = []
    turns = 0
    _check_user(rollout.row)
    if not prompt:
        user_turn = await _next_user_turn(rollout, [], 1)
        if user_turn is None:
            raise BadRequest(
                "the conversation has no first message: the row has neither input nor user_turns", failure="config"
            )
        output.append(user(user_turn))
        turns = 1
    while True:
        acted = await act(request, rollout, output, max_steps=options.max_steps)
        if acted.stop_reason != "answer":
            return rollout.finish(acted.response, output, acted.stop_reason)
        if turns == options.max_turns:
            return rollout.finish(acted.response, output, "max_steps")
        turns += 1
        answer = await _next_user_turn(rollout, prompt + output, turns)
        if answer is None:
            return rollout.finish(acted.response, output, "user_done")
        if rollout.turns >= options.max_steps:
            return rollout.finish(acted.response, output, "max_steps")
        output.append(user(answer))


def _check_user(row: dict[str, Any]) -> None:
    """Raise BadRequest if a row's user is not a list of texts, or a scenario."""
    script, problem = row.get("user_turns"), None
    if script and "user_scenario" in row:
        problem = "the row has user_turns and a user_scenario; only one of them can be the user"
    elif script is not None and not isinstance(script, list):
        problem = f"user_turns must be a list of texts, not {type(script).__name__}"
    elif wrong := [at for at, text in enumerate(script or []) if not isinstance(text, str) or not text.strip()]:
        problem = f"user_turns[{wrong[0]}] must be a text that is not empty"
    if problem is not None:
        raise BadRequest(problem, failure="config")


async def _next_user_turn(rollout: RolloutContext, dialogue: list[dict[str, Any]], turn: int) -> str | None:
    """The user's message in this turn (counted from 1), or None when the user has nothing more to say."""
    row = rollout.row
    script: list[str] = row.get("user_turns") or []
    if "user_scenario" not in row:
        return script[turn - 1] if turn <= len(script) else None
    options: Options = rollout.options
    if options.user is None:
        raise ServiceError(
            "the row has a user_scenario, but no model plays the user: set `user: MODEL` in the agent's stanza",
            failure="config",
        )
    request = {
        "instructions": USER_PROMPT.format(done=DONE, scenario=row["user_scenario"]),
        "input": _visible_messages(dialogue) or [user("(The assistant is ready. Begin.)")],
    }
    with Boundary("agent_error", "the user simulator failed"):
        model = rollout.peers[options.user]
        reply = await model.post("/v1/responses", request, timeout=options.model_timeout_s, idempotent=True)
    text = without_reasoning(last_text(reply)).strip()
    if not text:
        raise ServiceError(
            f"{options.user}, which plays the user, gave an empty answer", failure="agent_error", retryable=True
        )
    return None if DONE in text else text


def _visible_messages(dialogue: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The dialogue with swapped roles, for the model that plays the user; without tool calls and reasoning.

    What it has said itself is text, also where the row's prompt has images: model APIs refuse them in an answer.
    """
    messages = []
    for item in dialogue:
        if item.get("role") == "user":
            content = item["content"]
            has_image = not isinstance(content, str) and any(part["type"] == "input_image" for part in content)
            text = content_text(content) or ("(an image)" if has_image else "")
            messages.append({"role": "assistant", "content": text})
        elif item.get("role") == "assistant":
            messages.append(user(without_reasoning(last_text({"output": [item]}))))
    return messages


app = agent(respond=respond, options=Options)
