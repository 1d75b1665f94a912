"""Actions on mails."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .office import ME, TODAY, Action, Office, PersonId, Text, found, people, shown

MailId = Annotated[str, Field(description="A mail's id, such as m03.")]


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


ACTIONS = (
    SearchMails,
    ReadMail,
    SendMail,
    ReplyToMail,
    ForwardMail,
    ArchiveMail,
)
