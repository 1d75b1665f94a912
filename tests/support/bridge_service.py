"""A bridge in its own process and Python, as it ships: `async with serve_bridged("x", folder, venvs) as peer`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml
from paths import ROOT

from ngym.config.service_config import load_config
from ngym.peers import Peer, Peers
from ngym.supervise.supervisor import Supervisor


@asynccontextmanager
async def serve_bridged(name: str, folder: Path, venvs: Path, *options: str) -> AsyncIterator[Peer]:
    """folder: an empty one, for logs. venvs: where packages are kept. options: `key=value` for the stanza."""
    config = load_config([alone(name, folder, venvs)], [f"{name}.{option}" for option in options])
    async with Supervisor(config) as stack:
        peers = Peers(stack.urls, owner="the test")
        try:
            yield peers[name]
        finally:
            await peers.close()


def alone(name: str, folder: Path, venvs: Path) -> Path:
    """A config in this folder with the shipped stanza of this bridge and no other service."""
    (folder / ".ngym").mkdir()
    (folder / ".ngym" / "venvs").symlink_to(venvs)
    stanza = yaml.safe_load((ROOT / "bridges.yaml").read_text())[name]
    config = folder / "global_config.yaml"
    config.write_text(yaml.safe_dump({"ngym": {"head": {"port": 0}, "ready_timeout_s": 600}, name: stanza}))
    return config
