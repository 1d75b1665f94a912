"""sql: a question, answered by a query. Reward 1 if it returns the expected rows, on hidden databases too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ngym import ServiceError, ServiceOptions, Session, ToolError, VerifyRequest, gym_server
from ngym.errors import BadRequest
from ngym.grading.answers import fenced, without_reasoning
from ngym.services.base.options import InputFolder
from ngym.workers import WorkerPool

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
QUIET = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
TOKEN = re.compile(r"[()]|\border\s+by\b", re.IGNORECASE)


class Database(BaseModel):
    """A script that fills an empty database, or a file that is opened read-only."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    script: str | None = None
    file: str | None = None


class SqlTask(VerifyRequest):
    """setup: a script for the database that the policy sees. hidden: scripts for others with the same tables.

    Instead of both, `database` names a folder of files: `{name}/{name}.sqlite` is shown, the others there are hidden.
    gold: the query. ordered: whether the order of rows counts; default: if gold has an outer ORDER BY.
    """

    setup: str | None = None
    hidden: list[str] = Field(default_factory=list)
    database: str | None = None
    gold: str
    ordered: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, row: Any) -> Any:
        """NeMo Gym's rows of BIRD (`gt_sql`) and Spider 2 (`gold_sql`) name their database in `db_id`."""
        gold = (
            next((row[name] for name in ("gt_sql", "gold_sql") if name in row), None) if isinstance(row, dict) else None
        )
        if gold is None or "gold" in row:
            return row
        order = {"ordered": not row["ignore_order"]} if isinstance(row.get("ignore_order"), bool) else {}
        return {"gold": gold, "database": row.get("db_id"), **order, **row}

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.setup is None) == (self.database is None):
            raise ValueError("a row needs either setup (a script) or database (a name)")
        if self.database is not None and not NAME.fullmatch(self.database):
            raise ValueError(f"database: {self.database!r} is not a valid folder name")
        return self

    @property
    def is_ordered(self) -> bool:
        return has_order(self.gold) if self.ordered is None else self.ordered

    def visible(self, folder: Path | None) -> dict[str, str | None]:
        """The database that the policy may query."""
        return self.all(folder)[0]

    def all(self, folder: Path | None) -> list[dict[str, str | None]]:
        """The shown database, then the hidden ones. Raises BadRequest if there is none."""
        if self.setup is not None:
            return [Database(script=script).model_dump() for script in (self.setup, *self.hidden)]
        home = (folder or Path()) / str(self.database)
        first = home / f"{self.database}.sqlite"
        if folder is None or not first.is_file():
            raise BadRequest(f"there is no database {first}: set `databases` in the stanza to their folder")
        others = sorted(path for path in home.glob("*.sqlite") if path != first)
        return [Database(file=str(path.resolve())).model_dump() for path in (first, *others)]


def has_order(sql: str) -> bool:
    """Whether the statement has an ORDER BY outside of brackets."""
    depth = 0
    for token in TOKEN.findall(QUIET.sub(" ", sql)):
        depth += (token == "(") - (token == ")")
        if depth == 0 and token not in "()":
            return True
    return False


def final_query(text: str) -> str | None:
    """The last closed code fence; without one, the whole answer if it is a query."""
    query = fenced(text)
    if query is None:
        bare = without_reasoning(text).strip()
        query = bare if re.match(r"(?:select|with)\b", bare, re.IGNORECASE) else ""
    return query.strip() or None


pool = WorkerPool(Path(__file__).with_name("execution.py"), "call", memory_mib=512)


class SqlOptions(ServiceOptions):
    databases: InputFolder | None = Field(
        default=None,
        description="Folder of `{database}/*.sqlite`, for rows that name one; relative to the config's folder.",
    )
    deadline_s: float = Field(
        default=5.0,
        description="CPU seconds for the gold query on all databases, for the policy's answer, and for each `query`.",
    )
    max_queries: int = Field(default=20, description="Per rollout.")


class Query(BaseModel):
    sql: str = Field(description="One SELECT statement in SQLite's dialect.", max_length=20_000)


async def query(body: Query, session: Session, options: SqlOptions) -> dict[str, Any]:
    """Run a SELECT on the database and see its first rows."""
    session["queries"] = session.get("queries", 0) + 1
    if session["queries"] > options.max_queries:
        raise ToolError(f"query: no more than {options.max_queries} queries; give the final answer")
    task = SqlTask.model_validate({**session["task"], "response": {"output": []}})
    ran = await pool.run("show", task.visible(options.databases), body.sql, deadline_s=options.deadline_s)
    if ran.kind != "ok":
        if ran.infra:
            raise ServiceError(f"the statement could not be run: {ran.kind}: {ran.detail}", retryable=True)
        raise ToolError(f"query: the statement was stopped: {ran.kind}")
    if "error" in ran.value:
        raise ToolError(f"query: {ran.value['error']}")
    result: dict[str, Any] = ran.value
    return result


async def verify(task: SqlTask, options: SqlOptions) -> dict[str, Any]:
    answer = final_query(task.text)
    if answer is None:
        return {"reward": 0.0, "outcome": "no_query", "extracted_answer": None}
    databases = task.all(options.databases)
    known = await pool.run("expect", databases, task.gold, deadline_s=options.deadline_s)
    if known.kind != "ok" or "error" in known.value:
        reason = known.detail if known.kind != "ok" else known.value["error"]
        return {"reward": None, "outcome": "gold_error", "reason": reason, "extracted_answer": answer}
    both_s = 2 * options.deadline_s  # the gold query runs once more, which must not take this one's time
    ran = await pool.run("grade", databases, task.gold, answer, task.is_ordered, deadline_s=both_s)
    if ran.kind != "ok":  # the gold query ended in time, this one did not
        return {**ran.failure(), "extracted_answer": answer}
    return {**ran.value, "reward": float(ran.value["outcome"] == "correct"), "extracted_answer": answer}


app = gym_server(tools=[query], verify=verify, options=SqlOptions, lifespan=pool.lifespan)
