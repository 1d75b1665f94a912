"""step_server(): a step-wise environment: `reset` returns the first observation, `step` the result of each turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from ngym.convert import message_item, output_text
from ngym.errors import Boundary, ServiceError, ToolError, shorten
from ngym.net.json_limits import ROW_BYTES
from ngym.schema import Json, is_reward
from ngym.services.base.app import OBJECT, STRING, JsonResponse, Lifespan, add_route, check_async, object_of
from ngym.services.base.options import ServiceOptions
from ngym.services.base.request_bodies import json_body, valid_body, validate
from ngym.services.gym.results import Observation, as_members, content_of, has_image
from ngym.services.gym.server import (
    EMPTY_RESPONSE,
    ComputeMetrics,
    RewardRange,
    VerifyRequest,
    gym_server,
    plain_number,
)
from ngym.services.gym.sessions import TASK, Session, session_for, set_task
from ngym.services.gym.tools import tool_of_function

SHOWN_CHARS = 200
SCORED_BY = "/verify"  # in the `info` of /reset: the rollout's reward is not only the sum over its steps


class Step(NamedTuple):
    """The result of a turn. `terminated`: the episode is over; `truncated`: a limit cut it off.

    An observation is a text, an `Image`, or a list of both.
    """

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Json | None = None


CONTENT: Json = {"anyOf": [STRING, {"type": "array", "items": OBJECT}]}
_STEPPED = object_of(
    {
        "observation": CONTENT,
        "reward": {"type": "number"},
        "terminated": {"type": "boolean"},
        "truncated": {"type": "boolean"},
        "info": {"type": ["object", "null"]},
    }
)


class Turn(BaseModel):
    text: str = Field(description="What you say: your next move, as the last observation asks for it.")


Reset = Callable[[Any, Session], Awaitable[Observation]]
Advance = Callable[[Any, Session], Awaitable[Step]]


def step_server(
    *,
    task: type[VerifyRequest],
    reset: Reset,
    step: Advance,
    verify: Callable[..., Any] | None = None,
    options: type[ServiceOptions] = ServiceOptions,
    lifespan: Lifespan | None = None,
    compute_metrics: ComputeMetrics | None = None,
    reward_range: RewardRange | None = None,
) -> FastAPI:
    """A step-wise environment as an application, driven by agents/gymnasium. A rollout's reward is the sum over its
    steps.

    Args:
        task: the record of a row.
        reset: `async (task, session)` -> the first observation; it stores in the session what `step` needs.
        step: `async (task, session)` -> the result of the turn whose response is in the task (`task.text`): a Step, or a
            tuple in its order.
        verify, options, lifespan, compute_metrics, reward_range: as in `gym_server`. With a `verify`, its reward replaces the sum.

    The same row and the same turns must lead to the same rewards: a stored rollout, whose session is gone, is scored by
    playing its turns again.

    Raises:
        SignatureError: `reset` or `step` is not async, or cannot be called with these arguments.
    """
    check_async(reset, "reset(task, session)")
    check_async(step, "step(task, session)")

    async def summed(body: VerifyRequest, session: Session) -> Json:
        played = session if "return" in session else await _replay(body, reset, step)
        total, steps, over = played["return"], played["steps"], played["over"]
        return {"reward": total, "reward_components": {"return": total}, "steps": steps, "over": over}

    summed.__annotations__["body"] = task
    app = gym_server(
        verify=verify or summed,
        options=options,
        lifespan=lifespan,
        compute_metrics=compute_metrics,
        replays=True,
        stateless=False,  # the state of the steps
        reward_range=reward_range,
    )
    app.state.only_by_steps = verify is None

    async def reset_route(request: Request) -> Response:
        row = await json_body(request)
        body = await valid_body(request, task, {**row, "response": EMPTY_RESPONSE}, "the row")
        session = session_for(app.state.sessions, request, start=True)
        await set_task(app.state.sessions, session, row, request)
        observation = await _begin(body, session, reset)
        return JsonResponse({"observation": content_of(observation), "info": {"scored_by": SCORED_BY}})

    async def step_route(request: Request) -> Response:
        turn = await valid_body(request, task, await json_body(request), "the row")
        session = session_for(app.state.sessions, request)
        outcome = await _advance(turn, session, step)
        fields = {"observation": content_of(outcome.observation), "info": outcome.info or {}}
        return JsonResponse({**outcome._asdict(), **fields})

    async def say(body: Turn, session: Session) -> Any:
        """Take your next turn; answers with what came of it."""
        answer = {"output": [message_item([output_text(body.text)], "msg_turn")]}
        turn = validate(task, {**session[TASK], "response": answer}, "the row")
        outcome = await _advance(turn, session, step)
        if has_image(outcome.observation):
            return [*as_members(outcome.observation), {"over": session["over"]}]
        return {"observation": outcome.observation, "over": session["over"]}

    app.state.callable["say"] = tool_of_function(say)  # only over MCP: agents take steps
    schema, once = task.model_json_schema(), app.state.idempotent.once
    post = partial(add_route, app, "POST", most_bytes=ROW_BYTES)
    began = object_of({"observation": CONTENT, "info": OBJECT})
    post("/reset", once(reset_route), summary="Begin an episode", body=OBJECT, answer=began)
    post("/step", once(step_route), summary="One turn of the model", body=schema, answer=_STEPPED)
    return app


async def _begin(task: VerifyRequest, session: Session, reset: Reset) -> Observation:
    session.failure = None  # of an earlier episode of this session
    with _play("reset failed", session):
        observation = await reset(task, session)
    session.update({"return": 0.0, "steps": 0, "over": False})
    return observation


async def _advance(turn: VerifyRequest, session: Session, step: Advance) -> Step:
    if session.get("over", True):
        raise ToolError("POST /reset first: this session has no episode, or it is over", status=409)
    with _play("step failed", session):
        outcome = _as_step(await step(turn, session))
    session["return"] += outcome.reward
    session["steps"] += 1
    session["over"] = outcome.terminated or outcome.truncated
    return outcome


def _as_step(outcome: Any) -> Step:
    """What `step` returned: a Step, or a tuple in its order, which is that of Gymnasium."""
    step = Step(*outcome) if isinstance(outcome, tuple) and 1 < len(outcome) <= len(Step._fields) else outcome
    if not isinstance(step, Step):
        fields = ", ".join(Step._fields)
        raise ServiceError(f"step returned {shorten(repr(step), SHOWN_CHARS)}; return Step({fields})")
    reward = plain_number(step.reward)
    if not is_reward(reward):
        raise ServiceError(f"step returned the reward {shorten(repr(reward), SHOWN_CHARS)}; it must be a finite number")
    if not isinstance(step.info, dict | None):
        raise ServiceError(f"step returned info of type {type(step.info).__name__}; it must be a dict or None")
    return step._replace(reward=float(reward), terminated=bool(step.terminated), truncated=bool(step.truncated))


@contextmanager
def _play(what: str, session: Session) -> Iterator[None]:
    """Turn an exception of the author's function into a failure of the environment; the session then has no reward, unless
    the caller can retry (429 and 503).
    """
    try:
        with Boundary("tool_error", what, places=True, retryable=True):
            yield
    except ServiceError as error:
        session.fail(error)
        raise


async def _replay(task: VerifyRequest, reset: Reset, step: Advance) -> Session:
    session = Session()
    await _begin(task, session, reset)
    for turn in turns_of(task.response):
        if session["over"]:
            break
        await _advance(task.model_copy(update={"response": {"output": turn}}), session, step)
    return session


def turns_of(response: Json) -> list[list[Json]]:
    """The items of a trajectory, turn by turn, without a last turn that was not stepped: it was cut off, or the limit of
    model calls left its tool calls without outputs.

    User items separate turns, which may be empty. Without any, as where all observations are empty, a second message
    begins the next turn.
    """
    output = response.get("output") or []
    turns: list[list[Json]] = [[]]
    for item in output:
        if item.get("role") == "user":
            turns.append([])
        else:
            turns[-1].append(item)
    begins_with_user = bool(output) and output[0].get("role") == "user"
    if begins_with_user:
        turns.pop(0)
    if len(turns) == 1:
        turns = _by_message(turns[0])
    elif not begins_with_user and not turns[-1]:  # after the last observation
        turns.pop()
    return turns[:-1] if response.get("status") == "incomplete" or (turns and _has_open_calls(turns[-1])) else turns


def _has_open_calls(turn: list[Json]) -> bool:
    answered_ids = {item.get("call_id") for item in turn if item.get("type") == "function_call_output"}
    return any(item.get("type") == "function_call" and item.get("call_id") not in answered_ids for item in turn)


def _by_message(items: list[Json]) -> list[list[Json]]:
    turns: list[list[Json]] = [[]]
    for item in items:
        if item.get("role") == "assistant" and any(earlier.get("role") == "assistant" for earlier in turns[-1]):
            turns.append([])
        turns[-1].append(item)
    return [turn for turn in turns if turn]
