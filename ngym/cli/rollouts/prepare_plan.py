"""`ng_prepare --list` and `ng_prepare --dry-run`: the known sets, and the plan of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from ngym.config.service_config import Stanza
from ngym.config.shipped_files import shipped
from ngym.prepare.sets import PublicSet, find_sets
from ngym.runtime.live_region import aligned

if TYPE_CHECKING:
    from ngym.cli.rollouts.prepare import Mirrors

HEADER = ("NAME", "ENVIRONMENT", "ROWS", "LICENCE", "SOURCE")
TOLD = ("name", "title", "environment", "host", "repo", "revision", "licence", "rows", "note")
SEEN = (
    "Revisions, paths, fields and licences come from public records of these sets; none was downloaded where ngym is "
    "built.\nng_prepare checks each sha256 that is known, and each row with the environment's own server."
)


def show_sets(as_json: bool) -> None:
    sets = find_sets((Path.cwd(), shipped())).values()
    if as_json:
        told = [each.model_dump(mode="json", include=set(TOLD)) for each in sets]
        click.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2))
        return
    rows = [HEADER]
    for each in sets:
        count = f"{each.rows:,}" if each.rows is not None else "?"
        rows.append((each.name, each.environment, count, each.licence, f"{each.host}:{each.repo}@{each.revision[:12]}"))
    notes = [each.note for each in sets]
    for line, note in zip(aligned(rows), ["", *notes], strict=True):
        click.echo(line)
        if note:
            click.echo(f"    {note}")
    click.echo(f"\n{SEEN}")


def show_plan(chosen: PublicSet, mirrors: Mirrors, folder: Path, stanza: Stanza, as_json: bool) -> None:
    files = [
        {"url": mirrors.url(chosen, file), "path": str(path), "there": path.is_file(), "sha256": file.sha256}
        for file, path in mirrors.paths(chosen).items()
    ]
    if as_json:
        told = {"set": chosen.name, "licence": chosen.licence, "files": files, "output": str(folder)}
        click.echo(orjson.dumps({**told, "tried_on": stanza.name, "where": stanza.where}))
        return
    for file in files:
        click.echo(f"{'has it already' if file['there'] else 'would fetch'}: {file['url']}")
    click.echo(f"would check each row on {stanza.name} ({stanza.where}) and write {folder} ({chosen.licence})")
