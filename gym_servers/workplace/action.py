"""What is one call of one tool? Its arguments, and what it does to the office; its docstring is the tool's description."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ngym import ToolError

from .office import Office, Row

PersonId = Annotated[str, Field(description="A person's id, such as p03.")]
Text = Annotated[str, Field(min_length=1, max_length=2000)]


class Action(BaseModel):
    """One call of one tool."""

    model_config = ConfigDict(extra="forbid")

    def do(self, office: Office) -> Any:
        """Changes the office; what it returns is shown to the model."""
        raise NotImplementedError


def found(rows: dict[str, Row], key: str, what: str, gone: str = "") -> Row:
    if key not in rows or (gone and rows[key][gone]):
        raise ToolError(f"there is no {what} {key[:40]!r}")
    return rows[key]


def shown(rows: dict[str, Row], *hidden: str) -> list[Row]:
    return [{"id": key, **{k: v for k, v in row.items() if k not in hidden}} for key, row in rows.items()]


def people(office: Office, ids: list[str]) -> list[str]:
    for person in ids:
        found(office.people, person, "person")
    return sorted(set(ids))
