"""The environments that ship: the facts that `ng_list` shows, and the README of each."""

from __future__ import annotations

import re

from ngym.cli.list import ListedEnvironment
from ngym.cli.list import environments as listed

from .markup import code, table, words
from .specimen import ROOT, Specimen

INTRO = """\
# Every environment

What `ng_list` shows, from the same files. To write your own: [environments](../environments.md).
"""


def text(specimen: Specimen) -> str:
    found = sorted((each for each in listed(()) if each.facts), key=lambda each: each.name)
    header = ("Name", "What", "Domain, kind", "Rows", "Licence")
    return "\n".join([INTRO, table(header, map(_row, found)), *map(_section, found)])


def _row(each: ListedEnvironment) -> tuple[str, ...]:
    assert each.facts is not None
    counts = [f"{each.rows[split]:,} {split}" for split in ("train", "validation") if each.rows.get(split)]
    facts = each.facts
    kinds = f"{facts.domain}, {facts.kind}"
    return (f"[{each.name}](#{each.name})", words(facts.description), kinds, "<br>".join(counts), facts.license)


def _section(each: ListedEnvironment) -> str:
    """The README without its facts, a level lower, with the sets that one would train on."""
    body = (ROOT / "gym_servers" / each.name / "README.md").read_text(encoding="utf-8").split("---\n", 2)[2]
    body = re.sub(r"^# .*$", f"## {each.name} {{#{each.name}}}", body.strip(), count=1, flags=re.MULTILINE)
    sets = each.facts.public_sets if each.facts else {}
    named = ", ".join(f"{name} ({licence})" for name, licence in sets.items())
    return f"{body}\n\n{code(each.app or '')}{'; public sets: ' + words(named) if named else ''}\n"
