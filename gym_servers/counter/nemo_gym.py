"""The counter with the tools and the row of NeMo Gym's example_session_state_mgmt."""

from pydantic import BaseModel

from ngym import Session, VerifyRequest, gym_server


class Increment(BaseModel):
    count: int


class CounterTask(VerifyRequest):
    initial_count: int
    expected_count: int


def value(session: Session) -> int:
    return int(session.get("count", session["task"]["initial_count"]))


async def increment_counter(body: Increment, session: Session) -> dict[str, bool]:
    """Add to this rollout's counter."""
    session["count"] = value(session) + body.count
    return {"success": True}


async def get_counter_value(session: Session) -> dict[str, int]:
    """The counter's value."""
    return {"count": value(session)}


async def verify(task: CounterTask, session: Session) -> float:
    return float(value(session) == task.expected_count)


app = gym_server(tools=[increment_counter, get_counter_value], verify=verify)
