"""A question about a database, the query that answers it, and databases on which a right query must be right, too."""

import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ngym import VerifyRequest
from ngym.errors import BadRequest
from ngym.grading.answers import fenced, without_reasoning

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
QUIET = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
TOKEN = re.compile(r"[()]|\border\s+by\b", re.IGNORECASE)


class Database(BaseModel):
    """Either a script that fills an empty database, or a file that is opened for reading."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    script: str | None = None
    file: str | None = None


class SqlTask(VerifyRequest):
    """setup: a script for the database that the policy sees; hidden: for others with the same tables.

    Instead of both, `database` names a folder of files: `{name}/{name}.sqlite` is seen, the others there are hidden.
    gold: the query. ordered: whether the order of rows counts; by default it does where gold has an ORDER BY.
    """

    setup: str | None = None
    hidden: list[str] = Field(default_factory=list)
    database: str | None = None
    gold: str
    ordered: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.setup is None) == (self.database is None):
            raise ValueError("wanted either setup (a script) or database (a name)")
        if self.database is not None and not NAME.fullmatch(self.database):
            raise ValueError(f"database: {self.database!r} is no name of a folder")
        return self

    @property
    def is_ordered(self) -> bool:
        return has_order(self.gold) if self.ordered is None else self.ordered

    def shown(self, folder: str | None) -> dict[str, str | None]:
        """The database that the policy may query."""
        return self.all(folder)[0]

    def all(self, folder: str | None) -> list[dict[str, str | None]]:
        """That one, then the hidden ones. BadRequest if there is none."""
        if self.setup is not None:
            return [Database(script=script).model_dump() for script in (self.setup, *self.hidden)]
        home = Path(folder or "") / str(self.database)
        first = home / f"{self.database}.sqlite"
        if folder is None or not first.is_file():
            raise BadRequest(f"there is no database {first}: `databases` in the stanza names their folder")
        others = sorted(path for path in home.glob("*.sqlite") if path != first)
        return [Database(file=str(path.resolve())).model_dump() for path in (first, *others)]


def has_order(sql: str) -> bool:
    """Whether the statement itself, and not a part in brackets, has an ORDER BY."""
    depth = 0
    for token in TOKEN.findall(QUIET.sub(" ", sql)):
        depth += (token == "(") - (token == ")")
        if depth == 0 and token not in "()":
            return True
    return False


def final_query(text: str) -> str | None:
    """The last closed code fence; without one, the answer itself if it is a query."""
    found = fenced(text)
    if found is None:
        bare = without_reasoning(text).strip()
        found = bare if re.match(r"(?:select|with)\b", bare, re.IGNORECASE) else ""
    return found.strip() or None
