"""What can be done in the office: each action is a tool's arguments, its docstring is the tool's description."""

from __future__ import annotations

import re
from datetime import date, time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ngym import BadRequest, NotFound

from .office import ME, TODAY, Office, Row

PersonId = Annotated[str, Field(description="A person's id, such as p03.")]
EventId = Annotated[str, Field(description="A meeting's id, such as e03.")]
MailId = Annotated[str, Field(description="A mail's id, such as m03.")]
FileId = Annotated[str, Field(description="A file's id, such as f03.")]
TaskId = Annotated[str, Field(description="A task's id, such as t03.")]
Folder = Literal["Projects", "Archive", "Shared", "Drafts"]
Text = Annotated[str, Field(min_length=1, max_length=2000)]


class Action(BaseModel):
    """One call of one tool."""

    model_config = ConfigDict(extra="forbid")
    every: ClassVar[dict[str, type[Action]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Action.every[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()] = cls

    def do(self, office: Office) -> Any:
        """Changes the office; what it returns is shown to the model."""
        raise NotImplementedError


def _found(rows: dict[str, Row], key: str, what: str, gone: str = "") -> Row:
    if key not in rows or (gone and rows[key][gone]):
        raise NotFound(f"there is no {what} {key[:40]!r}")
    return rows[key]


def _shown(rows: dict[str, Row], *hidden: str) -> list[Row]:
    return [{"id": key, **{k: v for k, v in row.items() if k not in hidden}} for key, row in rows.items()]


def _people(office: Office, ids: list[str]) -> list[str]:
    for person in ids:
        _found(office.people, person, "person")
    return sorted(set(ids))


class Today(Action):
    """Today's date and weekday, and who you work for."""

    def do(self, office: Office) -> Any:
        return {"date": TODAY.isoformat(), "weekday": f"{TODAY:%A}", "you_work_for": ME}


class SearchPeople(Action):
    """People whose name or department contains a text; all, if it is empty. `manager` is a person's id."""

    text: str = ""

    def do(self, office: Office) -> Any:
        text = self.text.casefold()
        return [row for row in _shown(office.people) if text in f"{row['name']} {row['department']}".casefold()]


class ListEvents(Action):
    """All meetings of a day, of everybody."""

    date: date

    def do(self, office: Office) -> Any:
        return [
            e
            for e in _shown(office.events, "cancelled")
            if e["date"] == self.date.isoformat() and _takes_place(office, e)
        ]


class FindEvents(Action):
    """Meetings whose title contains a text."""

    text: Text

    def do(self, office: Office) -> Any:
        text = self.text.casefold()
        return [
            e for e in _shown(office.events, "cancelled") if text in e["title"].casefold() and _takes_place(office, e)
        ]


def _takes_place(office: Office, event: Row) -> bool:
    return not office.events[event["id"]]["cancelled"]


class CreateEvent(Action):
    """Put a meeting into the calendar."""

    title: Text
    date: date
    start: time
    minutes: int = Field(default=60, ge=5, le=600)
    attendees: list[PersonId] = Field(min_length=1, max_length=50)

    def do(self, office: Office) -> Any:
        who = _people(office, self.attendees)
        when = {"date": self.date.isoformat(), "start": f"{self.start:%H:%M}", "minutes": self.minutes}
        return {"id": office.add("events", {"title": self.title, **when, "attendees": who, "cancelled": False})}


class MoveEvent(Action):
    """Move a meeting to another day and time."""

    event: EventId
    date: date
    start: time

    def do(self, office: Office) -> Any:
        row = _found(office.events, self.event, "meeting", gone="cancelled")
        row |= {"date": self.date.isoformat(), "start": f"{self.start:%H:%M}"}
        return "moved"


class CancelEvent(Action):
    """Cancel a meeting."""

    event: EventId

    def do(self, office: Office) -> Any:
        _found(office.events, self.event, "meeting", gone="cancelled")["cancelled"] = True
        return "cancelled"


class InviteToEvent(Action):
    """Invite one more person to a meeting."""

    event: EventId
    person: PersonId

    def do(self, office: Office) -> Any:
        row = _found(office.events, self.event, "meeting", gone="cancelled")
        row["attendees"] = sorted({*row["attendees"], *_people(office, [self.person])})
        return "invited"


class SearchMails(Action):
    """Mails, latest first, whose subject or body contains a text, of one sender, in one folder; without their bodies."""

    text: str = ""
    sender: PersonId | None = None
    folder: Literal["inbox", "sent", "archive"] = "inbox"

    def do(self, office: Office) -> Any:
        text = self.text.casefold()
        hits = [m for m in _shown(office.mails) if text in f"{m['subject']} {m['body']}".casefold()]
        hits = [m for m in hits if m["folder"] == self.folder and self.sender in (None, m["sender"])]
        hits.sort(key=lambda mail: mail["sent"], reverse=True)
        return [{key: value for key, value in mail.items() if key != "body"} for mail in hits]


class ReadMail(Action):
    """A whole mail."""

    mail: MailId

    def do(self, office: Office) -> Any:
        return _found(office.mails, self.mail, "mail")


class SendMail(Action):
    """Send a mail."""

    to: list[PersonId] = Field(min_length=1, max_length=50)
    subject: Text
    body: Text

    def do(self, office: Office) -> Any:
        return _send(office, self.to, self.subject, self.body)


class ReplyToMail(Action):
    """Answer a mail's sender."""

    mail: MailId
    body: Text

    def do(self, office: Office) -> Any:
        mail = _found(office.mails, self.mail, "mail")
        return _send(office, [mail["sender"]], f"Re: {mail['subject']}", self.body)


class ForwardMail(Action):
    """Send a mail on to others, as it is."""

    mail: MailId
    to: list[PersonId] = Field(min_length=1, max_length=50)

    def do(self, office: Office) -> Any:
        mail = _found(office.mails, self.mail, "mail")
        return _send(office, self.to, f"Fwd: {mail['subject']}", mail["body"])


def _send(office: Office, to: list[str], subject: str, body: str) -> Any:
    row = {"folder": "sent", "sender": ME, "to": _people(office, to), "subject": subject, "body": body}
    return {"id": office.add("mails", {**row, "sent": f"{TODAY.isoformat()} 09:00"})}


class ArchiveMail(Action):
    """Move a mail into the archive."""

    mail: MailId

    def do(self, office: Office) -> Any:
        _found(office.mails, self.mail, "mail")["folder"] = "archive"
        return "archived"


class ListFiles(Action):
    """The files of a folder; of all, if none is named."""

    folder: Folder | None = None

    def do(self, office: Office) -> Any:
        there = {key: row for key, row in office.files.items() if not row["deleted"]}
        return [row for row in _shown(there, "deleted") if self.folder in (None, row["folder"])]


class MoveFile(Action):
    """Move a file into another folder."""

    file: FileId
    folder: Folder

    def do(self, office: Office) -> Any:
        _found(office.files, self.file, "file", gone="deleted")["folder"] = self.folder
        return "moved"


class RenameFile(Action):
    """Give a file another name."""

    file: FileId
    name: Text

    def do(self, office: Office) -> Any:
        _found(office.files, self.file, "file", gone="deleted")["name"] = self.name
        return "renamed"


class ShareFile(Action):
    """Share a file with one more person."""

    file: FileId
    person: PersonId

    def do(self, office: Office) -> Any:
        row = _found(office.files, self.file, "file", gone="deleted")
        row["shared_with"] = sorted({*row["shared_with"], *_people(office, [self.person])})
        return "shared"


class DeleteFile(Action):
    """Delete a file."""

    file: FileId

    def do(self, office: Office) -> Any:
        _found(office.files, self.file, "file", gone="deleted")["deleted"] = True
        return "deleted"


class ListTasks(Action):
    """Tasks, of one person and of one status, or all."""

    assignee: PersonId | None = None
    status: Literal["open", "done"] | None = None

    def do(self, office: Office) -> Any:
        tasks = [row for row in _shown(office.tasks) if self.assignee in (None, row["assignee"])]
        return [row for row in tasks if self.status in (None, row["status"])]


class CreateTask(Action):
    """Create an open task for somebody."""

    title: Text
    assignee: PersonId
    due: date

    def do(self, office: Office) -> Any:
        _people(office, [self.assignee])
        row = {"title": self.title, "assignee": self.assignee, "due": self.due.isoformat(), "status": "open"}
        return {"id": office.add("tasks", row)}


class CloseTask(Action):
    """Mark a task as done."""

    task: TaskId

    def do(self, office: Office) -> Any:
        _found(office.tasks, self.task, "task")["status"] = "done"
        return "done"


class ReassignTask(Action):
    """Give a task to somebody else."""

    task: TaskId
    assignee: PersonId

    def do(self, office: Office) -> Any:
        _people(office, [self.assignee])
        _found(office.tasks, self.task, "task")["assignee"] = self.assignee
        return "reassigned"


class SetDueDate(Action):
    """Set the day on which a task is due."""

    task: TaskId
    due: date

    def do(self, office: Office) -> Any:
        _found(office.tasks, self.task, "task")["due"] = self.due.isoformat()
        return "set"


def act(office: Office, tool: str, arguments: dict[str, Any] | None) -> Any:
    """Do it.

    Raises:
        BadRequest, NotFound: there is no such tool or thing; nothing has changed.
        pydantic.ValidationError: the arguments are wrong.
    """
    if tool not in Action.every or arguments is None:
        raise BadRequest(f"there is no tool {tool!r}, or its arguments are no JSON object")
    return Action.every[tool].model_validate(arguments).do(office)
