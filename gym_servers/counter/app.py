"""counter: a stateful tool. Reward 1 when the model leaves the counter on the target."""

from pydantic import AliasChoices, BaseModel, Field

from ngym import Session, VerifyRequest, gym_server


class Add(BaseModel):
    amount: int = Field(description="How much to add; may be negative.")


class Increment(BaseModel):
    count: int


class Nothing(BaseModel):
    pass


class CounterTask(VerifyRequest):
    target: int = Field(validation_alias=AliasChoices("target", "expected_count"))


def total(session: Session) -> int:
    return int(session.get("total", session.get("task", {}).get("initial_count", 0)))


async def add(body: Add, session: Session) -> dict[str, int]:
    """Add to this rollout's counter."""
    session["total"] = total(session) + body.amount
    return {"total": session["total"]}


async def increment_counter(body: Increment, session: Session) -> dict[str, bool]:
    """Add to the counter, by the name and the fields of NeMo Gym's example."""
    session["total"] = total(session) + body.count
    return {"success": True}


async def get_counter_value(body: Nothing, session: Session) -> dict[str, int]:
    """The counter's value."""
    return {"count": total(session)}


async def verify(task: CounterTask, session: Session) -> float:
    return float(total(session) == task.target)


app = gym_server(tools=[add, increment_counter, get_counter_value], verify=verify)
