"""`ng_prepare`: a public set, fetched at its pinned revision, becomes rows that its environment's server has accepted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ngym.cli.main import command
from ngym.errors import NgymError, UsageError

if TYPE_CHECKING:
    from ngym.config import Config, Stanza
    from ngym.prepare import File, PublicSet
    from ngym.prepare.rows import Converted
    from ngym.prepare.sets import Split
    from ngym.supervise.launcher import Launcher

DEFAULT = Path("global_config.yaml")
SHOWN = 8  # reasons for what was left out
HEADER = ("NAME", "ENVIRONMENT", "ROWS", "LICENCE", "SOURCE")
SEEN = (
    "Revisions, paths, fields and licences were read in public records of these sets; none was downloaded where ngym is "
    "built.\nng_prepare checks each sha256 that is known, and each row with the environment's own server."
)
EXIT_CODES = """\
Exit codes: 0  train.jsonl, validation.jsonl and manifest.json are written
            1  the set could not be fetched, or none of its records made a row
            2  the command, the config or a file is wrong"""


@command("ng_prepare", epilog=EXIT_CODES)
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="Show the sets there are; nothing is fetched.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Where to put it. [default: data/NAME]")
@click.option(
    "--revision", metavar="REV", help="Another commit than the pinned one (40 hex digits): no sha256 is known."
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N rows of each split.")
@click.option(
    "--cache", type=click.Path(path_type=Path), default=Path(".ngym/downloads"), show_default=True, metavar="DIR",
    help="Where downloads stay; a file that lies there is not fetched.",
)  # fmt: skip
@click.option(
    "--hub", envvar="HF_ENDPOINT", show_envvar=True, default="https://huggingface.co", show_default=True, metavar="URL",
    help="The Hugging Face hub, or a mirror.",
)  # fmt: skip
@click.option("--hub-token", envvar="HF_TOKEN", show_envvar=True, metavar="TOKEN", help="For gated sets of the hub.")
@click.option(
    "--github", default="https://raw.githubusercontent.com", show_default=True, metavar="URL",
    help="GitHub's files, or a mirror.",
)  # fmt: skip
@click.option(
    "--config", "configs", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    help="A config with the environment. [default: global_config.yaml, if it is there, else as shipped]",
)  # fmt: skip
def main(
    name: str | None,
    listed: bool,
    output: Path | None,
    revision: str | None,
    limit: int | None,
    cache: Path,
    hub: str,
    hub_token: str | None,
    github: str,
    configs: tuple[Path, ...],
) -> None:
    """Fetch a public set by NAME, make rows of it, and try each on the environment's server.

    What the server refuses, and what does not pay for the set's own answer, is left out and counted.
    """
    if listed or name is None:
        _list()
        return
    from ngym.config import shipped
    from ngym.prepare.rows import check_free
    from ngym.prepare.sets import find_sets, named
    from ngym.supervise.launcher import Launcher

    chosen = named(find_sets((Path.cwd(), shipped())), name)
    chosen = _at(chosen, revision) if revision else chosen
    folder = output or Path("data") / chosen.name
    check_free(folder, chosen.name)
    paths = _download(chosen, cache, hub.rstrip("/"), github.rstrip("/"), hub_token)
    launcher = Launcher.start()
    try:
        asyncio.run(_prepare(chosen, paths, folder, limit, configs, launcher))
    finally:
        launcher.close()


def _list() -> None:
    from ngym.config import shipped
    from ngym.prepare.sets import find_sets

    rows = [HEADER]
    for each in find_sets((Path.cwd(), shipped())).values():
        count = f"{each.rows:,}" if each.rows is not None else "?"
        rows.append((each.name, each.environment, count, each.licence, f"{each.host}:{each.repo}@{each.revision[:12]}"))
        if each.note:
            rows.append(("", f"  {each.note}", "", "", ""))
    widths = [max(len(row[column]) for row in rows if row[0]) for column in range(len(HEADER))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    click.echo(f"\n{SEEN}")


def _at(chosen: PublicSet, revision: str) -> PublicSet:
    if len(revision) != 40 or set(revision) - set("0123456789abcdef"):
        raise UsageError(f"--revision {revision}: a commit is wanted, 40 hex digits; a branch may change tomorrow")
    return chosen.at(revision)


def _download(chosen: PublicSet, cache: Path, hub: str, github: str, token: str | None) -> dict[File, Path]:
    from ngym.prepare.download import fetch

    home = cache / chosen.repo.replace("/", "__") / chosen.revision
    paths: dict[File, Path] = {}
    for file in (file for part in chosen.parts for file in part.files):
        paths[file] = home / file.path
        if not paths[file].is_file():
            click.echo(f"fetching {chosen.url(file, hub, github)}")
        fetch(chosen.url(file, hub, github), paths[file], file.sha256, token if chosen.host == "hugging_face" else None)
    return paths


async def _prepare(
    chosen: PublicSet,
    paths: Mapping[File, Path],
    folder: Path,
    limit: int | None,
    configs: Sequence[Path],
    launcher: Launcher,
) -> None:
    from ngym.cli.environments import started
    from ngym.prepare.accepting import accepted
    from ngym.prepare.download import digest
    from ngym.prepare.rows import converted, distinct, some, write

    config, stanza = _environment(chosen, configs)
    left_out: Counter[str] = Counter()
    agent = _agent(config, stanza.name)
    rows = distinct(converted(chosen, paths, agent, limit, left_out), left_out)
    click.echo(f"trying {sum(map(len, rows.values())):,} rows on {stanza.name}")
    async with started(config, {stanza.name}, launcher) as peers:
        rows = await accepted(peers[stanza.name], rows, left_out)
    if not any(rows.values()):
        raise NgymError("\n".join([f"none of {chosen.name}'s records made a row:", *some(left_out, SHOWN)]))
    files = [{"path": file.path, "sha256": digest(path), "expected": file.sha256} for file, path in paths.items()]
    write(folder, chosen, rows, left_out, files)
    _report(chosen, folder, rows, left_out)


def _environment(chosen: PublicSet, configs: Sequence[Path]) -> tuple[Config, Stanza]:
    """The config and the stanza whose server tries the rows: the user's own, else as it ships."""
    from ngym.config import load_config, shipped
    from ngym.validation import data_places

    own = list(configs) or ([DEFAULT] if DEFAULT.is_file() else [])
    for files in (own, [shipped() / DEFAULT]):
        config = load_config(files) if files else None
        for stanza in config.services.values() if config else ():
            if config is None or stanza.kind != "gym_server" or stanza.app is None:
                continue
            if data_places(config.root, stanza.app)[0].name == chosen.environment:
                return config, stanza
    raise UsageError(
        f"{', '.join(map(str, own)) or DEFAULT}: no gym server {chosen.environment!r}, which tries the rows"
    )


def _agent(config: Config, gym: str) -> str:
    """The first agent of the config that plays in this environment."""
    agents = (stanza for stanza in config.services.values() if stanza.kind == "agent")
    return next((stanza.name for stanza in agents if stanza.options.get("gym") == gym), f"{gym}_agent")


def _report(chosen: PublicSet, folder: Path, rows: Mapping[Split, list[Converted]], left_out: Counter[str]) -> None:
    from ngym.prepare.rows import some

    told = ", ".join(f"{len(rows[split]):,} for {what}" for split, what in _WHAT.items())
    click.echo(f"{folder}: {told} ({chosen.licence}); where they come from stands in manifest.json")
    if left_out:
        click.echo("\n".join([f"left out: {left_out.total():,}", *some(left_out, SHOWN)]))
    if chosen.note:
        click.echo(chosen.note)


_WHAT: dict[Split, str] = {"train": "training", "validation": "validation"}
