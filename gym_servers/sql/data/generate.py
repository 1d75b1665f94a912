"""Questions about small databases, each with its query and with two more databases on which the query must hold.

python data/sql/generate.py [FOLDER]  # train, validation and example.jsonl; default: here

A row is kept if its query gives something on each database, and something else on each: no list of values passes.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, function_tool, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 48, 12, 4
HIDDEN = 2
SQL = {"type": "string", "description": "One SELECT statement in SQLite's dialect.", "maxLength": 20000}
QUERY = function_tool("query", "Run a SELECT on the database and see its first rows.", {"sql": SQL})


class Theme(NamedTuple):
    """The subject of a database: each parent has many children. Texts are in the words of a question."""

    parent: str
    parents: str
    name: str
    group: str
    groups: tuple[str, ...]
    child: str
    children: str
    amount: str
    kind: str
    kinds: tuple[str, ...]
    names: tuple[str, ...]


THEMES = (
    Theme("customer", "customers", "name", "city", ("Oslo", "Lima", "Cairo", "Perth"), "orders", "orders", "total",
          "status", ("open", "paid", "sent"), ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")),
    Theme("author", "authors", "name", "country", ("Peru", "Kenya", "Japan", "Chile"), "book", "books", "pages",
          "genre", ("novel", "poetry", "essay"), ("Ines", "Jon", "Kai", "Lea", "Mo", "Nina", "Otto", "Pia")),
    Theme("team", "teams", "title", "league", ("north", "south", "east", "west"), "player", "players", "goals",
          "position", ("keeper", "back", "forward"), ("Owls", "Foxes", "Bears", "Hawks", "Wolves", "Seals", "Crows")),
    Theme("farm", "farms", "name", "region", ("hills", "coast", "plain", "delta"), "harvest", "harvests", "tons",
          "crop", ("rye", "oats", "beets"), ("Elm", "Oak", "Ash", "Birch", "Pine", "Alder", "Hazel", "Rowan")),
    Theme("lab", "labs", "label", "campus", ("main", "river", "hill"), "sample", "samples", "mass",
          "state", ("solid", "liquid", "gas"), ("L1", "L2", "L3", "L4", "L5", "L6", "L7")),
)  # fmt: skip


class Question(NamedTuple):
    """In words, and as a query."""

    text: str
    sql: str


def setup(theme: Theme, rng: random.Random) -> str:
    """A script with both tables. Every parent has a different name; some have no children, some amounts are NULL."""
    names = rng.sample(theme.names, rng.randint(5, len(theme.names)))
    parents = [(i, name, rng.choice(theme.groups)) for i, name in enumerate(names, 1)]
    children = [
        (i, rng.randint(1, len(names) - 1), rng.choice(theme.kinds), rng.choice([*range(5, 100, 5), None]))
        for i in range(1, rng.randint(12, 18))
    ]
    return (
        f"{schema(theme)}\nINSERT INTO {theme.parent} VALUES {values(parents)};\n"
        f"INSERT INTO {theme.child} VALUES {values(children)};"
    )


def schema(theme: Theme) -> str:
    return (
        f"CREATE TABLE {theme.parent} (id INTEGER PRIMARY KEY, {theme.name} TEXT, {theme.group} TEXT);\n"
        f"CREATE TABLE {theme.child} (id INTEGER PRIMARY KEY, {theme.parent}_id INTEGER REFERENCES {theme.parent}(id), "
        f"{theme.kind} TEXT, {theme.amount} INTEGER);"
    )


def values(rows: list[tuple[Any, ...]]) -> str:
    return ", ".join("(" + ", ".join("NULL" if v is None else repr(v) for v in row) + ")" for row in rows)


def questions(t: Theme, rng: random.Random) -> list[Question]:
    group, kind, limit, few = rng.choice(t.groups), rng.choice(t.kinds), rng.randrange(20, 80, 5), rng.randint(2, 4)
    join = f"{t.parent} p JOIN {t.child} c ON c.{t.parent}_id = p.id"
    return [
        Question(f"How many {t.children} have a {t.amount} above {limit}?",
                 f"SELECT count(*) FROM {t.child} WHERE {t.amount} > {limit}"),
        Question(f"Which {t.parents} (by {t.name}) have no {t.children}?",
                 f"SELECT {t.name} FROM {t.parent} WHERE id NOT IN (SELECT {t.parent}_id FROM {t.child})"),
        Question(f"For each {t.parent} with {t.children}: its {t.name} and its sum of {t.amount}, the largest sum first "
                 f"and equal sums by {t.name}. Leave out those without any known {t.amount}.",
                 f"SELECT p.{t.name}, sum(c.{t.amount}) AS s FROM {join} WHERE c.{t.amount} IS NOT NULL "
                 f"GROUP BY p.id ORDER BY s DESC, p.{t.name}"),
        Question(f"What is the average {t.amount} of the {t.children} whose {t.kind} is '{kind}'?",
                 f"SELECT avg({t.amount}) FROM {t.child} WHERE {t.kind} = '{kind}'"),
        Question(f"Which {t.parents} (by {t.name}) have at least {few} {t.children}?",
                 f"SELECT p.{t.name} FROM {join} GROUP BY p.id HAVING count(*) >= {few}"),
        Question(f"List the ids of the {t.children} that belong to {t.parents} with {t.group} '{group}', ascending.",
                 f"SELECT c.id FROM {join} WHERE p.{t.group} = '{group}' ORDER BY c.id"),
        Question(f"Which {t.kind} do the {t.children} of each {t.group} have, and how often? "
                 f"Give {t.group}, {t.kind} and the count.",
                 f"SELECT p.{t.group}, c.{t.kind}, count(*) FROM {join} GROUP BY p.{t.group}, c.{t.kind}"),
        Question(f"Give the {t.name} of each {t.parent} and the number of its {t.children}, also where there are none.",
                 f"SELECT p.{t.name}, count(c.id) FROM {t.parent} p LEFT JOIN {t.child} c ON c.{t.parent}_id = p.id "
                 "GROUP BY p.id"),
        Question(f"How many {t.children} have no {t.amount}, for each {t.kind} where there are any? Give {t.kind} and "
                 "the count.",
                 f"SELECT {t.kind}, count(*) FROM {t.child} WHERE {t.amount} IS NULL GROUP BY {t.kind}"),
        Question(f"List {t.name} of the {t.parent} and {t.amount} for every one of the {t.children} with {t.kind} "
                 f"'{kind}' and a known {t.amount}, as often as they occur.",
                 f"SELECT p.{t.name}, c.{t.amount} FROM {join} WHERE c.{t.kind} = '{kind}' AND c.{t.amount} IS NOT NULL"),
        Question(f"What are the ids of the {few} {t.children} with the largest {t.amount}, the largest first and equal "
                 "ones by id?",
                 f"SELECT id FROM {t.child} ORDER BY {t.amount} DESC, id LIMIT {few}"),
        Question(f"Which {t.children} (by id) have a {t.amount} above the average of all {t.children}?",
                 f"SELECT id FROM {t.child} WHERE {t.amount} > (SELECT avg({t.amount}) FROM {t.child})"),
        Question(f"What share of the {t.children} has the {t.kind} '{kind}'? Give a number from 0 to 1.",
                 f"SELECT avg({t.kind} = '{kind}') FROM {t.child}"),
        Question(f"For each {t.group}, which {t.parent} (by {t.name}) comes first in the alphabet? "
                 f"Give {t.group} and {t.name}, by {t.group}.",
                 f"SELECT {t.group}, min({t.name}) FROM {t.parent} GROUP BY {t.group} ORDER BY {t.group}"),
    ]  # fmt: skip


def task(rng: random.Random, theme: Theme, ask: Callable[[list[Question]], Question]) -> dict[str, Any] | None:
    question = ask(questions(theme, rng))
    scripts = [setup(theme, rng) for _ in range(1 + HIDDEN)]
    results = [rows(script, question.sql) for script in scripts]
    if not all(results) or len({repr(result) for result in results}) < len(results):
        return None
    prompt = (
        f"{schema(theme)}\n\n{question.text}\n\nYou may try queries on the database. Answer with one SQLite SELECT in a "
        "```sql block; it is also run on other databases with these tables."
    )
    params = {"input": prompt, "tools": [QUERY]}
    return task_row("sql_agent", params, setup=scripts[0], hidden=scripts[1:], gold=question.sql)


def rows(script: str, sql: str) -> list[tuple[Any, ...]]:
    """Without the rows that say nothing."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        return [row for row in connection.execute(sql) if row not in ((None,), (0,))]


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    made = draw_distinct(TRAIN + VALIDATION, lambda _: task(rng, rng.choice(THEMES), rng.choice), prompt_of)
    write_splits(folder, made, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
