"""Starts environments of a config and tests them without a model, for `ng_validate --environment`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import click

from ngym.config.service_config import Config
from ngym.config.shipped_files import app_file
from ngym.errors import ConfigError
from ngym.peers import Peers
from ngym.runtime.live_region import sanitize
from ngym.supervise.service import ReplicaState
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.zygote_client import ZygoteClient
from ngym.validation import (
    MODEL,
    SHOWN,
    Environment,
    Finding,
    can_be_alone,
    check_facts,
    find_environment,
    named_services,
    readme_of,
    validate_environment,
    with_stand_ins,
)

Say = Callable[[str], None]
_REMEDY = f"{MODEL} next to its gold.jsonl, with replies of models/scripted, makes a scripted model answer instead"


class EnvironmentResult(NamedTuple):
    """An environment and the finding of each check."""

    name: str
    findings: list[Finding]

    @property
    def wrong(self) -> bool:
        return any(finding.mistakes for finding in self.findings)


async def try_environments(
    config: Config, launcher: ZygoteClient, names: Sequence[str], within_s: float, call_s: float, say: Say
) -> list[EnvironmentResult]:
    """Test the named environments, or all that have gold answers. say: receives each line of the report.

    Raises:
        ConfigError: a name is not a gym server, or it has no gold answers.
    """
    environments = [_environment(config, name) for name in names] or _all(config, say)
    results = []
    alone = with_stand_ins(config, environments)
    async with start_services(alone, alone.services, launcher) as peers:
        for environment in environments:
            if needed := named_services(config, environment.name):
                say(f"{environment.name} asks {', '.join(needed)}: a scripted model answers instead and judges nothing")
            peer = peers[environment.name]
            facts = await check_facts(environment, readme_of(_app(config, environment.name)), peer)
            results.append(
                EnvironmentResult(
                    environment.name, [facts, *await validate_environment(environment, peer, within_s, call_s)]
                )
            )
            _show(results[-1], say)
    wrong = sum(each.wrong for each in results)
    say(
        f"{len(environments)} environment{'s' if len(environments) > 1 else ''}, "
        + (f"{wrong} with mistakes" if wrong else "all right")
    )
    return results


@asynccontextmanager
async def start_services(config: Config, names: Collection[str], launcher: ZygoteClient) -> AsyncIterator[Peers]:
    """Start only these services of the config; they stop when the block ends.

    They get free ports: their own may be those of a run that uses the same config.
    """
    stanzas = {name: stanza for name, stanza in config.services.items() if name in names}
    services = {name: stanza.model_copy(update={"port": None}) for name, stanza in stanzas.items()}
    head = config.settings.head.model_copy(update={"port": 0})
    settings = config.settings.model_copy(update={"head": head})
    own = config.model_copy(update={"services": services, "settings": settings})
    stack = Supervisor(own, _print_failure, launcher)
    async with stack, stack.peers("this command") as peers:
        yield peers


def _environment(config: Config, name: str) -> Environment:
    stanza = config.stanza(name)
    if stanza.kind != "gym_server":
        raise ConfigError(f"{stanza.where}: {name!r} is a {stanza.kind}, not a gym_server")
    environment = find_environment(config, stanza)
    if environment is None:
        raise ConfigError(
            f"{stanza.where}: {name!r} has no gold answers; write data/gold.jsonl in the folder of its app"
        )
    if not can_be_alone(config, environment):
        needed = ", ".join(named_services(config, name))
        raise ConfigError(f"{stanza.where}: {name!r} asks {needed}, but no other service is started here; {_REMEDY}")
    return environment


def _app(config: Config, name: str) -> Path:
    stanza = config.services[name]
    return app_file(stanza.app or "", config.root, stanza.where)


def _all(config: Config, say: Say) -> list[Environment]:
    gyms = [stanza for stanza in config.services.values() if stanza.kind == "gym_server"]
    environments = []
    for environment in filter(None, (find_environment(config, stanza) for stanza in gyms)):
        if can_be_alone(config, environment):
            environments.append(environment)
        else:
            say(f"{environment.name} asks {', '.join(named_services(config, environment.name))}: not tested; {_REMEDY}")
    if not environments:
        raise ConfigError(f"{config.files[0]}: none of its gym servers has a data/gold.jsonl")
    return environments


def _show(result: EnvironmentResult, say: Say) -> None:
    say(result.name)
    for finding in result.findings:
        say(f"  {'right' if not finding.mistakes else 'WRONG'}  {finding.check:<9} {finding.looked_at}")
        for mistake in finding.mistakes[:SHOWN]:
            say(f"           {mistake}")
        if len(finding.mistakes) > SHOWN:
            say(f"           and {len(finding.mistakes) - SHOWN} more")


def _print_failure(state: ReplicaState) -> None:
    if state.status in ("restarting", "failed"):
        click.echo(sanitize(f"{state.name}: {state.detail or state.status}"), err=True)
