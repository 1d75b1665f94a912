"""Actions on people and meetings."""

from __future__ import annotations

from datetime import date, time
from typing import Annotated, Any

from pydantic import Field

from .office import ME, TODAY, Action, Office, PersonId, Row, Text, found, people, shown

EventId = Annotated[str, Field(description="A meeting's id, such as e03.")]


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


ACTIONS = (
    Today,
    SearchPeople,
    ListEvents,
    FindEvents,
    CreateEvent,
    MoveEvent,
    CancelEvent,
    InviteToEvent,
)
