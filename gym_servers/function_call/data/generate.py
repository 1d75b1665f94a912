"""Requests to an assistant with tools: one call, several at once, the right one of many, none. The gold is what was drawn.

python data/function_call/generate.py [FOLDER]  # train, validation, example and gold.jsonl; default: here
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES, GOLD = 72, 24, 5, 12

TOWNS = ["Bergen", "Porto", "Leeds", "Graz", "Turku", "Lyon", "Bari", "Gdansk", "Aarhus", "Ghent", "Split", "Cork"]
PEOPLE = ["Ana", "Tom", "Raj", "Mia", "Leo", "Zoe", "Ines", "Omar", "Yuki", "Nils"]
ROOMS = ("kitchen", "bedroom", "office", "bathroom", "hall")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")
LANGUAGES = ["French", "Polish", "Danish", "Greek", "Finnish", "Czech"]
PHRASES = ("good morning", "where is the station", "two coffees, please", "thank you very much", "the shop is closed")
SHOWS = ("Night Harbour", "The Glass Orchard", "Ninth Floor", "Salt and Thunder", "A Quiet Engine")


class Wish(NamedTuple):
    """An order in words, and the call that it means. missing: the same order without one required thing.

    asks_for: words that ask for that thing; each wish has its own, so that no reply asks for all of them.
    beside: words for what another wish lacks that a question for this thing may have: `Which city do you start from?`
    """

    text: str
    arguments: dict[str, Any]
    missing: str = ""
    asks_for: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


def number(description: str, kind: str = "integer", **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": description, **more}


def names(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "description": description}


def weather(rng: random.Random) -> Wish:
    town, days = rng.choice(TOWNS), rng.randint(2, 7)
    if rng.random() < 0.5:
        return Wish(
            f"get the weather forecast for {town} for today only",
            {"city": town},
            "get the weather forecast",
            ("city", "town", "where", "place", "location"),
        )
    return Wish(
        f"get a {days}-day weather forecast for {town} in fahrenheit",
        {"city": town, "days": days, "unit": "fahrenheit"},
    )


def alarm(rng: random.Random) -> Wish:
    hour, minute = rng.randint(5, 22), rng.choice((0, 5, 15, 30, 45))
    on = rng.sample(DAYS, rng.randint(0, 3))
    time = f"{hour:02}:{minute:02}"
    if not on:
        return Wish(f"set an alarm for {time}, once", {"time": time}, "set an alarm", ("time", "when", "hour"))
    return Wish(
        f"set an alarm for {time} every {' and '.join(day.title() for day in on)}", {"time": time, "repeat": on}
    )


def transfer(rng: random.Random) -> Wish:
    amount, who = round(rng.uniform(5, 900), 2), rng.choice(PEOPLE)
    if rng.random() < 0.5:
        return Wish(
            f"send {amount} euros to {who}",
            {"amount": amount, "recipient": who},
            f"send some money to {who}",
            ("amount", "euros", "how much money", "how much should", "how much do", "how much would"),
        )
    return Wish(f"send {amount} dollars to {who}", {"amount": amount, "recipient": who, "currency": "USD"})


def thermostat(rng: random.Random) -> Wish:
    room, degrees = rng.choice(ROOMS), rng.randint(30, 48) / 2
    return Wish(
        f"set the {room} to {degrees:g} degrees",
        {"room": room, "temperature": degrees},
        f"change the temperature in the {room}",
        ("temperature", "degrees", "warm", "celsius"),
    )


def table(rng: random.Random) -> Wish:
    guests, day, hour = rng.randint(2, 9), rng.choice(DAYS), rng.randint(17, 21)
    outdoors = rng.random() < 0.5
    arguments = {"guests": guests, "day": day, "hour": hour} | ({"outdoors": True} if outdoors else {})
    where = " outdoors" if outdoors else ""
    return Wish(
        f"book a table{where} for {guests} on {day.title()} at {hour}:00",
        arguments,
        f"book a table on {day.title()} at {hour}:00",
        ("people", "guests", "persons", "diners", "seats", "for how many"),
    )


def event(rng: random.Random) -> Wish:
    who, day = rng.sample(PEOPLE, rng.randint(1, 3)), rng.choice(DAYS)
    title, minutes = (
        rng.choice(("Budget", "Retrospective", "Interview", "Planning", "Review")),
        rng.choice((15, 30, 45, 60)),
    )
    arguments = {"title": title, "slot": {"day": day, "minutes": minutes}, "attendees": who}
    return Wish(
        f"put a {minutes}-minute meeting called {title} with {' and '.join(who)} on {day.title()} into the calendar",
        arguments,
    )


STARTS = (
    "start", "starting", "begin", "origin", "depart", "departing", "departure", "leaving", "where from", "from where",
)  # fmt: skip


def route(rng: random.Random) -> Wish:
    start, end = rng.sample(TOWNS, 2)
    mode = rng.choice(("car", "train", "bicycle"))
    stops = rng.sample([town for town in TOWNS if town not in (start, end)], rng.randint(0, 2))
    arguments = {"start": start, "end": end, "mode": mode} | ({"via": stops} if stops else {})
    via = f" via {' and then '.join(stops)}" if stops else ""
    return Wish(
        f"plan a route by {mode} from {start} to {end}{via}",
        arguments,
        f"plan a route by {mode} to {end}",
        STARTS,
        ("city", "location", "place", "town"),
    )


def translate(rng: random.Random) -> Wish:
    phrase, language = rng.choice(PHRASES), rng.choice(LANGUAGES)
    return Wish(
        f'translate "{phrase}" into {language}',
        {"text": phrase, "language": language},
        f'translate "{phrase}"',
        ("language",),
    )


def recording(rng: random.Random) -> Wish:
    show, season = rng.choice(SHOWS), rng.randint(1, 8)
    return Wish(
        f"record season {season} of {show}", {"show": show, "season": season}, f"record a season of {show}", ("season",)
    )


def loan(rng: random.Random) -> Wish:
    amount, rate, years = rng.randint(10, 400) * 1000, rng.randint(10, 79) / 10, rng.randint(2, 30)
    return Wish(
        f"work out the monthly payment for a loan of {amount} at {rate} percent over {years} years",
        {"principal": amount, "rate_percent": rate, "years": years},
        f"work out the monthly payment for a loan of {amount} over {years} years",
        ("rate", "interest", "percent"),
    )


class Tool(NamedTuple):
    wish: Callable[[random.Random], Wish]
    description: str
    properties: dict[str, Any]
    required: tuple[str, ...]


TOOLS = {
    "get_forecast": Tool(weather, "The weather forecast of a city.", {"city": text("City."), "days": number("How many days.", default=1), "unit": text("Unit.", enum=["celsius", "fahrenheit"], default="celsius")}, ("city",)),
    "set_alarm": Tool(alarm, "Set an alarm.", {"time": text("HH:MM, 24 hours."), "repeat": {"type": "array", "items": {"type": "string", "enum": list(DAYS)}, "uniqueItems": True, "default": [], "description": "Days on which it repeats."}}, ("time",)),
    "transfer_money": Tool(transfer, "Send money to somebody.", {"amount": number("How much.", "number"), "recipient": text("To whom."), "currency": text("ISO code.", enum=["EUR", "USD", "GBP"], default="EUR")}, ("amount", "recipient")),
    "set_temperature": Tool(thermostat, "Set a room's temperature.", {"room": text("Room.", enum=list(ROOMS)), "temperature": number("Degrees Celsius.", "number")}, ("room", "temperature")),
    "book_table": Tool(table, "Book a table in the restaurant.", {"guests": number("How many people."), "day": text("Weekday.", enum=list(DAYS)), "hour": number("Hour of the day, 0-23."), "outdoors": {"type": "boolean", "default": False}}, ("guests", "day", "hour")),
    "create_event": Tool(event, "Create a calendar event.", {"title": text("Title."), "slot": {"type": "object", "properties": {"day": text("Weekday.", enum=list(DAYS)), "minutes": number("Length.")}, "required": ["day", "minutes"]}, "attendees": names("First names.")}, ("title", "slot", "attendees")),
    "plan_route": Tool(route, "Plan a route between two places.", {"start": text("From."), "end": text("To."), "mode": text("Means.", enum=["car", "train", "bicycle"]), "via": {"type": "array", "items": {"type": "string"}, "default": [], "description": "Stops, in order."}}, ("start", "end", "mode")),
    "translate_text": Tool(translate, "Translate a text.", {"text": text("What to translate."), "language": text("Into which language, by its English name.")}, ("text", "language")),
    "record_show": Tool(recording, "Record a season of a show.", {"show": text("Its name."), "season": number("Season number.")}, ("show", "season")),
    "monthly_payment": Tool(loan, "The monthly payment of a loan.", {"principal": number("Amount.", "number"), "rate_percent": number("Yearly rate in percent.", "number"), "years": number("Term in years.")}, ("principal", "rate_percent", "years")),
}  # fmt: skip

QUESTION_WORDS = ("where", "when")  # they ask for a thing, and are in questions for others, too


def all_asked() -> list[str]:
    """Every field that a request may lack, in all words for it."""
    wishes = [tool.wish(random.Random(seed)) for tool in TOOLS.values() for seed in range(20)]
    return sorted({word for wish in wishes for word in wish.asks_for})


ASKED = all_asked()


def declared(name: str) -> dict[str, Any]:
    tool = TOOLS[name]
    parameters = {
        "type": "object",
        "properties": tool.properties,
        "required": list(tool.required),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "name": name,
        "description": tool.description,
        "parameters": parameters,
        "strict": False,
    }


def row(kind: str, question: str, tools: list[str], calls: list[tuple[str, Wish]], **more: Any) -> dict[str, Any]:
    params = {"input": question, "tools": [declared(name) for name in tools]}
    expected = [{"name": name, "arguments": wish.arguments} for name, wish in calls]
    return task_row("function_call_agent", params, kind=kind, expected_calls=expected, **more)


def user_text(wishes: list[str], rng: random.Random) -> str:
    """One order or several, in one sentence."""
    before, after = rng.choice((("Please ", "."), ("Could you ", "?"), ("I would like you to ", "."), ("Now ", ".")))
    *first, last = wishes
    return before + (", then ".join(first) + " and also " if first else "") + last + after


def single(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(list(TOOLS))
    wish = TOOLS[name].wish(rng)
    return row("single", user_text([wish.text], rng), [name], [(name, wish)])


def multiple(rng: random.Random) -> dict[str, Any]:
    tools = rng.sample(list(TOOLS), rng.randint(3, 5))
    name = rng.choice(tools)
    wish = TOOLS[name].wish(rng)
    return row("multiple", user_text([wish.text], rng), tools, [(name, wish)])


def parallel(rng: random.Random) -> dict[str, Any]:
    tools = rng.sample(list(TOOLS), rng.randint(2, 4))
    calls: dict[str, tuple[str, Wish]] = {}
    while len(calls) < 2 or (len(calls) < 3 and rng.random() < 0.5):
        name = rng.choice(tools)
        wish = TOOLS[name].wish(rng)
        calls.setdefault(wish.text, (name, wish))
    return row("parallel", user_text(list(calls), rng), tools, list(calls.values()))


def none_needed(rng: random.Random) -> dict[str, Any]:
    tools = rng.sample(list(TOOLS), rng.randint(2, 4))
    a, b, c = rng.randint(3, 40), rng.randint(3, 40), rng.randint(2, 9)
    question, answer = rng.choice(
        (
            (f"How many seats are there in {a} rows of {b} seats?", a * b),
            (f"{rng.choice(PEOPLE)} had {a + b} stamps and gave away {a}. How many are left?", b),
            (f"What is {a} plus {b}, times {c}, if the sum is taken first?", (a + b) * c),
        )
    )
    return row("no call", question, tools, [], expected_answer=answer)


def impossible(rng: random.Random) -> dict[str, Any]:
    """Something that the call needs was not said: ask, do not invent it."""
    while True:
        name = rng.choice(list(TOOLS))
        wish = TOOLS[name].wish(rng)
        if wish.missing:
            tools = [*rng.sample([other for other in TOOLS if other != name], rng.randint(0, 2)), name]
            question = user_text([wish.missing], rng)
            return row("missing", question, tools, [], asks_for=list(wish.asks_for), not_for=others(wish, question))


def others(wish: Wish, question: str) -> list[str]:
    """The words for what other wishes lack, without those that the order itself has: it may be said again."""
    known = {*wish.asks_for, *wish.beside, *QUESTION_WORDS, *re.findall(r"\w+", question.casefold())}
    return [word for word in ASKED if word not in known]


KINDS = (single, multiple, parallel, parallel, none_needed, impossible)


def cases(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The gold, and what is less."""
    question = task["responses_create_params"]["input"]
    own = {key: value for key, value in task.items() if key != "agent_ref"}
    if task["expected_calls"]:
        calls = [
            {
                "type": "function_call",
                "call_id": f"c{i}",
                "name": call["name"],
                "arguments": orjson.dumps(call["arguments"]).decode(),
            }
            for i, call in enumerate(task["expected_calls"])
        ]
        count = len(calls)
        return [
            {"case": f"gold: {question}", "task": own, "output": calls[::-1], "expect": {"reward": 1.0}},
            {"case": f"one too many: {question}", "task": own, "output": [*calls, calls[0]], "expect": {"reward": 0.2 * count / (count + 1) + 0.8 * count / (count + 1)}},
            {"case": f"no call: {question}", "task": own, "text": "Done.", "expect": {"reward": 0.0}},
        ]  # fmt: skip
    text = f"Which {task['asks_for'][0]}?" if "asks_for" in task else f"That is {task['expected_answer']}."
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": task["responses_create_params"]["tools"][0]["name"],
        "arguments": "{}",
    }
    return [
        {"case": f"gold: {question}", "task": own, "text": text, "expect": {"reward": 1.0}},
        {"case": f"called: {question}", "task": own, "output": [call, {"type": "message", "role": "assistant", "content": text}], "expect": {"reward": 0.0}},
    ]  # fmt: skip


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    rows = draw_distinct(TRAIN + VALIDATION, lambda count: KINDS[count % len(KINDS)](rng), prompt_of)
    rng.shuffle(rows)
    gold = [case for task in rows[:GOLD] for case in cases(task)]
    write_splits(folder, rows, VALIDATION, EXAMPLES, gold)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
