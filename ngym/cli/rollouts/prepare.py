"""`ng_prepare`: fetches a public set at its pinned revision and writes the rows that its gym server accepts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import orjson

from ngym.cli.shell.main import command, config_files, count, hub_token_option
from ngym.config.shipped_files import shipped
from ngym.errors import NgymError, UsageError
from ngym.runtime.live_region import align

if TYPE_CHECKING:
    from ngym.config.service_config import Config, Stanza
    from ngym.prepare import File, PublicSet, Split, SplitRow
    from ngym.supervise.zygote_client import ZygoteClient

DEFAULT = Path("global_config.yaml")
SHOWN = 8  # reasons for left-out records
EXIT_CODES = """\
Exit codes: 0    train.jsonl, validation.jsonl and manifest.json are written
            1    the set could not be fetched, or none of its records made a row
            2    the command, the config or a file is wrong
            130  interrupted; fetched files stay, and the next command continues"""


def _names(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    from ngym.prepare import find_sets

    return [name for name in find_sets((Path.cwd(), shipped())) if name.startswith(prefix)]


@command("ng_prepare", epilog=EXIT_CODES)
@click.argument("name", required=False, shell_complete=_names)
@click.option("--list", "listed", is_flag=True, help="List the known datasets; download nothing.")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR", help="The output folder.  [default: data/NAME]"
)
@count("--limit", "At most N rows of each split.")
@click.option(
    "--revision",
    metavar="REV",
    help="A commit (40 hex digits) instead of the pinned one; its files have no known sha256.",
)
@config_files("A config with the environment.  [default: global_config.yaml if it exists, else the shipped one]")
@click.option(
    "--cache", type=click.Path(path_type=Path), default=Path(".ngym/downloads"), show_default=True, metavar="DIR",
    help="The folder of downloads; a file that is there is not fetched again.",
)  # fmt: skip
@click.option(
    "--hub", envvar="HF_ENDPOINT", show_envvar=True, default="https://huggingface.co", show_default=True, metavar="URL",
    help="The Hugging Face hub, or a mirror.",
)  # fmt: skip
@hub_token_option("For gated datasets of the hub.")
@click.option(
    "--github", default="https://raw.githubusercontent.com", show_default=True, metavar="URL",
    help="GitHub's files, or a mirror.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be fetched, checked and written, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
def main(
    name: str | None,
    listed: bool,
    output: Path | None,
    limit: int | None,
    revision: str | None,
    configs: tuple[Path, ...],
    cache: Path,
    hub: str,
    hub_token: str | None,
    github: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Download the public dataset NAME, convert it to rows, and check each row on the environment's server.

    Rows that the server refuses, and rows whose reference answer gets no reward, are left out and counted.

    \b
    Examples: ng_prepare --list
              ng_prepare gsm8k --dry-run
              ng_prepare gsm8k --limit 500 --output data/gsm8k_small
    """
    if listed or name is None:
        show_sets(as_json)
        return
    from ngym.prepare import MANIFEST, check_free, find_set, find_sets
    from ngym.supervise.zygote_client import ZygoteClient

    public_set = find_set(find_sets((Path.cwd(), shipped())), name)
    public_set = _at(public_set, revision) if revision else public_set
    folder = output or Path("data") / public_set.name
    check_free(folder, public_set.name)
    mirrors = Mirrors(cache, hub.rstrip("/"), github.rstrip("/"), hub_token)
    stanza = _environment(public_set, configs)[1]  # a mistake in the config is reported before the download
    if dry_run:
        show_plan(public_set, mirrors, folder, stanza, as_json)
        return
    say = partial(click.echo, err=as_json)
    paths = _download(public_set, mirrors, say)
    launcher = ZygoteClient.start()
    try:
        asyncio.run(_prepare(public_set, paths, folder, limit, configs, launcher, say))
    finally:
        launcher.close()
    if as_json:
        manifest = orjson.loads((folder / MANIFEST).read_bytes())
        click.echo(orjson.dumps({"output": str(folder), **manifest}, option=orjson.OPT_INDENT_2))


class Mirrors(NamedTuple):
    """The hosts of the files, and the folder of downloads."""

    cache: Path
    hub: str
    github: str
    token: str | None

    def url(self, public_set: PublicSet, file: File) -> str:
        return public_set.url(file, self.hub, self.github)

    def paths(self, public_set: PublicSet) -> dict[File, Path]:
        home = self.cache / public_set.repo.replace("/", "__") / public_set.revision
        return {file: home / file.path for part in public_set.parts for file in part.files}


HEADER = ("NAME", "ENVIRONMENT", "ROWS", "LICENCE", "SOURCE")
SET_FIELDS = ("name", "title", "environment", "host", "repo", "revision", "licence", "rows", "note")
SEEN = (
    "Revisions, paths, fields and licences come from public records of these sets; none was downloaded where ngym is "
    "built.\nng_prepare checks each sha256 that is known, and each row with the environment's own server."
)


