"""ngym: environments, agents and models as plain HTTP services, and a trainer that turns scored rollouts into better weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngym.errors import ServiceError as ServiceError
    from ngym.peers import Peers as Peers
    from ngym.services import AgentOptions as AgentOptions
    from ngym.services import RolloutContext as RolloutContext
    from ngym.services import ServiceContext as ServiceContext
    from ngym.services import ServiceName as ServiceName
    from ngym.services import ServiceOptions as ServiceOptions
    from ngym.services import Session as Session
    from ngym.services import VerifyGroup as VerifyGroup
    from ngym.services import VerifyRequest as VerifyRequest
    from ngym.services import agent as agent
    from ngym.services import gym_server as gym_server
    from ngym.services.model import ModelCall as ModelCall
    from ngym.services.model import model_server as model_server

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("BadRequest", "NotFound", "ServiceError"), "ngym.errors"),
    "Peers": "ngym.peers",
    **dict.fromkeys(("ModelCall", "model_server"), "ngym.services.model"),
    **dict.fromkeys(
        (
            "AgentOptions",
            "RolloutContext",
            "ServiceContext",
            "ServiceName",
            "ServiceOptions",
            "Session",
            "VerifyGroup",
            "VerifyRequest",
            "agent",
            "gym_server",
        ),
        "ngym.services",
    ),
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Names load when they are first used: `import ngym` costs nothing that a notebook or a --help does not need."""
    if name not in _HOME:
        raise AttributeError(f"module 'ngym' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
