"""Outages of the replicas of model servers, as far as they decide whether captured calls may be lost.

A replica that was down since before a rollout began has served none of its calls. Being down is certain if its machine
refuses connections, since no process listens there. A replica that only this process cannot reach, such as behind a
broken switch, may still serve an agent on another machine.
"""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import dataclass

from ngym.peers import Peers
from ngym.runtime.event_loop import log_error

PROBE_S = 1.0  # between the probes of a replica that is down
PROBE_TIMEOUT_S = 5.0


@dataclass
class _Outage:
    """Times by time.perf_counter(). since: the first failure of the replica's last outage.

    refused_since: the first refusal, if all contacts since then were refused. died_at: the last time when refusals began.
    """

    since: float
    refused_since: float | None = None
    died_at: float | None = None


class ReplicaOutages:
    """Records failed calls of replicas, and probes a replica until it answers again. Close it at the end."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._outages: dict[str, _Outage] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}

    def record(self, model: str, url: str, error: OSError | None) -> None:
        """Record that a call of this replica failed. error: None if it answered that it is not ready."""
        if url not in self._probes:
            died_at = self._outages[url].died_at if url in self._outages else None
            self._outages[url] = _Outage(time.perf_counter(), died_at=died_at)
            self._probes[url] = asyncio.create_task(self._probe(model, url), name=f"the outage of {url}")
            self._probes[url].add_done_callback(log_error)
        outage = self._outages[url]
        if not _is_refused(error):
            outage.refused_since = None
        elif outage.refused_since is None:
            outage.refused_since = outage.died_at = time.perf_counter()

    def was_down(self, url: str, began: float) -> bool:
        """Whether no contact with this replica has succeeded since a time before `began`."""
        return url in self._probes and self._outages[url].since <= began

    def was_dead(self, url: str, began: float) -> bool:
        """Whether no process has listened there since a time before `began`, as far as probes show."""
        refused_since = self._outages[url].refused_since if url in self._probes else None
        return refused_since is not None and refused_since <= began

    def has_died(self, url: str, began: float) -> bool:
        """Whether a process that may have served calls after `began` has ended, and its captured calls with it."""
        died_at = self._outages[url].died_at if url in self._outages else None
        return died_at is not None and died_at > began

    async def close(self) -> None:
        """End the probes."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    async def _probe(self, model: str, url: str) -> None:
        """Call /ready until the replica answers."""
        try:
            while True:
                await asyncio.sleep(PROBE_S)
                try:
                    opener = self._peers.authorization(model)
                    reply = await self._peers.send("GET", f"{url}/ready", None, opener, PROBE_TIMEOUT_S)
                except OSError as error:
                    self.record(model, url, error)
                    continue
                if reply.status != 503:
                    return
                self.record(model, url, None)
        finally:
            del self._probes[url]


def _is_refused(error: OSError | None) -> bool:
    """Whether the machine of the replica answered that no process listens there."""
    return errno.ECONNREFUSED in (getattr(each, "errno", None) for each in (error, getattr(error, "__cause__", None)))
