"""One sitting of a collection: runs the rest of the plan with its services, and completes the files however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from ngym.collect.aggregate import environment_metrics
from ngym.collect.display import Meter, Show
from ngym.collect.files import Files
from ngym.collect.plan import PlannedRollout
from ngym.collect.rollout_rows import FailedAttempt
from ngym.collect.run import Gate, Limits, Run
from ngym.peers import Peers
from ngym.runtime.event_loop import never, unless

FLUSH_S = 4.0
NOT_READY_S = 2.0  # how often the head is asked which services are not ready


@dataclass(frozen=True)
class Reached:
    """Available services. failure: waits forever; raises when a service is given up."""

    peers: Peers
    failure: Callable[[], Awaitable[None]] = never


@dataclass
class Sitting:
    """Collects into prepared files. status: how it ended. outcomes: finished and failed attempts. seconds: of the run.

    Args:
        shown: the display while rollouts run.
        say: prints a line after the display has ended.
    """

    store: Files
    limits: Limits
    gate: Gate
    shown: Callable[[Meter], AbstractAsyncContextManager[Show]]
    say: Callable[[str], None]
    status: str = "failed"
    outcomes: int = 0
    seconds: float = 0.0

    async def collect(self, services: AbstractAsyncContextManager[Reached]) -> None:
        """Collect what is left; raises what ended it early. A cancelled sitting can be resumed."""
        store = self.store
        try:
            async with services as reached:
                try:
                    await self._run(reached)
                finally:
                    await self._flush()
                for name, tally in store.aggregates.by_agent.items():
                    tally.own = await environment_metrics(store.paths.output, reached.peers[name])
            self.status = "done"
        except asyncio.CancelledError:
            self.status = "interrupted"
            raise
        finally:
            if not self.gate.reasons.get("disk"):
                store.finish(self.status)

    async def _run(self, reached: Reached) -> None:
        store = self.store
        run = store.run(reached.peers, self.limits, self.gate)
        meter = Meter(store.aggregates, store.progress, lambda: run.in_flight, self.gate.reasons)
        async with self.shown(meter) as show:
            beside = asyncio.create_task(_say_who_is_not_ready(store, reached.peers, show))
            began = time.monotonic()
            try:
                plan = store.todo(self.limits.max_attempts)
                await unless(reached.failure(), self._consume(run, plan, show))
            finally:
                self.seconds = time.monotonic() - began
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)

    async def _consume(self, run: Run, plan: AsyncIterator[PlannedRollout], show: Show) -> None:
        """Consume all outcomes; shows the first failure of each class at once."""
        told: set[str] = set()
        async with aclosing(run.outcomes(plan)) as outcomes:
            async for outcome in outcomes:
                self.outcomes += 1
                if isinstance(outcome, FailedAttempt) and outcome.failure["class"] not in told:
                    failure = outcome.failure
                    told.add(failure["class"])
                    show.say(
                        f"first {failure['class']} (task {outcome.key.task_index}, {failure['service']}): {failure['message']}"
                    )

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.store.flush()
        except TimeoutError:
            lost = "a resumed run repeats the rollouts that are not on the disk"
            self.say(f"no row was written for {FLUSH_S:.0f} s; {lost}")


async def _say_who_is_not_ready(store: Files, peers: Peers, show: Show) -> None:
    """Show the services that are not ready until the first rollout ends: a model may load for minutes."""
    said = ""
    while not (store.aggregates.done or store.aggregates.given_up):
        waiting = [server for server in await peers.servers() if server.get("status", "ready") != "ready"]
        names = ", ".join(f"{server['name']} ({server.get('detail') or server['status']})" for server in waiting)
        if names and names != said:
            show.say(f"not ready yet: {names}")
        said = names
        await asyncio.sleep(NOT_READY_S)
