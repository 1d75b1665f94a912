"""Does an environment say what it is (`ngym.config.environment_card`), and is its kind what its server really offers?"""

from __future__ import annotations

from pathlib import Path

from ngym.config.environment_card import EnvironmentKind, facts_in
from ngym.errors import ConfigError
from ngym.peers import Peer
from ngym.validation.checks import Finding
from ngym.validation.gold import ROWS, Environment


async def described(environment: Environment, readme: Path, peer: Peer) -> Finding:
    """The finding `facts`. UsageError when a file of the environment cannot be read."""
    try:
        facts = facts_in(readme)
    except ConfigError as error:
        return Finding("facts", readme.name, str(error).splitlines())
    offered = await _kind_of(environment, peer)
    wrong = [] if facts.kind == offered else [f"{readme}: kind is {facts.kind}, and what is offered is {offered}"]
    return Finding("facts", f"{facts.domain}, {facts.kind}, {facts.license}", wrong)


async def _kind_of(environment: Environment, peer: Peer) -> EnvironmentKind:
    """Tools may be the server's, or the rows' own."""
    if "/reset" in (await peer.get("/openapi.json"))["paths"]:
        return "steps"
    rows = (row for file in ROWS for row in environment.rows(file))
    if await peer.get("/tools") or any(row.get("responses_create_params", {}).get("tools") for row in rows):
        return "tools"
    return "single_turn"
