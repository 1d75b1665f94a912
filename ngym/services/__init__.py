"""FastAPI factories: an author writes functions, and the factory makes a service of them."""

from ngym.services.agents.rollout_context import RolloutContext
from ngym.services.agents.server import AgentOptions, agent
from ngym.services.base.options import GymServerName, ModelName, ServiceContext, ServiceName, ServiceOptions
from ngym.services.gym.results import Image
from ngym.services.gym.server import VerifyGroup, VerifyRequest, gym_server
from ngym.services.gym.sessions import Session

__all__ = [
    "AgentOptions", "GymServerName", "Image", "ModelName", "RolloutContext", "ServiceContext", "ServiceName", "ServiceOptions",
    "Session", "VerifyGroup", "VerifyRequest", "agent", "gym_server",
]  # fmt: skip
