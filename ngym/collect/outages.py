"""Detects outages of services: the run pauses until the service is back, and a lost attempt is not counted."""

from __future__ import annotations

import asyncio

import orjson

from ngym.collect.concurrency import Gate
from ngym.errors import NgymError
from ngym.peers import Peers
from ngym.schema import Failure

READY_TIMEOUT_S = 5.0
NEVER = float("-inf")


class ServiceGone(NgymError):
    """A service was down for longer than a run waits."""


class Outages:
    """Distinguishes an outage of a service from a failure of one rollout, and holds the gate until the outage is over.

    A service that does not answer /ready is down. One that was restarted since (the head counts restarts) was down: its
    sessions and pending requests are lost. Call `begin` first.

    Args:
        poll_s, give_up_s: interval and total time of polling a service that is down.
    """

    def __init__(self, peers: Peers, gate: Gate, *, poll_s: float, give_up_s: float) -> None:
        self._peers = peers
        self._gate = gate
        self._poll_s = poll_s
        self._give_up_s = give_up_s
        self._watches: dict[str, asyncio.Task[bool]] = {}
        self._back_at: dict[str, float] = {}
        self._restarts: dict[str, int] = {}

    async def begin(self) -> None:
        """Ask the head how often each service was restarted before this run."""
        self._restarts = await self._restarts_now()

    async def explain(self, failure: Failure, since: float) -> bool:
        """Whether an attempt that began at `since` (loop time) failed because of an outage; waits until it is over.

        Raises:
            ServiceGone: the service did not come back.
        """
        service = failure["service"]
        lost = failure["class"] == "connect" or failure["http_status"] in (404, 503)  # 404: a session that is gone
        if not lost or service is None or service not in self._peers.urls:
            return False
        if since < self._back_at.get(service, NEVER):
            return True
        if service not in self._watches:
            self._watches[service] = asyncio.create_task(self._watch(service), name=f"outage of {service}")
        try:
            was_down = await asyncio.shield(self._watches[service])
        finally:
            if service in self._watches and self._watches[service].done():
                del self._watches[service]
        return was_down and since < self._back_at[service]

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _watch(self, service: str) -> bool:
        """Whether the service is or was down; returns when it is up."""
        was_down = await self._wait_until_ready(service)
        restarts = await self._restarts_now()
        if was_down or restarts.get(service, 0) > self._restarts.get(service, 0):
            self._restarts[service] = restarts.get(
                service, 0
            )  # only of this service: lost attempts of others still compare theirs
            self._back_at[service] = asyncio.get_running_loop().time()
            return True
        return False

    async def _wait_until_ready(self, service: str) -> bool:
        """Wait until the service is ready; returns whether it was down."""
        reason = await self._not_ready(service)
        if reason is None:
            return False
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._give_up_s
        try:
            while reason is not None:
                self._gate.hold(service, reason)
                if loop.time() >= ends:
                    waited = f"{reason}, for {self._give_up_s:.0f} s now"
                    raise ServiceGone(f"{waited}; fix it, then run again with --resume")
                await asyncio.sleep(self._poll_s)
                await self._peers.refresh()
                reason = await self._not_ready(service)
        finally:
            self._gate.hold(service, None)
        return True

    async def _not_ready(self, service: str) -> str | None:
        """Why no replica of the service can serve, or None."""
        reason, opener = None, self._peers.authorization(service)
        for url in self._peers.urls[service]:
            try:
                reply = await self._peers.send("GET", f"{url}/ready", None, opener, READY_TIMEOUT_S)
            except (OSError, TimeoutError):
                reason = f"{service} does not answer at {url}"
                continue
            if reply.status != 503:
                return None  # also a 404: NeMo Gym's services have no /ready
            reason = f"{service} is not ready at {url}: {_told(reply.body)}"
        return reason

    async def _restarts_now(self) -> dict[str, int]:
        """Restarts of each service, as the head reports them; empty if it does not."""
        return {server["name"]: server.get("restarts", 0) for server in await self._peers.servers()}


def _told(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["reason"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "503"
