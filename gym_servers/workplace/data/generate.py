"""Jobs in an office, each in an office of its own; the gold is the list of changes that the job asks for.

python data/workplace/generate.py [FOLDER]  # train, validation, example and gold.jsonl; default: here
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, task_row, write_splits
from ngym.services.base.app import load

HERE = Path(__file__).resolve().parent
server = load(HERE.parent / "app.py")
SEED = 2026
TRAIN, VALIDATION, EXAMPLES, GOLD = 160, 40, 5, 16
TODAY = date(2027, 3, 15)
ME = "p00"
FOLDERS = ("Projects", "Archive", "Shared", "Drafts")

Call = tuple[str, dict[str, Any]]


class Job(NamedTuple):
    """A request, and the changes that fulfil it."""

    text: str
    calls: list[Call]


def day_text(day: str) -> str:
    when = date.fromisoformat(day)
    return f"{when:%A}, {when.day} {when:%B}"


def a_day(rng: random.Random, first: int = 1, last: int = 11) -> str:
    days = [TODAY + timedelta(days=n) for n in range(first, last + 1)]
    return rng.choice([day for day in days if day.weekday() < 5]).isoformat()


def somebody(rng: random.Random, office: Any) -> str:
    choice: str = rng.choice([person for person in office.people if person != ME])
    return choice


def name(office: Any, person: str) -> str:
    full_name: str = office.people[person]["name"]
    return full_name


def move_meeting(rng: random.Random, office: Any) -> Job:
    key, event = rng.choice(list(office.events.items()))
    day, hour = a_day(rng), rng.choice([h for h in range(9, 17) if f"{h:02}:00" != event["start"]])
    words = f'Move the meeting "{event["title"]}" to {day_text(day)} at {hour}:00.'
    return Job(words, [("move_event", {"event": key, "date": day, "start": f"{hour:02}:00"})])


def cancel_day(rng: random.Random, office: Any) -> Job:
    day = a_day(rng, 0, 4)
    own_meetings = [key for key, e in office.events.items() if e["date"] == day and ME in e["attendees"]]
    return Job(
        f"I am ill on {day_text(day)}: cancel every meeting that I am invited to on that day.",
        [("cancel_event", {"event": key}) for key in own_meetings],
    )


def invite_department(rng: random.Random, office: Any) -> Job:
    key, event = rng.choice(list(office.events.items()))
    department = rng.choice(("Sales", "Finance", "Design", "Support"))
    new = [p for p, row in office.people.items() if row["department"] == department and p not in event["attendees"]]
    words = f'Make sure that everybody in {department} is invited to "{event["title"]}".'
    return Job(words, [("invite_to_event", {"event": key, "person": person}) for person in new])


def first_free_hour(rng: random.Random, office: Any) -> Job:
    others = rng.sample([person for person in office.people if person != ME], 2)
    who, day = [ME, *others], a_day(rng, 0, 4)
    busy = {e["start"] for e in office.events.values() if e["date"] == day and set(e["attendees"]) & set(who)}
    start = next(f"{hour:02}:00" for hour in range(9, 17) if f"{hour:02}:00" not in busy)
    title = f"{rng.choice(('Catch-up', 'Kick-off', 'Handover', 'Check-in'))} {rng.choice(('north', 'south', 'spring', 'website'))}"
    words = f'Set up a one-hour meeting "{title}" with {name(office, others[0])} and {name(office, others[1])} on {day_text(day)}, at the first full hour from 9:00 on at which all three of us are free.'
    return Job(
        words, [("create_event", {"title": title, "date": day, "start": start, "minutes": 60, "attendees": who})]
    )


def reply_to_latest(rng: random.Random, office: Any) -> Job:
    sender = rng.choice([mail["sender"] for mail in office.mails.values()])
    key = max((k for k, m in office.mails.items() if m["sender"] == sender), key=lambda k: office.mails[k]["sent"])
    body = rng.choice(
        (
            "I will look at it tomorrow.",
            "Thank you, that is fine with me.",
            "Please call me about it.",
            "We need two more weeks.",
        )
    )
    return Job(
        f'Answer the latest mail from {name(office, sender)} with exactly this text: "{body}"',
        [("reply_to_mail", {"mail": key, "body": body})],
    )


def forward_to_manager(rng: random.Random, office: Any) -> Job:
    key, mail = rng.choice([(k, m) for k, m in office.mails.items() if office.people[m["sender"]]["manager"]])
    manager = office.people[mail["sender"]]["manager"]
    words = f'Forward the mail "{mail["subject"]}" to the manager of the person who sent it.'
    return Job(words, [("forward_mail", {"mail": key, "to": [manager]})])


def archive_sender(rng: random.Random, office: Any) -> Job:
    sender = rng.choice([mail["sender"] for mail in office.mails.values()])
    keys = [key for key, mail in office.mails.items() if mail["sender"] == sender]
    return Job(
        f"Archive all mails in my inbox from {name(office, sender)}.", [("archive_mail", {"mail": key}) for key in keys]
    )


def hand_over(rng: random.Random, office: Any) -> Job:
    who = rng.choice([task["assignee"] for task in office.tasks.values() if task["status"] == "open"])
    heir = rng.choice([person for person in office.people if person not in (who, ME)])
    keys = [key for key, task in office.tasks.items() if task["assignee"] == who and task["status"] == "open"]
    giver = "me" if who == ME else name(office, who)
    words = (
        f"Give all open tasks of {giver} to {name(office, heir)}."
        if who != ME
        else f"Give all my open tasks to {name(office, heir)}."
    )
    return Job(words, [("reassign_task", {"task": key, "assignee": heir}) for key in keys])


def put_off(rng: random.Random, office: Any) -> Job:
    department, before, day = (
        rng.choice(("Sales", "Finance", "Design", "Support")),
        a_day(rng, 0, 9),
        a_day(rng, 10, 30),
    )
    people = {person for person, row in office.people.items() if row["department"] == department}
    early = [
        k for k, t in office.tasks.items() if t["status"] == "open" and t["assignee"] in people and t["due"] < before
    ]
    words = f"Set the due date of all open tasks that people in {department} have and that are due before {day_text(before)} to {day_text(day)}."
    return Job(words, [("set_due_date", {"task": key, "due": day}) for key in early])


def task_from_mail(rng: random.Random, office: Any) -> Job:
    mail, day = rng.choice(list(office.mails.values())), a_day(rng)
    title = f"Answer {mail['subject']}"
    words = f'Create a task "{title}", due on {day_text(day)}, for the person who sent the mail "{mail["subject"]}".'
    return Job(words, [("create_task", {"title": title, "assignee": mail["sender"], "due": day})])


def close_prefix(rng: random.Random, office: Any) -> Job:
    stem = rng.choice([t["title"].rpartition(" (")[0] for t in office.tasks.values() if t["status"] == "open"])
    keys = [k for k, t in office.tasks.items() if t["title"].startswith(stem) and t["status"] == "open"]
    return Job(
        f'Mark every task whose title begins with "{stem}" as done.', [("close_task", {"task": key}) for key in keys]
    )


def share_folder(rng: random.Random, office: Any) -> Job:
    folder, person = rng.choice([row["folder"] for row in office.files.values()]), somebody(rng, office)
    keys = [key for key, row in office.files.items() if row["folder"] == folder]
    return Job(
        f"Share every file in the folder {folder} with {name(office, person)}.",
        [("share_file", {"file": key, "person": person}) for key in keys],
    )


def move_owner(rng: random.Random, office: Any) -> Job:
    owner = rng.choice([row["owner"] for row in office.files.values()])
    folder = rng.choice(FOLDERS)
    keys = [key for key, row in office.files.items() if row["owner"] == owner and row["folder"] != folder]
    owner_text = "I own" if owner == ME else f"{name(office, owner)} owns"
    return Job(
        f"Move all files that {owner_text} into the folder {folder}.",
        [("move_file", {"file": key, "folder": folder}) for key in keys],
    )


def delete_kind(rng: random.Random, office: Any) -> Job:
    stem = rng.choice([row["name"].partition("-")[0] for row in office.files.values()])
    keys = [key for key, row in office.files.items() if row["name"].startswith(f"{stem}-")]
    return Job(f'Delete all files whose name begins with "{stem}-".', [("delete_file", {"file": key}) for key in keys])


def tell_attendees(rng: random.Random, office: Any) -> Job:
    event = rng.choice([event for event in office.events.values() if set(event["attendees"]) - {ME}])
    to = [person for person in event["attendees"] if person != ME]
    body = rng.choice(
        ("The room has changed: we meet in room 4.", "Please bring your figures.", "Lunch will be there.")
    )
    words = f'Send one mail to everybody, except me, who is invited to "{event["title"]}", with the subject "{event["title"]}" and exactly this text: "{body}"'
    return Job(words, [("send_mail", {"to": to, "subject": event["title"], "body": body})])


KINDS: tuple[Callable[[random.Random, Any], Job], ...] = (
    move_meeting, cancel_day, invite_department, first_free_hour, reply_to_latest, forward_to_manager, archive_sender, hand_over,
    put_off, task_from_mail, close_prefix, share_folder, move_owner, delete_kind, tell_attendees,
)  # fmt: skip
# Two jobs come from two parts of the office: what the first changes must not change what the second means.
PART = dict(zip((kind.__name__ for kind in KINDS), (
    "calendar", "calendar", "calendar", "calendar", "mail", "mail", "mail", "tasks", "tasks", "tasks", "tasks", "files", "files", "files", "mail",
), strict=True))  # fmt: skip


def draw(rng: random.Random, number: int) -> tuple[Job, int]:
    """One job, or two from different parts of the office; each changes something, and its office."""
    while True:
        seed = rng.randrange(10**9)
        office = server.office(seed)
        first = KINDS[number % len(KINDS)]
        kinds = [first]
        if number % 3 == 2:
            kinds.append(rng.choice([kind for kind in KINDS if PART[kind.__name__] != PART[first.__name__]]))
        try:
            jobs = [kind(rng, office) for kind in kinds]
        except IndexError:  # rng.choice found nothing of the kind in this office
            continue
        if all(0 < len(job.calls) <= 6 and changed(seed, job.calls) for job in jobs):
            return Job(" Then: ".join(job.text for job in jobs), [call for job in jobs for call in job.calls]), seed


def changed(seed: int, calls: list[Call]) -> bool:
    expected = server.office(seed)
    for tool, arguments in calls:
        server.act(expected, tool, arguments)
    return bool(server.differences(server.office(seed), expected, server.office(seed))[0])


def row(job: Job, seed: int) -> dict[str, Any]:
    me = server.office(seed).people[ME]
    instructions = f"You are the assistant of {me['name']} ({ME}). Today is {day_text(TODAY.isoformat())} 2027. Do the job with the tools, and change nothing else."
    params = {"input": job.text, "instructions": instructions}
    return task_row("workplace_agent", params, office=seed, actions=[list(call) for call in job.calls])


def cases(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Done; done in the other order and told in the trajectory only; half done; something else done, too; nothing done."""
    text = task["responses_create_params"]["input"]
    own = {"office": task["office"], "actions": task["actions"]}
    calls = task["actions"]
    more = [*calls, ["create_task", {"title": "Thank you", "assignee": "p01", "due": "2027-03-20"}]]
    return [
        {"case": f"done: {text}", "task": own, "calls": calls, "text": "Done.", "expect": {"reward": 1.0}},
        {"case": f"backwards: {text}", "task": own, "calls": calls[::-1], "text": "Done.", "expect": {"reward": 1.0}},
        {"case": f"unfinished: {text}", "task": own, "calls": calls[:-1], "text": "Done.", "expect": {"reward": 0.0}},
        {"case": f"too much: {text}", "task": own, "calls": more, "text": "Done.", "expect": {"reward": 0.0}},
    ]


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    numbers = itertools.count()  # of attempts: a kind whose wordings are used up makes room for the next
    rows = draw_distinct(TRAIN + VALIDATION, lambda _: row(*draw(rng, next(numbers))), prompt_of)
    rng.shuffle(rows)
    gold = [case for task in rows[:GOLD] for case in cases(task)]
    write_splits(folder, rows, VALIDATION, EXAMPLES, gold)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
