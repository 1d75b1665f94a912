"""`ng_list`: shows the environments of the config and those that ship with ngym, read from files; starts nothing."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click
import orjson

from ngym.cli.shell.main import command, config_files
from ngym.config.shipped_files import app_file, shipped
from ngym.did_you_mean import did_you_mean
from ngym.runtime.live_region import align

if TYPE_CHECKING:
    from ngym.config.service_config import Config, Stanza
    from ngym.validation import EnvironmentInfo

DEFAULT = Path("global_config.yaml")
SPLITS = ("train", "validation", "example")
EXIT_CODES = """\
Exit codes: 0  the environments are shown
            2  the command or the config is wrong; the line says where"""
HEADER = ("NAME", "DOMAIN", "KIND", "REWARD", "TRAIN", "VALID", "EXAMPLE", "LICENSE", "")


class ListedEnvironment(NamedTuple):
    """An environment. app: None for an external one. facts: None if they cannot be read; `problem` has the reason."""

    name: str
    app: str | None
    in_config: bool
    rows: dict[str, int]
    facts: EnvironmentInfo | None
    problem: str
    reward_range: tuple[float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        known = self.facts.model_dump() if self.facts else {}
        return {
            "name": self.name,
            "app": self.app,
            "in_config": self.in_config,
            "rows": self.rows,
            "reward_range": self.reward_range,
            **known,
        }


@command("ng_list", epilog=EXIT_CODES)
@config_files("A config file; repeat it, and later files win.  [default: global_config.yaml, if there is one]")
@click.option("--domain", "domains", multiple=True, metavar="DOMAIN", help="Only this domain, such as math; repeat it.")
@click.option("--json", "as_json", is_flag=True, help="A JSON array on standard output, with the public training sets.")
def main(configs: tuple[Path, ...], domains: tuple[str, ...], as_json: bool) -> None:
    """Show every environment: its domain, kind, rows, licence of its data, description. Nothing is started.

    KIND is `tools` (calls tools), `single_turn` (only answers) or `steps` (plays turn by turn). REWARD is the declared
    range of the rewards.

    \b
    Examples: ng_list
              ng_list --domain math --domain games
              ng_list --json
    """
    from ngym.errors import UsageError
    from ngym.validation import Domain

    words = get_args(Domain)
    for domain in domains:
        if domain not in words:
            raise UsageError(f"--domain {domain}: no such domain{did_you_mean(domain, words)}")
    listed = environments(configs or ((DEFAULT,) if DEFAULT.is_file() else ()))
    selected = [each for each in listed if not domains or (each.facts and each.facts.domain in domains)]
    if as_json:
        click.echo(orjson.dumps([each.as_json() for each in selected], option=orjson.OPT_INDENT_2))
        return
    _print([each for each in selected if each.in_config], f"in {', '.join(map(str, configs)) or DEFAULT}")
    _print(
        [each for each in selected if not each.in_config],
        "shipped; to use one, put into the config:  NAME: {kind: gym_server, app: gym_servers/NAME}",
    )


def environments(configs: Sequence[Path]) -> list[ListedEnvironment]:
    """The environments of the configs in their order, then the shipped ones that no stanza uses, by name."""
    from ngym.config.service_config import load_config

    config = load_config(configs) if configs else None
    stanzas = [stanza for stanza in config.services.values() if stanza.kind == "gym_server"] if config else []
    records = [_of_stanza(config, stanza) for stanza in stanzas if config]
    used = {app_file(stanza.app, config.root) for stanza in stanzas if config and stanza.app}
    for file in sorted((shipped() / "gym_servers").glob("*/app.py")):
        if file.resolve() not in used:
            name = file.parent.name
            records.append(_describe(name, f"gym_servers/{name}", shipped(), in_config=False))
    return [each for each in records if each is not None]


def _of_stanza(config: Config, stanza: Stanza) -> ListedEnvironment | None:
    if stanza.app is None:
        return ListedEnvironment(stanza.name, None, True, {}, None, f"at {', '.join(stanza.external_urls)}")
    return _describe(stanza.name, stanza.app, config.root, in_config=True)


def _describe(name: str, app: str, root: Path, in_config: bool) -> ListedEnvironment | None:
    """None for a gym server with neither facts nor data, such as gym_servers/sandbox, which is not an environment."""
    from ngym.errors import ConfigError
    from ngym.validation import data_places, facts_in, readme_of

    data = next((place for place in data_places(root, app) if place.is_dir()), None)
    rows = {split: _count(data / f"{split}.jsonl") for split in SPLITS} if data else {}
    try:
        file = app_file(app, root)
        return ListedEnvironment(name, app, in_config, rows, facts_in(readme_of(file)), "", _reward_range(file))
    except ConfigError as error:
        return ListedEnvironment(name, app, in_config, rows, None, str(error)) if data else None


def _reward_range(app: Path) -> tuple[float, float] | None:
    """The `reward_range=` of a call in this file, if it is two literal numbers; the file is not run."""
    with suppress(OSError, SyntaxError, TypeError, ValueError):
        for node in ast.walk(ast.parse(app.read_bytes())):
            if isinstance(node, ast.keyword) and node.arg == "reward_range":
                low, high = map(float, ast.literal_eval(node.value))
                return low, high
    return None


def _count(path: Path) -> int:
    """Non-empty lines of a file; 0 if it does not exist."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _print(records: Sequence[ListedEnvironment], title: str) -> None:
    if not records:
        return
    click.echo(title)
    for line in align([HEADER, *map(_row, records)]):
        click.echo(f"  {line}")


def _row(each: ListedEnvironment) -> tuple[str, ...]:
    counts = tuple(f"{each.rows.get(split, 0):,}" if each.rows.get(split) else "-" for split in SPLITS)
    if each.facts is None:
        return (each.name, "?", "?", "?", *counts, "?", each.problem)
    within = f"{each.reward_range[0]:g}..{each.reward_range[1]:g}" if each.reward_range else "-"
    return (each.name, each.facts.domain, each.facts.kind, within, *counts, each.facts.license, each.facts.description)
