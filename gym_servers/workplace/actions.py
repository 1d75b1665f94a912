"""All actions in the office, each a tool: on people and meetings, mails, files and tasks."""

from __future__ import annotations

import re
from datetime import date, time
from typing import Annotated, Any, Literal

from pydantic import Field

from ngym import ToolError

from .office import ME, TODAY, Action, Office, PersonId, Row, Text, found, people, shown

EventId = Annotated[str, Field(description="A meeting's id, such as e03.")]
MailId = Annotated[str, Field(description="A mail's id, such as m03.")]
FileId = Annotated[str, Field(description="A file's id, such as f03.")]
Folder = Literal["Projects", "Archive", "Shared", "Drafts"]
TaskId = Annotated[str, Field(description="A task's id, such as t03.")]


class Today(Action):
    """Today's date and weekday, and who you work for."""

    def do(self, office: Office) -> Any:
        return {"date": TODAY.isoformat(), "weekday": f"{TODAY:%A}", "you_work_for": ME}


class SearchPeople(Action):
    """People whose name or department contains a text; all, if it is empty. `manager` is a person's id."""

    text: str = ""

    def do(self, office: Office) -> Any:
        text = self.text.casefold()
        return [row for row in shown(office.people) if text in f"{row['name']} {row['department']}".casefold()]


class ListEvents(Action):
    """All meetings of a day, of everybody."""

    date: date

    def do(self, office: Office) -> Any:
        return [
            e
            for e in shown(office.events, "cancelled")
            if e["date"] == self.date.isoformat() and _takes_place(office, e)
        ]


class FindEvents(Action):
    """Meetings whose title contains a text."""

    text: Text

    def do(self, office: Office) -> Any:
        text = self.text.casefold()
        return [
            e for e in shown(office.events, "cancelled") if text in e["title"].casefold() and _takes_place(office, e)
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
        who = people(office, self.attendees)
        when = {"date": self.date.isoformat(), "start": f"{self.start:%H:%M}", "minutes": self.minutes}
        return {"id": office.add("events", {"title": self.title, **when, "attendees": who, "cancelled": False})}


class MoveEvent(Action):
    """Move a meeting to another day and time."""

    event: EventId
    date: date
    start: time

    def do(self, office: Office) -> Any:
        row = found(office.events, self.event, "meeting", gone="cancelled")
        row |= {"date": self.date.isoformat(), "start": f"{self.start:%H:%M}"}
        return "moved"


class CancelEvent(Action):
    """Cancel a meeting."""

    event: EventId

    def do(self, office: Office) -> Any:
        found(office.events, self.event, "meeting", gone="cancelled")["cancelled"] = True
        return "cancelled"


class InviteToEvent(Action):
    """Invite one more person to a meeting."""

    event: EventId
    person: PersonId

    def do(self, office: Office) -> Any:
        row = found(office.events, self.event, "meeting", gone="cancelled")
        row["attendees"] = sorted({*row["attendees"], *people(office, [self.person])})
        return "invited"


class SearchMails(Action):
    """Mails, latest first, whose subject or body contains a text, of one sender, in one folder; without their bodies."""

    text: str = ""
    sender: PersonId | None = None
    folder: Literal["inbox", "sent", "archive"] = "inbox"

    def do(self, office: Office) -> Any:
        text = self.text.casefold()
        hits = [m for m in shown(office.mails) if text in f"{m['subject']} {m['body']}".casefold()]
        hits = [m for m in hits if m["folder"] == self.folder and self.sender in (None, m["sender"])]
        hits.sort(key=lambda mail: mail["sent"], reverse=True)
        return [{key: value for key, value in mail.items() if key != "body"} for mail in hits]


class ReadMail(Action):
    """A whole mail."""

    mail: MailId

    def do(self, office: Office) -> Any:
        return found(office.mails, self.mail, "mail")


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
        mail = found(office.mails, self.mail, "mail")
        return _send(office, [mail["sender"]], f"Re: {mail['subject']}", self.body)


class ForwardMail(Action):
    """Send a mail on to others, as it is."""

    mail: MailId
    to: list[PersonId] = Field(min_length=1, max_length=50)

    def do(self, office: Office) -> Any:
        mail = found(office.mails, self.mail, "mail")
        return _send(office, self.to, f"Fwd: {mail['subject']}", mail["body"])


def _send(office: Office, to: list[str], subject: str, body: str) -> Any:
    row = {"folder": "sent", "sender": ME, "to": people(office, to), "subject": subject, "body": body}
    return {"id": office.add("mails", {**row, "sent": f"{TODAY.isoformat()} 09:00"})}


class ArchiveMail(Action):
    """Move a mail into the archive."""

    mail: MailId

    def do(self, office: Office) -> Any:
        found(office.mails, self.mail, "mail")["folder"] = "archive"
        return "archived"


class ListFiles(Action):
    """The files of a folder; of all, if none is named."""

    folder: Folder | None = None

    def do(self, office: Office) -> Any:
        there = {key: row for key, row in office.files.items() if not row["deleted"]}
        return [row for row in shown(there, "deleted") if self.folder in (None, row["folder"])]


class MoveFile(Action):
    """Move a file into another folder."""

    file: FileId
    folder: Folder

    def do(self, office: Office) -> Any:
        found(office.files, self.file, "file", gone="deleted")["folder"] = self.folder
        return "moved"


class RenameFile(Action):
    """Give a file another name."""

    file: FileId
    name: Text

    def do(self, office: Office) -> Any:
        found(office.files, self.file, "file", gone="deleted")["name"] = self.name
        return "renamed"


class ShareFile(Action):
    """Share a file with one more person."""

    file: FileId
    person: PersonId

    def do(self, office: Office) -> Any:
        row = found(office.files, self.file, "file", gone="deleted")
        row["shared_with"] = sorted({*row["shared_with"], *people(office, [self.person])})
        return "shared"


class DeleteFile(Action):
    """Delete a file."""

    file: FileId

    def do(self, office: Office) -> Any:
        found(office.files, self.file, "file", gone="deleted")["deleted"] = True
        return "deleted"


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


# each action above, by its name in snake case
TOOLS = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", action.__name__).lower(): action for action in Action.__subclasses__()}


def act(office: Office, tool: str, arguments: dict[str, Any] | None) -> Any:
    """Perform an action.

    Raises:
        ToolError: the tool or a thing that it names does not exist; nothing has changed.
        pydantic.ValidationError: the arguments are wrong.
    """
    if tool not in TOOLS or arguments is None:
        raise ToolError(f"there is no tool {tool!r}, or its arguments are not a JSON object")
    return TOOLS[tool].model_validate(arguments).do(office)
