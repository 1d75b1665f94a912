"""Discovers the services of a run from its head: addresses, agents and configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import yaml

from ngym.errors import UsageError
from ngym.net.auth import RUN_TOKEN
from ngym.peers import Peers, servers_in
from ngym.schema import Json

TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Known:
    """urls: service name -> its replicas. agents: names of the agents. services: the config, name -> stanza, if known.

    head_url: the head to ask when a service moves. others: external services, and the bearer token of each, or None.
    """

    urls: dict[str, list[str]]
    agents: frozenset[str]
    services: Json = field(default_factory=dict)
    head_url: str | None = None
    others: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, stanzas: Json) -> Known:
        """From a config whose services are not started yet, as `shown_config` returns it."""
        return cls({}, frozenset(name for name, stanza in stanzas.items() if stanza.get("kind") == "agent"), stanzas)


async def discover(head_url: str, token: str | None = None) -> Known:
    """Ask a head of ngym or NeMo Gym.

    Raises:
        UsageError: nothing answers there, the answer is not that of a head, or the token is wrong.
    """
    peers = Peers({}, head_url, token, owner="ng_collect_rollouts")
    try:
        servers = await _get(peers, head_url, "/servers", servers_in)
        if servers is not None:
            return _ours(head_url, servers, await _get(peers, head_url, "/config"))
        theirs = await _get(peers, head_url, "/global_config_dict_yaml")
    finally:
        await peers.close()
    if theirs is None:
        raise UsageError(f"{head_url} answers, but is not a head; use the URL that ng_run printed, or --config FILE")
    return _nemo(yaml.safe_load(theirs))


async def _get(peers: Peers, head_url: str, path: str, read: Callable[[bytes], Any] = orjson.loads) -> Any:
    """The parsed JSON at this path, or None for a 404."""
    url = head_url.rstrip("/") + path
    try:
        reply = await peers.send("GET", url, None, peers.authorization(None), TIMEOUT_S)
        if reply.status == 401:
            raise UsageError(f"{head_url}: the run there is locked; set the variable {RUN_TOKEN} to its token")
        return None if reply.status == 404 else read(reply.body)
    except OSError:
        raise UsageError(
            f"nothing answers at {head_url}: start the services with ng_run in another terminal (then run this in the "
            "same folder, or add --head URL), or add --config FILE to start and stop them here"
        ) from None
    except ValueError as error:
        raise UsageError(f"the answer of {url} is not that of a head ({error}); check the URL") from None


def _ours(head_url: str, servers: list[Json], config: Json | None) -> Known:
    urls = {server["name"]: server.get("urls") or [server["url"]] for server in servers}
    agents = frozenset(server["name"] for server in servers if server["kind"] == "agent")
    stanzas = config or {}
    external = [server["name"] for server in servers if server.get("external") and not server.get("app")]
    others = {name: os.environ.get(stanzas.get(name, {}).get("token_env") or "") for name in external}
    return Known(urls, agents, stanzas, head_url.rstrip("/"), others)


def _nemo(config: Mapping[str, Any]) -> Known:
    """`instance: {type: {implementation: {host, port, ...}}}`; other keys are ignored."""
    urls: dict[str, list[str]] = {}
    agents: set[str] = set()
    for name, instance in config.items():
        for kind, implementations in instance.items() if isinstance(instance, dict) else ():
            for server in implementations.values() if isinstance(implementations, dict) else ():
                if isinstance(server, dict) and "host" in server and "port" in server:
                    urls[name] = [f"http://{server['host']}:{server['port']}"]
                    if kind == "responses_api_agents":
                        agents.add(name)
    return Known(urls, frozenset(agents))
