"""Runs planned rollouts: one semaphore, capped attempts, pauses during outages, and groups that are graded together.

plan -> slot -> window of the agent -> its /run -> outcome -> keep (the disk) -> the caller
          ^______ failed and attempts left, or the service was down

A rollout whose reward needs the others of its task waits for them in memory. If the run ends before, a resumed run
collects it again.

An agent whose rollouts wait for a model has no queue and gets the full concurrency of the run. A CPU-bound agent gets
enough rollouts to stay busy: each further one would only hold a connection and a body while it queues.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson

from ngym.collect.plan import PlannedRollout
from ngym.collect.rollout_rows import (
    Attempt,
    CaptureClient,
    Outcome,
    Rollout,
    TokenFormat,
    failure_of,
    failure_row,
    rollout_row,
    tell,
)
from ngym.errors import Boundary, NgymError, ServiceError
from ngym.grading import group_rewards
from ngym.net import request_context
from ngym.net.json_limits import serialize
from ngym.option_names import option
from ngym.peer_answers import json_of
from ngym.peers import Peers
from ngym.schema import TOKEN_FORMAT_HEADER, WAITING_HEADER, Failure, Json, RolloutKey, is_pending
from ngym.telemetry import tracing

MIN_WINDOW = 64  # rollouts to begin with, and the fewest
TARGET_QUEUE = 32  # queued rollouts: the agent does not run out of work before it gets more
WINDOW_GROWTH_S = 0.05  # the window grows by half at this interval, until the agent reports a long queue
QUEUE_REPORT_VALID_S = 1.0  # how long a report is valid; each finished rollout brings a new one
READY_TIMEOUT_S = 5.0
NEVER = float("-inf")
BACKLOG = 2048  # outcomes that wait for the disk or the reader; at this bound no rollout is started
FREE_OUTAGES = 5  # outages per rollout that cost no attempt
RETRY_S = (1.0, 4.0)
Keep = Callable[[Outcome], Awaitable[None]]
Plan = Iterable[PlannedRollout] | AsyncIterable[PlannedRollout]


@dataclass
class Gate:
    """A gate that is open while nothing holds it.

    Attributes:
        reasons: holder -> one line for the screen.
        on_hold: called with the reason when a holder begins to hold it.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    on_hold: Callable[[str], None] = lambda reason: None
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def hold(self, holder: str, reason: str | None) -> None:
        """Close the gate for this reason; None withdraws the holder's reason."""
        if reason is None:
            self.reasons.pop(holder, None)
        else:
            is_new = holder not in self.reasons
            self.reasons[holder] = reason
            if is_new:
                self.on_hold(reason)
        if self.reasons:
            self._open.clear()
        else:
            self._open.set()

    async def wait_until_open(self) -> None:
        if self.reasons:
            await self._open.wait()


