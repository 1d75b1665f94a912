"""A text, a schema, a format: records whose values are given in prose. The document is generated first, so the gold answer is right.

python data/structured_outputs/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 84, 18, 5

FORMATS = ("json", "json", "yaml", "xml", "csv", "toml")
THINGS = ("order", "booking", "device", "parcel", "invoice", "contract", "vehicle", "sample")
HINTS = {
    "json": "",
    "yaml": "",
    "toml": "",
    "xml": " The root element may have any name; each member is an element in it; an array is its element, repeated for each entry.",
    "csv": " The first line names the columns; separate fields by commas.",
}
PROMPT = "{text}\n\nWrite this as {form} that fits the JSON Schema below.{hint} Write the {form} only, in one code block.\n\n{schema}"
NAMES = (
    "Ada Brandt", "Bo Lind", "Chidi Obi", "Dana Roth", "Eero Aho", "Fatima Zaki", "Goran Ilic", "Hana Mori",
    "Ivo Pavic", "Jun Park",
)  # fmt: skip
CITIES = ("Lima", "Oslo", "Kyoto", "Accra", "Quito", "Turin", "Perth", "Hanoi", "Leeds", "Izmir")
STATES = ("open", "paid", "shipped", "late", "closed", "no")
LABELS = ("fragile", "urgent", "export", "gift", "cold", "heavy", "night", "sealed")


class Field(NamedTuple):
    """A member: its schema, its value, the sentence that states it."""

    schema: dict[str, Any]
    value: Any
    sentence: str


def customer(rng: random.Random) -> Field:
    name = rng.choice(NAMES)
    return Field({"type": "string", "minLength": 1}, name, f"the customer is {name}")


def code(rng: random.Random) -> Field:
    value = "".join(rng.choices("ABCDEFGH", k=3)) + f"-{rng.randrange(10_000):04}"
    return Field({"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, value, f"the code is {value}")


def number(rng: random.Random) -> Field:
    value = f"{rng.randrange(1000):04}"
    return Field({"type": "string", "pattern": "^[0-9]{4}$"}, value, f"the locker has the four digits {value}")


def day(rng: random.Random) -> Field:
    value = date(2025, 1, 1) + timedelta(days=rng.randrange(700))
    return Field({"type": "string", "format": "date"}, value.isoformat(), f"the date is {value.day} {value:%B %Y}")


def quantity(rng: random.Random) -> Field:
    value = rng.randint(1, 400)
    return Field({"type": "integer", "minimum": 1}, value, f"the quantity is {value}")


def price(rng: random.Random) -> Field:
    value = rng.randint(100, 99_999) / 100
    return Field({"type": "number", "exclusiveMinimum": 0}, value, f"the price is {value:.2f} euros")


def insured(rng: random.Random) -> Field:
    value = rng.random() < 0.5
    return Field({"type": "boolean"}, value, "it is insured" if value else "it is not insured")


def status(rng: random.Random) -> Field:
    value = rng.choice(STATES[:5])
    return Field({"enum": list(STATES), "type": "string"}, value, f"the status is {value}")


def labels(rng: random.Random) -> Field:
    value = rng.sample(LABELS, rng.randint(2, 4))
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}
    return Field(schema, value, f"the labels are, in this order, {', '.join(value)}")


def address(rng: random.Random) -> Field:
    value = {"city": rng.choice(CITIES), "zip": f"{rng.randrange(100_000):05}"}
    properties = {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}
    schema = {"type": "object", "properties": properties, "required": ["city", "zip"], "additionalProperties": False}
    return Field(schema, value, f"it goes to {value['city']}, zip code {value['zip']}")


FLAT: dict[str, Callable[[random.Random], Field]] = {
    "customer": customer,
    "code": code,
    "locker": number,
    "date": day,
    "quantity": quantity,
    "price": price,
    "insured": insured,
    "status": status,
}
NESTED = {**FLAT, "labels": labels, "address": address}


def record(rng: random.Random, names: list[str]) -> dict[str, Field]:
    return {name: NESTED[name](rng) for name in names}


def schema_of(fields: dict[str, Field]) -> dict[str, Any]:
    properties = {name: field.schema for name, field in fields.items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def sentence(rng: random.Random, fields: dict[str, Field]) -> str:
    parts = [field.sentence for field in fields.values()]
    return "; ".join(rng.sample(parts, len(parts))) + "."


def task(rng: random.Random, form: str) -> dict[str, Any]:
    thing = rng.choice(THINGS)
    pool = FLAT if form == "csv" else NESTED
    names = rng.sample(list(pool), rng.randint(3, 6 if form != "csv" else 4))
    if form == "csv":
        records = [record(rng, names) for _ in range(rng.randint(2, 4))]
        text = "\n".join(f"{thing.capitalize()} {i}: {sentence(rng, r)}" for i, r in enumerate(records, start=1))
        schema: dict[str, Any] = {"type": "array", "items": schema_of(records[0]), "minItems": 1}
        document: Any = [{name: field.value for name, field in r.items()} for r in records]
    else:
        fields = record(rng, names)
        text, schema = f"About the {thing}: {sentence(rng, fields)}", schema_of(fields)
        document = {name: field.value for name, field in fields.items()}
    schema_str = json.dumps(schema)
    prompt = PROMPT.format(text=text, form=form.upper(), hint=HINTS[form].format(thing=thing), schema=schema_str)
    return {
        "responses_create_params": {"input": prompt},
        "agent_ref": {"type": "responses_api_agents", "name": "structured_outputs_agent"},
        "schema_str": schema_str,
        "schema_type": form,
        "expected_values": values(document),
        "reference": f"```{form}\n{WRITERS[form](document, thing)}\n```",
    }


def values(document: Any) -> dict[str, Any]:
    """JSON pointer -> value of every top-level member; of an array, every record and how many there are."""
    if isinstance(document, list):
        return {"": document}
    return {f"/{name}": value for name, value in document.items()}


def to_yaml(document: Any, thing: str) -> str:
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {json.dumps(member)}" for key, member in value.items())]
        elif isinstance(value, list):
            lines += [f"{name}:", *(f"  - {member}" for member in value)]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines)


def to_toml(document: Any, thing: str) -> str:
    plain = [f"{name} = {json.dumps(value)}" for name, value in document.items() if not isinstance(value, dict)]
    tables = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(member)}" for key, member in value.items())])
        for name, value in document.items()
        if isinstance(value, dict)
    ]
    return "\n".join(plain + tables)


def to_xml(document: Any, thing: str) -> str:
    def element(name: str, value: Any) -> str:
        if isinstance(value, list):
            return "".join(element(name, member) for member in value)
        if isinstance(value, dict):
            return f"<{name}>{''.join(element(key, member) for key, member in value.items())}</{name}>"
        return f"<{name}>{escape(value if isinstance(value, str) else json.dumps(value))}</{name}>"

    return element(thing, document)


def to_csv(document: Any, thing: str) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(document[0])
    for line in document:
        writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in line.values()])
    return out.getvalue().strip()


WRITERS: dict[str, Callable[[Any, str], str]] = {
    "json": lambda document, thing: json.dumps(document, indent=1),
    "yaml": to_yaml,
    "toml": to_toml,
    "xml": to_xml,
    "csv": to_csv,
}


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    rows = draw_distinct(TRAIN + VALIDATION, lambda count: task(rng, FORMATS[count % len(FORMATS)]), prompt_of)
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
