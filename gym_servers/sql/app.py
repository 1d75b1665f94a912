"""sql: a question, answered by a query. Reward 1 when it gives the expected rows, on databases not shown as well."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from ngym import ServiceError, ServiceOptions, Session, ToolError, gym_server
from ngym.workers import WorkerPool

from .task import SqlTask, final_query

pool = WorkerPool(Path(__file__).with_name("execution.py"), "call", memory_mib=512)


class SqlOptions(ServiceOptions):
    databases: str | None = None  # folder of `{database}/*.sqlite`, for rows that name one
    deadline_s: float = 5.0  # CPU seconds for one verification, or one query of the policy's
    max_queries: int = 20  # of one rollout; further ones are refused


class Query(BaseModel):
    sql: str = Field(description="One SELECT statement in SQLite's dialect.", max_length=20_000)


async def query(body: Query, session: Session, options: SqlOptions) -> dict[str, Any]:
    """Run a SELECT on the database and see its first rows."""
    session["queries"] = session.get("queries", 0) + 1
    if session["queries"] > options.max_queries:
        raise ToolError(f"query: no more than {options.max_queries} queries; give the final answer")
    task = SqlTask.model_validate({**session["task"], "response": {"output": []}})
    ran = await pool.run("show", task.shown(options.databases), body.sql, deadline_s=options.deadline_s)
    if ran.kind != "ok":
        if ran.infra:
            raise ServiceError(f"the statement could not be run: {ran.kind}: {ran.detail}", retryable=True)
        raise ToolError(f"query: the statement was ended: {ran.kind}")
    if "error" in ran.value:
        raise ToolError(f"query: {ran.value['error']}")
    shown: dict[str, Any] = ran.value
    return shown


async def verify(task: SqlTask, options: SqlOptions) -> dict[str, Any]:
    said = final_query(task.text)
    if said is None:
        return {"reward": 0.0, "outcome": "no_query", "extracted_answer": None}
    databases = task.all(options.databases)
    known = await pool.run("expect", databases, task.gold, deadline_s=options.deadline_s)
    if known.kind != "ok" or "error" in known.value:
        reason = known.detail if known.kind != "ok" else known.value["error"]
        return {"reward": None, "outcome": "gold_error", "reason": reason, "extracted_answer": said}
    ran = await pool.run("grade", databases, task.gold, said, task.is_ordered, deadline_s=options.deadline_s)
    if ran.kind != "ok":  # the expected query ended in time and this one did not
        return {**ran.failure(), "extracted_answer": said}
    return {**ran.value, "reward": float(ran.value["outcome"] == "correct"), "extracted_answer": said}


app = gym_server(tools=[query], verify=verify, options=SqlOptions, lifespan=pool.lifespan)
