"""A stack of services that receives hostile bodies."""

from __future__ import annotations

from pathlib import Path

import yaml

from ngym.config.service_config import load_config
from ngym.schema import Json
from ngym.supervise.supervisor import Supervisor

FEW = ("counter", "games")
LIGHT = (
    *FEW,
    "mcqa",
    "calculator",
    "function_call",
    "judge",
    "letters",
    "long_context",
    "qa_short",
    "retrieval",
    "weather",
)
MANY = (*LIGHT, "code_exec", "instruction_following", "math", "safety", "sandbox", "sql", "tool_minimal", "workplace")
AGENTS = ("simple", "multi_turn", "gymnasium")


def stack(folder: Path, gyms: tuple[str, ...], agents: tuple[str, ...] = AGENTS[:1]) -> Supervisor:
    """A model, these gym servers, and these agents."""
    services: Json = {"policy": {"kind": "model", "app": "models/scripted", "tokens": True}}
    services |= {name: {"kind": "gym_server", "app": f"gym_servers/{name}"} for name in gyms}
    options = {"gym": gyms[0], "model": "policy"}
    services |= {f"{name}_agent": {"kind": "agent", "app": f"agents/{name}", **options} for name in agents}
    file = folder / "global_config.yaml"
    file.write_text(yaml.safe_dump({**services, "ngym": {"head": {"port": 0}}}))
    return Supervisor(load_config([file]))
