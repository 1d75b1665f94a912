"""Programs on another machine: `POST /run` of a sandbox server (gym_servers/sandbox), with its limits as its bounds."""

from __future__ import annotations

from ngym.errors import ServiceError
from ngym.peers import Peers
from ngym.sandbox.interface import Limits, Program, Result, Sandbox, infra_error

SPARE_S = 120.0  # beyond the wall limit: the program may have to wait for its turn
SERVICE = "the sandbox server"


class RemoteSandbox(Sandbox):
    """A client of a sandbox server; programs run on whichever of its replicas answers.

    Args:
        urls: of the replicas.
        token: sent as a bearer token, where a proxy before the server wants one.
    """

    def __init__(self, *urls: str, token: str | None = None) -> None:
        self._peers = Peers({SERVICE: list(urls)}, token=token, owner="the remote sandbox")

    async def start(self) -> None:
        """Nothing: the server may come up later, and each run that does not reach it says so."""

    async def aclose(self) -> None:
        await self._peers.close()

    async def execute(self, program: Program, limits: Limits) -> Result:
        body = {"program": program.model_dump(), "limits": limits.model_dump()}
        try:
            # A program that ran twice did no harm: it has nothing to change.
            reply = await self._peers[SERVICE].post("/run", body, timeout=limits.wall + SPARE_S, idempotent=True)
            result = Result.model_validate(reply)
        except (ServiceError, ValueError) as error:
            return infra_error("remote", f"{SERVICE}: {error}")
        return result.model_copy(update={"tier": f"remote:{result.tier}"})
