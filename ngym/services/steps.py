"""step_server(): an environment that answers each of the model's turns: `reset` shows the start, `step` what came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import Response

from ngym.errors import ServiceError, boundary
from ngym.schema import Json
from ngym.services.app import JsonResponse, add_route, json_body, validated
from ngym.services.gym import EMPTY_RESPONSE, VerifyRequest, gym_server, session_for, with_session
from ngym.services.sessions import Session


class Step(NamedTuple):
    """What came of a turn. `terminated`: the episode is over; `truncated`: it was cut off by a limit."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Json | None = None


Reset = Callable[[Any, Session], Awaitable[str]]
Advance = Callable[[Any, Session], Awaitable[Step]]


def step_server(*, task: type[VerifyRequest], reset: Reset, step: Advance) -> FastAPI:
    """A step-wise environment as an application; agents/gymnasium drives it. A rollout's reward is the sum over its steps.

    Args:
        task: the record of a row.
        reset: `(task, session)` -> the first observation; it puts into the session what `step` needs.
        step: `(task, session)` -> what came of the turn whose response the task has (`task.text`).

    The same row and the same turns must lead to the same rewards: a stored rollout, which has no session any more, is
    scored by playing its turns again.
    """

    async def verify(body: VerifyRequest, session: Session) -> Json:
        played = session if "return" in session else await _replayed(body, reset, step)
        total, steps, over = played["return"], played["steps"], played["over"]
        return {"reward": total, "reward_components": {"return": total}, "steps": steps, "over": over}

    verify.__annotations__["body"] = task
    app = gym_server(verify=verify)

    async def reset_route(request: Request) -> Response:
        row = await json_body(request)
        begun = validated(task, {**row, "response": EMPTY_RESPONSE}, "the row")
        session = session_for(app.state.sessions, request, start=True)
        session["task"] = row
        observation = await _begin(begun, session, reset)
        return with_session(JsonResponse({"observation": observation, "info": {}}), session)

    async def step_route(request: Request) -> Response:
        turn = validated(task, await json_body(request), "the row")
        session = session_for(app.state.sessions, request)
        if session.get("over", True):
            raise ServiceError("POST /reset first: this session has no episode, or it is over", status=409)
        return JsonResponse((await _advance(turn, session, step))._asdict())

    schema = task.model_json_schema()
    add_route(app, "POST", "/reset", reset_route, summary="Begin an episode", body={"type": "object"})
    add_route(app, "POST", "/step", step_route, summary="One turn of the model", body=schema)
    return app


async def _begin(task: VerifyRequest, session: Session, reset: Reset) -> str:
    with boundary("tool_error", "reset failed"):
        observation = await reset(task, session)
    session.update({"return": 0.0, "steps": 0, "over": False})
    return observation


async def _advance(turn: VerifyRequest, session: Session, step: Advance) -> Step:
    with boundary("tool_error", "step failed"):
        outcome = await step(turn, session)
    session["return"] += outcome.reward
    session["steps"] += 1
    session["over"] = outcome.terminated or outcome.truncated
    return outcome


async def _replayed(task: VerifyRequest, reset: Reset, step: Advance) -> Session:
    session = Session()
    await _begin(task, session, reset)
    for turn in turns_of(task.response.get("output") or []):
        if session["over"]:
            break
        await _advance(task.model_copy(update={"response": {"output": turn}}), session, step)
    return session


def turns_of(output: list[Json]) -> list[list[Json]]:
    """A trajectory's items, turn by turn: what a user says ends one, and a second message begins the next."""
    turns: list[list[Json]] = [[]]
    for item in output:
        if item.get("role") == "user":
            turns.append([])
        elif item.get("role") == "assistant" and any(earlier.get("role") == "assistant" for earlier in turns[-1]):
            turns.append([item])
        else:
            turns[-1].append(item)
    return [turn for turn in turns if turn]
