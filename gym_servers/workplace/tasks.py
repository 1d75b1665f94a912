"""Actions on tasks."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field

from .office import Action, Office, PersonId, Text, found, people, shown

TaskId = Annotated[str, Field(description="A task's id, such as t03.")]


class ListTasks(Action):
    """Tasks, of one person and of one status, or all."""

    assignee: PersonId | None = None
    status: Literal["open", "done"] | None = None

    def do(self, office: Office) -> Any:
        tasks = [row for row in shown(office.tasks) if self.assignee in (None, row["assignee"])]
        return [row for row in tasks if self.status in (None, row["status"])]


class CreateTask(Action):
    """Create an open task for a person."""

    title: Text
    assignee: PersonId
    due: date

    def do(self, office: Office) -> Any:
        people(office, [self.assignee])
        row = {"title": self.title, "assignee": self.assignee, "due": self.due.isoformat(), "status": "open"}
        return {"id": office.add("tasks", row)}


class CloseTask(Action):
    """Mark a task as done."""

    task: TaskId

    def do(self, office: Office) -> Any:
        found(office.tasks, self.task, "task")["status"] = "done"
        return "done"


class ReassignTask(Action):
    """Assign a task to another person."""

    task: TaskId
    assignee: PersonId

    def do(self, office: Office) -> Any:
        people(office, [self.assignee])
        found(office.tasks, self.task, "task")["assignee"] = self.assignee
        return "reassigned"


class SetDueDate(Action):
    """Set the day on which a task is due."""

    task: TaskId
    due: date

    def do(self, office: Office) -> Any:
        found(office.tasks, self.task, "task")["due"] = self.due.isoformat()
        return "set"


ACTIONS = (
    ListTasks,
    CreateTask,
    CloseTask,
    ReassignTask,
    SetDueDate,
)
