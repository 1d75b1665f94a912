"""workplace: jobs in an office. Reward 1 if the final office has all required changes and no others."""

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError, ValidationInfo, field_validator

from ngym import ServiceError, Session, ToolError, VerifyRequest, gym_server
from ngym.rollout import calls_in

from .office import TOOLS, Action, Office, act, changes, differences, initial_office, office

MAX_ROWS = 2000
SEED = TypeAdapter(int)  # a session has the row as it was sent: 5.0 and "5" are the office 5


class Task(VerifyRequest):
    office: int
    actions: list[tuple[str, dict[str, Any]]]

    @field_validator("actions")
    @classmethod
    def _are_a_job(cls, actions: list[tuple[str, dict[str, Any]]], info: ValidationInfo) -> Any:
        seed = info.data.get("office", 0)
        state = office(seed)
        for place, (tool, arguments) in enumerate(actions):
            try:
                act(state, tool, arguments)
            except (ToolError, ValidationError) as error:
                raise ValueError(f"actions[{place}], {tool}: {_reason(error)}") from None
        if not changes(initial_office(seed), state):
            raise ValueError("the office is the same after the actions, so that any answer would be right")
        return actions


def _reason(error: ToolError | ValidationError) -> str:
    if isinstance(error, ToolError):
        return error.detail
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def as_tool(name: str, action: type[Action]) -> Callable[..., Any]:
    """An action as a tool for gym_server: a function whose body is the action."""

    async def call(body: Action, session: Session) -> Any:
        return body.do(_office_of(session))

    call.__name__, call.__doc__ = name, action.__doc__
    call.__annotations__["body"] = action
    return call


def _office_of(session: Session) -> Office:
    if "task" not in session:
        raise ServiceError("POST /seed_session first: the office belongs to a rollout's session", status=409)
    if "office" not in session:
        session["office"] = office(SEED.validate_python(session["task"]["office"]))
    state: Office = session["office"]
    if len(state.mails) + len(state.events) + len(state.tasks) > MAX_ROWS:
        raise ToolError(f"the office is full: it holds {MAX_ROWS} mails, meetings and tasks")
    return state


async def verify(task: Task, session: Session) -> dict[str, Any]:
    expected = office(task.office)
    for tool, arguments in task.actions:
        act(expected, tool, arguments)
    got = _office_of(session) if "task" in session else await asyncio.to_thread(_replay, task)
    missing, unrequested = differences(initial_office(task.office), expected, got)
    return {
        "reward": float(not missing and not unrequested),
        "missing_changes": missing[:20],
        "unasked_changes": unrequested[:20],
    }


def _replay(task: Task) -> Office:
    """The office of a stored rollout. Time is fixed and ids are counted, so the same calls give the same state."""
    state = office(task.office)
    for call in calls_in(task.response):
        try:
            act(state, call.name, call.arguments)
        except (ToolError, ValidationError):
            continue  # this call also failed in the rollout
    return state


app = gym_server(tools=[as_tool(name, action) for name, action in TOOLS.items()], verify=verify, replays=True)
