"""`ng_validate`: checks a config and each service's options, and tests the rewards of its environments."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import orjson

from ngym.cli.shell.completion_names import services
from ngym.cli.shell.main import EXIT_DONE, EXIT_FAILED, command, config_options
from ngym.errors import ConfigError

if TYPE_CHECKING:
    from ngym.cli.environments import EnvironmentResult, Say
    from ngym.config.service_config import Config, Stanza
    from ngym.supervise.zygote_client import ZygoteClient

MAX_AT_ONCE = 32  # processes, each with the libraries of a service
SHOWN_LINES = 20
EXIT_CODES = """\
Exit codes: 0  no mistake was found
            1  an environment gives a wrong reward
            2  the config or a file is wrong; a line for each mistake says where"""


@command("ng_validate", epilog=EXIT_CODES)
@config_options
@click.option(
    "--environment", "names", multiple=True, metavar="NAME", shell_complete=services("gym_server"),
    help="Start this gym server and test it; repeat it.",
)  # fmt: skip
@click.option("--environments", "every", is_flag=True, help="Test all gym servers that have a gold.jsonl.")
@click.option(
    "--within", "within_s", type=click.FloatRange(0), default=2.0, show_default=True, metavar="SECONDS",
    help="The time that 95 % of verifications may take.",
)  # fmt: skip
@click.option(
    "--call-timeout", "call_s", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
    metavar="SECONDS", help="The time that one tool call or verification may take.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
@click.pass_context
def main(
    ctx: click.Context,
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    names: tuple[str, ...],
    every: bool,
    within_s: float,
    call_s: float,
    as_json: bool,
) -> None:
    """Check a config: its keys, the references between services, and every service's options.

    With --environment, also test a gym server without a model. The answers of its data/gold.jsonl get their rewards,
    and damaged ones less. Repeated answers and 64 parallel sessions get the same results. Every row is a valid task.

    \b
    Examples: ng_validate
              ng_validate --environment calculator
              ng_validate --config global_config.yaml --config local.yaml --environments --json
    """
    from ngym.supervise.zygote_client import ZygoteClient

    say = partial(click.echo, err=as_json)
    launcher = ZygoteClient.start()
    try:
        from ngym.config.service_config import ConfigMistakes, load_config

        try:
            config = load_config(configs, overrides)
        except ConfigMistakes as error:
            config = error.config
            result = ValidationResult([str(error), *asyncio.run(mistakes_of(config, launcher, error.names))], [])
        else:
            result = asyncio.run(_validate(config, launcher, names if names or every else None, within_s, call_s, say))
    finally:
        launcher.close()
    if as_json:
        click.echo(orjson.dumps(result.as_json(config), option=orjson.OPT_INDENT_2))
    if result.mistakes:
        raise ConfigError("\n".join(result.mistakes))
    ctx.exit(EXIT_FAILED if any(each.wrong for each in result.environments) else EXIT_DONE)


class ValidationResult(NamedTuple):
    """mistakes: of the config; if there are any, no environment is tested."""

    mistakes: list[str]
    environments: list[EnvironmentResult]

    def as_json(self, config: Config) -> dict[str, object]:
        return {
            "config": [str(file) for file in config.files],
            "services": list(config.services),
            "mistakes": self.mistakes,
            "environments": [
                {"name": each.name, "right": not each.wrong, "checks": [finding._asdict() for finding in each.findings]}
                for each in self.environments
            ],
        }


async def _validate(
    config: Config, launcher: ZygoteClient, names: tuple[str, ...] | None, within_s: float, call_s: float, say: Say
) -> ValidationResult:
    """names: environments to test; empty: all that have gold answers; None: no environment."""
    # environments are tested without a model
    if mistakes := await mistakes_of(config, launcher, models=names is None):
        return ValidationResult(mistakes, [])
    count = len(config.services)
    say(f"{', '.join(map(str, config.files))}: {count} service{'s' if count > 1 else ''}, all right")
    if names is None:
        return ValidationResult([], [])
    from ngym.cli.environments import try_environments

    return ValidationResult([], await try_environments(config, launcher, names, within_s, call_s, say))


async def mistakes_of(
    config: Config, launcher: ZygoteClient, names: Collection[str] = (), *, models: bool = True
) -> list[str]:
    """The mistakes in the services' own options, and the models that do not exist.

    names: services that exist beside those of the config, since their stanzas have mistakes.
    """
    from ngym.config.service_config import missing_models

    # Each service's file is loaded in its own process, as ng_run does.
    known = {*config.services, *names}
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def check(stanza: Stanza) -> list[str]:
        async with places:
            return await _check(config, stanza, launcher, known)

    checks = [check(stanza) for stanza in config.services.values() if stanza.app]
    mistakes = [mistake for service_mistakes in await asyncio.gather(*checks) for mistake in service_mistakes]
    return mistakes + (missing_models(config) if models else [])


async def _check(config: Config, stanza: Stanza, launcher: ZygoteClient, known: Collection[str]) -> list[str]:
    from ngym.supervise.service import EXIT_CONFIG
    from ngym.supervise.supervisor import service_spec
    from ngym.supervise.venvs import find_uv, make, venv_of

    venv = venv_of(config, stanza)
    try:
        python = await make(venv, partial(click.echo, err=True), find_uv()) if venv else None
    except ConfigError as error:
        return [str(error)]
    names: dict[str, list[str]] = {name: [] for name in known}
    with tempfile.TemporaryFile() as output:
        spec = service_spec(config, stanza, names)
        child = await launcher.fork("check", stanza.name, spec, os.dup(output.fileno()), python=python)
        code = await child.exit_code
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if code == 0:
        return []
    if code == EXIT_CONFIG:
        return text.splitlines()
    lines = text.splitlines()[-SHOWN_LINES:]
    report = [f"{stanza.where}: the app of {stanza.name!r} cannot be loaded:", *(f"  | {line}" for line in lines)]
    return ["\n".join(report)]
