"""ngym: environments, agents and models as plain HTTP services, and a trainer that turns scored rollouts into better
weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngym.errors import BadRequest as BadRequest
    from ngym.errors import ConfigError as ConfigError
    from ngym.errors import NgymError as NgymError
    from ngym.errors import NotFound as NotFound
    from ngym.errors import ServiceError as ServiceError
    from ngym.errors import ToolError as ToolError
    from ngym.errors import UsageError as UsageError
    from ngym.notebook.collecting import collect_rollouts as collect_rollouts
    from ngym.notebook.collecting import collect_rollouts_async as collect_rollouts_async
    from ngym.notebook.exporting import export_rollouts as export_rollouts
    from ngym.notebook.frames import training_metrics as training_metrics
    from ngym.notebook.rollouts import Rollouts as Rollouts
    from ngym.notebook.rollouts import load_rollouts as load_rollouts
    from ngym.notebook.services import run as run
    from ngym.notebook.services import run_async as run_async
    from ngym.notebook.verifying import verify as verify
    from ngym.notebook.verifying import verify_async as verify_async
    from ngym.peers import Peers as Peers
    from ngym.services import AgentOptions as AgentOptions
    from ngym.services import GymServerName as GymServerName
    from ngym.services import Image as Image
    from ngym.services import ModelName as ModelName
    from ngym.services import RolloutContext as RolloutContext
    from ngym.services import ServiceContext as ServiceContext
    from ngym.services import ServiceName as ServiceName
    from ngym.services import ServiceOptions as ServiceOptions
    from ngym.services import Session as Session
    from ngym.services import VerifyGroup as VerifyGroup
    from ngym.services import VerifyRequest as VerifyRequest
    from ngym.services import agent as agent
    from ngym.services import gym_server as gym_server
    from ngym.services.gym.step_server import Step as Step
    from ngym.services.gym.step_server import step_server as step_server
    from ngym.services.models.server import ModelCall as ModelCall
    from ngym.services.models.server import model_server as model_server

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        ("BadRequest", "ConfigError", "NgymError", "NotFound", "ServiceError", "ToolError", "UsageError"), "ngym.errors"
    ),
    "Peers": "ngym.peers",
    **dict.fromkeys(("ModelCall", "model_server"), "ngym.services.models.server"),
    **dict.fromkeys(
        ("AgentOptions", "GymServerName", "Image", "ModelName", "RolloutContext", "ServiceContext", "ServiceName", "ServiceOptions",
         "Session", "VerifyGroup", "VerifyRequest", "agent", "gym_server"), "ngym.services",
    ),
    **dict.fromkeys(("Step", "step_server"), "ngym.services.gym.step_server"),
    **dict.fromkeys(("collect_rollouts", "collect_rollouts_async"), "ngym.notebook.collecting"),
    **dict.fromkeys(("Rollouts", "load_rollouts"), "ngym.notebook.rollouts"),
    "export_rollouts": "ngym.notebook.exporting",
    **dict.fromkeys(("run", "run_async"), "ngym.notebook.services"),
    "training_metrics": "ngym.notebook.frames",
    **dict.fromkeys(("verify", "verify_async"), "ngym.notebook.verifying"),
}  # fmt: skip

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: `import ngym` imports nothing that a notebook or --help does not need."""
    if name not in _HOME:
        raise AttributeError(f"module 'ngym' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The names for tab completion."""
    return sorted({*globals(), *_HOME})