def show_sets(as_json: bool) -> None:
    from ngym.prepare import find_sets

    sets = find_sets((Path.cwd(), shipped())).values()
    if as_json:
        records = [each.model_dump(mode="json", include=set(SET_FIELDS)) for each in sets]
        click.echo(orjson.dumps(records, option=orjson.OPT_INDENT_2))
        return
    rows = [HEADER]
    for each in sets:
        count = f"{each.rows:,}" if each.rows is not None else "?"
        rows.append((each.name, each.environment, count, each.licence, f"{each.host}:{each.repo}@{each.revision[:12]}"))
    notes = [each.note for each in sets]
    for line, note in zip(align(rows), ["", *notes], strict=True):
        click.echo(line)
        if note:
            click.echo(f"    {note}")
    click.echo(f"\n{SEEN}")


def show_plan(public_set: PublicSet, mirrors: Mirrors, folder: Path, stanza: Stanza, as_json: bool) -> None:
    files = [
        {"url": mirrors.url(public_set, file), "path": str(path), "there": path.is_file(), "sha256": file.sha256}
        for file, path in mirrors.paths(public_set).items()
    ]
    if as_json:
        plan = {"set": public_set.name, "licence": public_set.licence, "files": files, "output": str(folder)}
        click.echo(orjson.dumps({**plan, "tried_on": stanza.name, "where": stanza.where}))
        return
    for file in files:
        click.echo(f"{'has it already' if file['there'] else 'would fetch'}: {file['url']}")
    click.echo(f"would check each row on {stanza.name} ({stanza.where}) and write {folder} ({public_set.licence})")


def _at(public_set: PublicSet, revision: str) -> PublicSet:
    if len(revision) != 40 or set(revision) - set("0123456789abcdef"):
        raise UsageError(f"--revision {revision}: must be a commit, 40 hex digits; a branch may change")
    return public_set.at(revision)


def _download(public_set: PublicSet, mirrors: Mirrors, say: Callable[[str], None]) -> dict[File, Path]:
    from ngym.prepare import fetch

    paths = mirrors.paths(public_set)
    for file, path in paths.items():
        url = mirrors.url(public_set, file)
        if not path.is_file():
            say(f"fetching {url}")
        fetch(url, path, file.sha256, mirrors.token if public_set.host == "hugging_face" else None)
    return paths


async def _prepare(
    public_set: PublicSet,
    paths: Mapping[File, Path],
    folder: Path,
    limit: int | None,
    configs: Sequence[Path],
    launcher: ZygoteClient,
    say: Callable[[str], None],
) -> None:
    from ngym.cli.environments import start_services
    from ngym.prepare import accept_rows, convert_rows, digest, distinct, some, write

    config, stanza = _environment(public_set, configs)
    left_out: Counter[str] = Counter()
    agent = _agent(config, stanza.name)
    rows = distinct(convert_rows(public_set, paths, agent, limit, left_out), left_out)
    say(f"checking {sum(map(len, rows.values())):,} rows on {stanza.name}")
    async with start_services(config, {stanza.name}, launcher) as peers:
        rows = await accept_rows(peers[stanza.name], rows, left_out)
    if not any(rows.values()):
        raise NgymError("\n".join([f"none of {public_set.name}'s records made a row:", *some(left_out, SHOWN)]))
    files = [{"path": file.path, "sha256": digest(path), "expected": file.sha256} for file, path in paths.items()]
    write(folder, public_set, rows, left_out, files)
    _report(public_set, folder, rows, left_out, say)


def _environment(public_set: PublicSet, configs: Sequence[Path]) -> tuple[Config, Stanza]:
    """The config and the stanza whose server checks the rows: the user's config, else the shipped one."""
    from ngym.config.service_config import load_config
    from ngym.validation import app_folder

    own = list(configs) or ([DEFAULT] if DEFAULT.is_file() else [])
    for files in (own, [shipped() / DEFAULT]):
        config = load_config(files) if files else None
        for stanza in config.services.values() if config else ():
            if config is None or stanza.kind != "gym_server" or stanza.app is None:
                continue
            if app_folder(stanza.app).name == public_set.environment:
                return config, stanza
    raise UsageError(
        f"{', '.join(map(str, own)) or DEFAULT}: no gym server {public_set.environment!r} to check the rows"
    )


def _agent(config: Config, gym: str) -> str:
    """The first agent of the config that uses this environment."""
    agents = (stanza for stanza in config.services.values() if stanza.kind == "agent")
    return next((stanza.name for stanza in agents if stanza.options.get("gym") == gym), f"{gym}_agent")


def _report(
    public_set: PublicSet,
    folder: Path,
    rows: Mapping[Split, list[SplitRow]],
    left_out: Counter[str],
    say: Callable[[str], None],
) -> None:
    from ngym.prepare import some

    counts = ", ".join(f"{len(rows[split]):,} for {what}" for split, what in _WHAT.items())
    say(f"{folder}: {counts} ({public_set.licence}); manifest.json records the sources")
    if left_out:
        say("\n".join([f"left out: {left_out.total():,}", *some(left_out, SHOWN)]))
    if public_set.note:
        say(public_set.note)


_WHAT: dict[Split, str] = {"train": "training", "validation": "validation"}
