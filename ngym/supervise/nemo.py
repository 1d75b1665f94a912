"""The run as NeMo Gym's tools want to see it: their config form (instance -> type -> implementation), their list."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from ngym.config.service_config import Config, Stanza
from ngym.schema import Kind
from ngym.supervise.service import State
from ngym.telemetry.redact import redacted

TYPES: dict[Kind, str] = {
    "gym_server": "resources_servers",
    "agent": "responses_api_agents",
    "model": "responses_api_models",
}
# An agent's option -> what NeMo Gym calls it, and the kind of service that it names.
REFERENCES: dict[str, tuple[str, Kind]] = {
    "gym": ("resources_server", "gym_server"),
    "model": ("model_server", "model"),
}


def global_config_dict_yaml(config: Config, urls: Mapping[str, Sequence[str]], head_url: str) -> str:
    """The body of NeMo Gym's GET /global_config_dict_yaml: a JSON string that holds YAML.

    Their form has one address per service: the first replica's.
    """
    head = urlsplit(head_url)
    tree: dict[str, Any] = {"head_server": {"host": head.hostname, "port": head.port}}
    for stanza in config.services.values():
        implementation = Path(stanza.app).stem if stanza.app else stanza.name
        tree[stanza.name] = {TYPES[stanza.kind]: {implementation: _server(stanza, urls[stanza.name][0])}}
    return json.dumps(yaml.safe_dump(tree, sort_keys=False))


def server_instances(states: Sequence[State], uptime_seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """The body of NeMo Gym's GET /server_instances; one entry per process."""
    return [_instance(state, uptime_seconds[state.label]) for state in states]


def _server(stanza: Stanza, url: str) -> dict[str, Any]:
    address = urlsplit(url)
    server = {
        "host": address.hostname,
        "port": address.port or (443 if address.scheme == "https" else 80),
        "entrypoint": "app.py",
        **redacted(stanza.options),
    }
    if stanza.kind == "gym_server":
        server.setdefault("domain", "other")
    if stanza.kind == "agent":
        for option, (reference, kind) in REFERENCES.items():
            if option in stanza.options:
                server[reference] = {"type": TYPES[kind], "name": stanza.options[option]}
    return server


def _instance(state: State, uptime_seconds: float) -> dict[str, Any]:
    address = urlsplit(state.url)
    return {
        "name": Path(state.app).stem if state.app else state.name,
        "process_name": state.name,
        "config_path": state.name,
        "dir_path": state.app,
        "entrypoint": "app.py",
        "server_type": TYPES[state.kind],
        "host": address.hostname,
        "port": address.port,
        "url": state.url,
        "pid": state.pid,
        "status": "success" if state.status == "ready" else "connection_error",
        "start_time": state.started_at.timestamp() if state.started_at else None,
        "uptime_seconds": uptime_seconds,
    }
