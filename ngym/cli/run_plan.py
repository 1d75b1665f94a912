"""The --dry-run of `ng_run` and `ng_serve`: shows what would be started; nothing is started, bound or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click
import orjson
import yaml

from ngym.config.service_config import Config, Stanza
from ngym.config.shipped_files import app_file
from ngym.runtime.live_region import aligned
from ngym.supervise.head_file import FOLDER
from ngym.supervise.redacted_config import shown_config
from ngym.supervise.venvs import venv_of

HEADER = ("NAME", "KIND", "COPIES", "ADDRESS", "APP")


class Planned(NamedTuple):
    """A service as it would be started. app: its file; None: an external service at `urls`. port: None: a free one.

    python: that of the service's virtual environment; None: the one that runs ngym.
    """

    name: str
    kind: str
    app: Path | None
    replicas: int
    host: str
    port: int | None
    urls: list[str]
    python: Path | None

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "app": _text(self.app), "python": _text(self.python)}


def show_plan(config: Config, as_json: bool) -> None:
    """Print the resolved config to standard output, secrets redacted, and the services it starts to standard error."""
    services = [_planned(config, stanza) for stanza in config.services.values()]
    logs = config.root / FOLDER / "logs"
    head = config.settings.head
    if as_json:
        plan = {"services": [each.as_json() for each in services], "head": head.model_dump(), "logs": str(logs)}
        click.echo(orjson.dumps({**plan, "config": shown_config(config)}, option=orjson.OPT_INDENT_2))
        return
    click.echo(yaml.safe_dump(shown_config(config), sort_keys=False), nl=False)
    for line in aligned([HEADER, *map(_row, services)]):
        click.echo(line, err=True)
    click.echo(f"the head at {_address(head.host, head.port)}, logs in {logs}; nothing was started", err=True)


def show_service(config: Config, stanza: Stanza, app: str, host: str, port: int, as_json: bool) -> None:
    """Print what `ng_serve` would start. port: 0 for a free one."""
    found = app_file(app, config.root, stanza.where)
    one = _planned(config, stanza)._replace(app=found, replicas=1, host=host, port=port or None)
    if as_json:
        click.echo(orjson.dumps(one.as_json(), option=orjson.OPT_INDENT_2))
        return
    for line in aligned([HEADER, _row(one)]):
        click.echo(line)
    click.echo("nothing was started", err=True)


def _planned(config: Config, stanza: Stanza) -> Planned:
    app = app_file(stanza.app, config.root, stanza.where) if stanza.app and not stanza.external else None
    venv = venv_of(config, stanza)
    return Planned(
        stanza.name,
        stanza.kind,
        app,
        stanza.replicas,
        config.settings.host,
        stanza.port,
        stanza.external_urls,
        venv.python if venv else None,
    )


def _row(each: Planned) -> tuple[str, ...]:
    if each.app is None:
        return (each.name, each.kind, "", " ".join(each.urls), "external: not started here")
    app = f"{each.app}" + (f", by {each.python}" if each.python else "")
    return (each.name, each.kind, str(each.replicas), _address(each.host, each.port), app)


def _address(host: str, port: int | None) -> str:
    return f"{host}:{port}" if port else f"{host}, a free port"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
