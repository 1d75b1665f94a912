"""FastAPI factories: an author writes functions, the house makes the service."""

from ngym.services.agents import AgentOptions, agent
from ngym.services.gym import VerifyGroup, VerifyRequest, gym_server
from ngym.services.options import ServiceContext, ServiceName, ServiceOptions
from ngym.services.rollout import RolloutContext
from ngym.services.sessions import Session

__all__ = [
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
]
