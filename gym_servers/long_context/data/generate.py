"""Questions about documents that the server makes from a seed: any length at the same size of row. Seeded.

python data/long_context/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
python data/long_context/generate.py --inline 200 64 out.jsonl    # 200 rows, 64 pages (9,000 words) each, in the prompt
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import orjson

from ngym.config.shipped_files import app_file
from ngym.files.atomic import write_whole
from ngym.files.task_rows import function_tool, task_row, write_splits
from ngym.services.base.app import load

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 120, 32, 4

APP = load(app_file("gym_servers/long_context", HERE))
KINDS = ("needle", "variables", "counting", "state")
FORMS = {
    "needle": "the number",
    "variables": "their names, with commas between them",
    "counting": "the number",
    "state": "the room",
}
PAGE = {"description": "Which page, counted from 1.", "type": "integer"}
READ_PAGE = function_tool("read_page", "Read one page of the document.", {"page": PAGE})


def task(rng: random.Random, kind: str, pages: int, inline: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": kind, "seed": rng.randrange(10**9), "pages": pages, "facts": rng.randint(8, 24)}
    document = APP.LongTask(responses_create_params={}, response={}, **row).document
    question = f'{document.question} End with a line "Answer: ..." that has {FORMS[kind]} only.'
    if inline:
        text = "\n\n".join(document.page(page) for page in range(1, pages + 1))
        params: dict[str, Any] = {"input": f"{text}\n\n{question}"}
    else:
        params = {
            "input": f"There is a document of {pages} pages, number {row['seed']}. {question}",
            "tools": [READ_PAGE],
        }
    return task_row("long_context_agent", params, **row)


def inline(count: int, pages: int, file: Path) -> None:
    """Rows whose prompt holds the whole document."""
    rng = random.Random(SEED)
    rows = [task(rng, KINDS[i % len(KINDS)], pages, inline=True) for i in range(count)]
    write_whole(file, b"".join(orjson.dumps(row) + b"\n" for row in rows))


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    rows = [task(rng, KINDS[i % len(KINDS)], rng.randint(2, 12), inline=False) for i in range(TRAIN + VALIDATION)]
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE)
    parser.add_argument("--inline", nargs=3, metavar=("ROWS", "PAGES", "FILE"))
    given = parser.parse_args()
    if given.inline is None:
        main(given.folder)
    else:
        rows, pages, file = given.inline
        inline(int(rows), int(pages), Path(file))
