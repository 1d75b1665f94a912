"""`ng_validate`: is this config right, down to each service's own options? Nothing is started."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ngym.cli.main import command, config_options
from ngym.errors import ConfigError

if TYPE_CHECKING:
    from ngym.config import Config, Stanza
    from ngym.supervise.launcher import Launcher

SHOWN_LINES = 20
EXIT_CODES = """\
Exit codes: 0  everything is right
            2  something is wrong; a line for each mistake says where"""


@command("ng_validate", epilog=EXIT_CODES)
@config_options
def main(configs: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Check a config: its keys, the names that services use for one another, and every service's own options."""
    from ngym.supervise.launcher import Launcher

    launcher = Launcher.start()
    try:
        from ngym.config import load_config

        config = load_config(configs, overrides)
        mistakes = asyncio.run(_check_all(config, launcher))
    finally:
        launcher.close()
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    click.echo(f"{', '.join(map(str, configs))}: {len(config.services)} services, all right")


async def _check_all(config: Config, launcher: Launcher) -> list[str]:
    """Each service's file is loaded in a process of its own, as ng_run would; what they complain about."""
    checks = [_check(config, stanza, launcher) for stanza in config.services.values() if stanza.app]
    return [complaint for complaint in await asyncio.gather(*checks) if complaint]


async def _check(config: Config, stanza: Stanza, launcher: Launcher) -> str:
    from ngym.supervise.service import EXIT_CONFIG
    from ngym.supervise.supervisor import service_spec

    names: dict[str, list[str]] = {name: [] for name in config.services}
    with tempfile.TemporaryFile() as output:
        child = await launcher.fork("check", stanza.name, service_spec(config, stanza, names), os.dup(output.fileno()))
        code = await child.exit_code
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if code == 0:
        return ""
    if code == EXIT_CONFIG:
        return text
    lines = text.splitlines()[-SHOWN_LINES:]
    return "\n".join(
        [f"{stanza.where}: the app of {stanza.name!r} cannot be loaded:", *(f"  | {line}" for line in lines)]
    )
