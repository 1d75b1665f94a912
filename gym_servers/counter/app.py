"""counter: a stateful tool. Reward 1 when the model leaves the counter on the target."""

from pydantic import BaseModel, Field

from ngym import Session, VerifyRequest, gym_server


class Add(BaseModel):
    amount: int = Field(description="How much to add; may be negative.")


class CounterTask(VerifyRequest):
    target: int


async def add(body: Add, session: Session) -> dict[str, int]:
    """Add to this rollout's counter."""
    session["total"] = session.get("total", 0) + body.amount
    return {"total": session["total"]}


async def verify(task: CounterTask, session: Session) -> float:
    return float(session.get("total", 0) == task.target)


app = gym_server(tools=[add], verify=verify)
