"""Task rows, for the scripts that generate or convert the data of an environment (`gym_servers/NAME/data`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ngym.files.jsonl import write_rows
from ngym.schema import Json

Drawn = TypeVar("Drawn")
MAX_DRAWS = 100_000


def function_tool(name: str, description: str, properties: Mapping[str, Json]) -> Json:
    """The declaration of a function tool in `tools`; all its properties are required."""
    parameters = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "parameters": parameters, "strict": False}


def task_row(agent: str, params: Json, **fields: object) -> Json:
    """A row for this agent. params: of the request to the policy. fields: the environment's own."""
    agent_ref = {"type": "responses_api_agents", "name": agent}
    return {"responses_create_params": params, "agent_ref": agent_ref, **fields}


def prompt_of(row: Json) -> str:
    """The input of a row's request."""
    prompt: str = row["responses_create_params"]["input"]
    return prompt


def draw_distinct(count: int, draw: Callable[[int], Drawn | None], key: Callable[[Drawn], str]) -> list[Drawn]:
    """Draw until there are `count` with different keys. draw: receives how many there are; may return None.

    Raises:
        ValueError: MAX_DRAWS in a row brought nothing new.
    """
    distinct: dict[str, Drawn] = {}
    failures_in_a_row = 0
    while len(distinct) < count:
        if failures_in_a_row == MAX_DRAWS:
            raise ValueError(
                f"{failures_in_a_row:,} draws in a row brought nothing new: {len(distinct):,} of {count:,} are there"
            )
        before, one = len(distinct), draw(len(distinct))
        if one is not None:
            distinct.setdefault(key(one), one)
        failures_in_a_row = failures_in_a_row + 1 if len(distinct) == before else 0
    return list(distinct.values())


def write_splits(
    folder: Path, rows: Sequence[Json], validation: int, examples: int, gold: Sequence[Json] | None = None
) -> None:
    """Write validation.jsonl (the first rows), train.jsonl (the others), example.jsonl and, if given, gold.jsonl.

    Raises:
        WriteFailed: a file cannot be written.
    """
    files = {"train": rows[validation:], "validation": rows[:validation], "example": rows[:examples]}
    write_rows(folder, files if gold is None else {**files, "gold": gold})


def output_folder(doc: str | None, beside: Path) -> Path:
    """The folder that a generator's command line names; without one, that of the script.

    doc: the script's docstring.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=beside, help="written to; default: the script's own")
    folder: Path = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"{folder}: is not a folder")
    return folder


def assistant_message(text: str) -> Json:
    """An item of a response: the model's text."""
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
