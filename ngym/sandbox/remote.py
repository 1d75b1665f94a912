"""Runs programs on another machine: `POST /run` of a sandbox server (gym_servers/sandbox), within that server's limits."""

from __future__ import annotations

from ngym.errors import ServiceError
from ngym.peers import Peers
from ngym.sandbox.base import Limits, Program, Result, Sandbox, infra_error

SPARE_S = 120.0  # seconds beyond the wall limit: the program may wait in line
SERVICE = "the sandbox server"


class RemoteSandbox(Sandbox):
    """A client of a sandbox server and its replicas.

    Args:
        urls: of the replicas.
        token: sent as a bearer token, for a proxy in front of the server.
    """

    def __init__(self, *urls: str, token: str | None = None) -> None:
        self._peers = Peers({SERVICE: list(urls)}, token=token, owner="the remote sandbox")

    async def start(self) -> None:
        """Does nothing: the server may start later, and a run that cannot reach it reports that."""

    async def aclose(self) -> None:
        await self._peers.close()

    async def execute(self, program: Program, limits: Limits) -> Result:
        body = {"program": program.model_dump(), "limits": limits.model_dump()}
        try:
            # Running a program twice is harmless: it has no lasting effects.
            reply = await self._peers[SERVICE].post("/run", body, timeout=limits.wall + SPARE_S, idempotent=True)
            result = Result.model_validate(reply)
        except (ServiceError, ValueError) as error:
            return infra_error("remote", f"{SERVICE}: {error}")
        return result.model_copy(update={"tier": f"remote:{result.tier}"})
