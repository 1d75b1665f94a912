"""May a rollout be started now? A gate that several reasons can hold shut, and the watch on services that are down."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import orjson

from ngym.errors import NgymError
from ngym.peers import Peers

READY_TIMEOUT_S = 5.0


class ServiceGone(NgymError):
    """A service was down for longer than a run waits."""


@dataclass
class Gate:
    """Open as long as nobody holds it shut. `reasons`: who holds it -> one line for the screen."""

    reasons: dict[str, str] = field(default_factory=dict)
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def hold(self, who: str, reason: str | None) -> None:
        """Shut the gate for this reason; None takes it back."""
        if reason is None:
            self.reasons.pop(who, None)
        else:
            self.reasons[who] = reason
        if self.reasons:
            self._open.clear()
        else:
            self._open.set()

    async def opened(self) -> None:
        if self.reasons:
            await self._open.wait()


class Outages:
    """Tells an outage of a service from a rollout's own misfortune, and waits the outage out with the gate shut."""

    def __init__(self, peers: Peers, gate: Gate, *, poll_s: float, give_up_s: float) -> None:
        self._peers = peers
        self._gate = gate
        self._poll_s = poll_s
        self._give_up_s = give_up_s
        self._watches: dict[str, asyncio.Task[bool]] = {}
        self._back_at: dict[str, float] = {}

    async def explain(self, service: str | None, since: float) -> bool:
        """Whether an attempt that began at `since` (loop time) failed because the service was down; returns when it is back.

        Raises:
            ServiceGone: it did not come back.
        """
        if service is None or service not in self._peers.urls:
            return False
        if since < self._back_at.get(service, float("-inf")):
            return True
        if service not in self._watches:
            self._watches[service] = asyncio.create_task(self._watch(service), name=f"outage of {service}")
        try:
            return await asyncio.shield(self._watches[service])
        finally:
            if service in self._watches and self._watches[service].done():
                del self._watches[service]

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _watch(self, service: str) -> bool:
        reason = await self._not_ready(service)
        if reason is None:
            return False
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._give_up_s
        try:
            while reason is not None:
                self._gate.hold(service, reason)
                if loop.time() >= ends:
                    raise ServiceGone(
                        f"{reason}, for {self._give_up_s:.0f} s now; mend it, then run again with --resume"
                    )
                await asyncio.sleep(self._poll_s)
                await self._peers.refresh()
                reason = await self._not_ready(service)
        finally:
            self._gate.hold(service, None)
        self._back_at[service] = loop.time()
        return True

    async def _not_ready(self, service: str) -> str | None:
        """Why no replica of the service can serve, or None."""
        reason = None
        for url in self._peers.urls[service]:
            try:
                reply = await self._peers.send("GET", f"{url}/ready", None, {}, READY_TIMEOUT_S)
            except (OSError, TimeoutError):
                reason = f"{service} does not answer at {url}"
                continue
            if reply.status != 503:
                return None  # also a 404: NeMo Gym's services have no /ready
            reason = f"{service} is not ready at {url}: {_told(reply.body)}"
        return reason


def _told(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["reason"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "503"