class Window:
    """Rollouts in flight at one agent.

    Args:
        limit: the largest size of the window.
    """

    def __init__(self, limit: int) -> None:
        self.size = min(MIN_WINDOW, limit)
        self.in_flight = 0
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._opens_at = self._loop.time() + WINDOW_GROWTH_S
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        """Wait until there is room for one more rollout. One caller at a time."""
        while self.in_flight >= self.size:
            self._changed.clear()
            if self.size >= self._limit:
                await self._changed.wait()
            elif self._loop.time() >= self._opens_at:
                self.size = min(self._limit, self.size * 3 // 2 + 1)
                self._opens_at = self._loop.time() + WINDOW_GROWTH_S
            else:
                timer = self._loop.call_at(self._opens_at, self._changed.set)
                try:
                    await self._changed.wait()
                finally:
                    timer.cancel()
        self.in_flight += 1

    def record_queue(self, waiting: int) -> None:
        """Record the agent's queue length, which a finished rollout reports."""
        if waiting >= TARGET_QUEUE:
            self._opens_at = self._loop.time() + QUEUE_REPORT_VALID_S
        else:
            self._opens_at = min(self._opens_at, self._loop.time() + WINDOW_GROWTH_S)
        if waiting > 2 * TARGET_QUEUE:
            self.size = max(min(MIN_WINDOW, self._limit), min(self.size, self.in_flight - waiting + TARGET_QUEUE))

    def leave(self) -> None:
        self.in_flight -= 1
        self._changed.set()


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
            # Only of this service: lost attempts of others still compare theirs.
            self._restarts[service] = restarts.get(service, 0)
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
                    raise ServiceGone(f"{waited}; fix it, then run again with {option('resume', True)}")
                await asyncio.sleep(self._poll_s)
                await self._peers.refresh()
                reason = await self._not_ready(service)
        finally:
            self._gate.hold(service, None)
        return True

    async def _not_ready(self, service: str) -> str | None:
        """The reason why no replica of the service can serve, or None."""
        reason, opener = None, self._peers.authorization(service)
        for url in self._peers.urls[service]:
            try:
                reply = await self._peers.send("GET", f"{url}/ready", None, opener, READY_TIMEOUT_S)
            except (OSError, TimeoutError):
                reason = f"{service} does not answer at {url}"
                continue
            if reply.status != 503:
                return None  # also a 404: NeMo Gym's services have no /ready
            reason = f"{service} is not ready at {url}: {_reason(reply.body)}"
        return reason

    async def _restarts_now(self) -> dict[str, int]:
        """Restarts of each service, as the head reports them; empty if it does not."""
        return {server["name"]: server.get("restarts", 0) for server in await self._peers.servers()}


def _reason(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["reason"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "503"


@dataclass
class _Group:
    missing: int
    waiting: list[Rollout] = field(default_factory=list)


class PendingGroups:
    """The groups in flight; a group is removed when its last rollout is finished or given up."""

    def __init__(self) -> None:
        self._groups: dict[RolloutKey, _Group] = {}

    def add_if_pending(self, planned: PlannedRollout, outcome: Outcome) -> bool:
        """Whether this outcome waits here for the rest of its group."""
        waits = bool(planned.group) and isinstance(outcome, Rollout) and is_pending(outcome.row)
        if waits and isinstance(outcome, Rollout):
            self._group_of(planned).waiting.append(outcome)
        return waits

    def settle(self, planned: PlannedRollout) -> list[Rollout]:
        """The waiting rollouts of a group, if this was its last one. Call it once for each settled rollout."""
        if len(planned.group) < 2 and not self._groups:
            return []
        group = self._group_of(planned)
        group.missing -= 1
        if group.missing > 0:
            return []
        self._groups.pop(planned.first, None)
        return sorted(group.waiting, key=lambda rollout: rollout.key.rollout_index)

    def _group_of(self, planned: PlannedRollout) -> _Group:
        return self._groups.setdefault(planned.first, _Group(max(1, len(planned.group))))


@dataclass(frozen=True)
class CollectionLimits:
    """concurrency: rollouts in flight. timeout_s: of one attempt. max_attempts: for retryable failures.

    poll_s, give_up_s: interval of polling a service that is down, and the time after which the run fails.
    """

    concurrency: int = 64
    timeout_s: float = 1800.0
    max_attempts: int = 3
    retry_s: tuple[float, ...] = RETRY_S
    poll_s: float = 1.0
    give_up_s: float = 1800.0


async def _keep_nothing(outcome: Outcome) -> None:
    return None


class RolloutScheduler:
    """Schedules the rollouts of a collection: concurrency, retries, outages.

    Args:
        keep: called with each outcome before it is yielded; returns when it is safe (a RowLog's append).
        failed_before: failed attempts of this rollout in earlier invocations of the run.
        models: the model servers that may have captured calls; None asks the head.
    """

    def __init__(
        self,
        peers: Peers,
        limits: CollectionLimits,
        *,
        run_id: str,
        token_format: TokenFormat = "ng",
        keep: Keep = _keep_nothing,
        failed_before: Callable[[PlannedRollout], int] = lambda planned: 0,
        gate: Gate | None = None,
        models: Collection[str] | None = None,
    ) -> None:
        self.run_id = run_id
        self.gate = gate or Gate()
        self.in_flight = 0
        self._peers = peers
        self._limits = limits
        self._token_format: TokenFormat = token_format
        self._headers = {TOKEN_FORMAT_HEADER: token_format}
        self._keep = keep
        self._failed_before = failed_before
        self._outages = Outages(peers, self.gate, poll_s=limits.poll_s, give_up_s=limits.give_up_s)
        self._captures = CaptureClient(peers, models)
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._windows: dict[str, Window] = {}  # by agent
        self._pending_groups = PendingGroups()
        self._unread = 0
        self._room = asyncio.Event()
        self._room.set()
        self._finished: asyncio.Queue[Outcome | None] = asyncio.Queue()  # holds at most BACKLOG + concurrency

    async def outcomes(self, plan: Plan) -> AsyncGenerator[Outcome, None]:
        """Yield finished rollouts and failed attempts in order of completion. Leaving the loop cancels those in flight.

        plan: advanced whenever there is room; an asynchronous plan may wait.

        Raises:
            ServiceGone, DiskFull, WriteFailed: the run cannot continue; yielded outcomes are safe.
        """
        dispatch = asyncio.create_task(self._dispatch(plan), name="dispatch rollouts")
        try:
            while (outcome := await self._finished.get()) is not None:
                self._unread -= 1
                if self._unread < BACKLOG:
                    self._room.set()
                yield outcome
            await dispatch
        finally:
            dispatch.cancel()
            await asyncio.gather(dispatch, return_exceptions=True)
            await self._outages.close()
            await self._captures.close()

    async def _dispatch(self, plan: Plan) -> None:
        try:
            await self._outages.begin()
            await self._captures.begin()
            async with asyncio.TaskGroup() as group:
                async for planned in _iterate(plan):
                    await self._slots.acquire()
                    await self._window(planned.agent).enter()
                    await self.gate.wait_until_open()
                    await self._room.wait()
                    group.create_task(self._one(planned))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._finished.put_nowait(None)

    async def _one(self, planned: PlannedRollout) -> None:
        self.in_flight += 1
        try:
            outcome = await self._attempts(planned)
        finally:
            self.in_flight -= 1
            self._slots.release()
            self._window(planned.agent).leave()
        if not self._pending_groups.add_if_pending(planned, outcome):
            await self._deliver(outcome)
        if group := self._pending_groups.settle(planned):
            rows = await self.verify_group(planned.agent, [rollout.row for rollout in group])
            judged = [Rollout(rollout.key, row) for rollout, row in zip(group, rows, strict=True)]
            await asyncio.gather(*map(self._deliver, judged))

    async def verify_group(self, agent: str, rows: Sequence[Json]) -> list[Json]:
        """The rows of a task with rewards from group verification; at most one group per slot at a time. An outage is
        waited for, any other error leaves the rows unscored, with the reason.

        Raises:
            ServiceGone: a service did not come back.
        """
        outages = 0
        async with self._slots:
            while True:
                await self.gate.wait_until_open()
                began = asyncio.get_running_loop().time()
                request_context.current.set(
                    request_context.new_correlation(f"{self.run_id}-{secrets.token_hex(3)}", group_rewards.TIMEOUT_S)
                )
                try:
                    return await group_rewards.verify_group(self._peers[agent].post, rows)
                except ServiceError as error:
                    failure = failure_of(error, agent)
                    if outages < FREE_OUTAGES and await self._outages.explain(failure, began):
                        outages += 1
                        continue
                    return [group_rewards.mark_unscored(row, failure["class"], failure["message"]) for row in rows]

    async def _deliver(self, outcome: Outcome) -> None:
        """Keep an outcome, then hand it to the reader."""
        self._unread += 1
        if self._unread >= BACKLOG:
            self._room.clear()
        await self._keep(outcome)
        self._finished.put_nowait(outcome)

    def _window(self, agent: str) -> Window:
        if agent not in self._windows:
            self._windows[agent] = Window(self._limits.concurrency)
        return self._windows[agent]

    async def _attempts(self, planned: PlannedRollout) -> Outcome:
        number, outages = self._failed_before(planned), 0
        while True:
            await self.gate.wait_until_open()
            began = asyncio.get_running_loop().time()
            outcome = await self._attempt(planned, number)
            if isinstance(outcome, Rollout):
                return outcome
            if outages < FREE_OUTAGES and await self._outages.explain(outcome.failure, began):
                outages += 1  # not the rollout's fault: costs no attempt; bounded, as a rollout may kill the service
                continue
            if outcome.final:
                return outcome
            await self._deliver(outcome)
            pause = self._limits.retry_s[min(number, len(self._limits.retry_s) - 1)]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            number += 1

    async def _attempt(self, planned: PlannedRollout, number: int) -> Outcome:
        key = planned.key
        rollout_id = f"{self.run_id}-{key.task_index}-{key.rollout_index}-{secrets.token_hex(3)}"
        attempt = Attempt(
            planned, number, self.run_id, rollout_id, datetime.now(UTC).isoformat(timespec="milliseconds")
        )
        request_context.current.set(request_context.new_correlation(rollout_id, self._limits.timeout_s))
        with tracing.span("rollout", is_rollout=True) as span:
            outcome = await self._run_attempt(attempt)
            tell(span, attempt, outcome)
        return outcome

    async def _run_attempt(self, attempt: Attempt) -> Outcome:
        limits, planned, rollout_id = self._limits, attempt.planned, attempt.rollout_id
        began = time.perf_counter()
        try:
            peer = self._peers[planned.agent]
            body = serialize(planned.row)
            reply = await peer.request("POST", "/run", body, headers=self._headers, timeout=limits.timeout_s)
            waiting = reply.headers.get(WAITING_HEADER, "")
            if waiting.isdecimal() and len(waiting) < 10:
                self._window(planned.agent).record_queue(int(waiting))
            answer = json_of(reply, planned.agent, "/run")
            await self._captures.complete(planned.agent, rollout_id, answer, began)
            with Boundary("agent_error", f"{planned.agent} answered /run with an invalid record"):
                return rollout_row(attempt, answer, time.perf_counter() - began, self._token_format)
        except ServiceError as error:
            failure = failure_of(error, planned.agent)
            final = not failure["retryable"] or attempt.number + 1 >= limits.max_attempts
            return failure_row(attempt, failure, final=final)


def _first(error: BaseException) -> BaseException:
    """The first error of an exception group; all have the same cause here, the disk or a service."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _iterate(plan: Plan) -> AsyncIterator[PlannedRollout]:
    if isinstance(plan, AsyncIterable):
        async for planned in plan:
            yield planned
    else:
        for planned in plan:
            yield planned
