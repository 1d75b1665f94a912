"""Collects rollouts: `collect` yields them as they finish; `ng_collect_rollouts` adds files and a display.

Read in this order: plan (which rollouts), run (one semaphore, attempts, pauses), rollout_rows (answers become rows),
files (the log, resume), then aggregate and display.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing

from ngym.collect.plan import CollectionPlan, check_rows, plan_rollouts
from ngym.collect.rollout_rows import FailedAttempt, Outcome, Rollout, TokenFormat
from ngym.collect.rollout_scheduler import CollectionLimits, Gate, RolloutScheduler
from ngym.peers import Peers
from ngym.schema import Json

__all__ = ["CollectionLimits", "CollectionPlan", "FailedAttempt", "Gate", "Outcome", "Rollout", "collect"]

ONCE = CollectionPlan()
DEFAULTS = CollectionLimits()


async def collect(
    tasks: Iterable[Json],
    *,
    peers: Peers,
    recipe: CollectionPlan = ONCE,
    limits: CollectionLimits = DEFAULTS,
    token_format: TokenFormat = "ng",
    gate: Gate | None = None,
    models: Collection[str] | None = None,
) -> AsyncGenerator[Outcome, None]:
    """Yield rollouts and failed attempts in order of completion; nothing is written to disk.

    Args:
        tasks: input rows (reference/rows.md), taken one at a time when there is room; the iterable may be infinite.
        peers: the services, with every agent that the rows or the recipe name.
        gate: hold it to start no new rollouts; those in flight continue.
        models: model servers that may have captured calls of external agents; None asks the head of `peers`.

    Raises:
        UsageError: a task is not valid. ServiceGone: a service was down for too long.
    """
    scheduler = RolloutScheduler(
        peers, limits, run_id=secrets.token_hex(6), token_format=token_format, gate=gate, models=models
    )
    async with aclosing(scheduler.outcomes(plan_rollouts(check_rows(tasks, recipe, peers.urls), recipe))) as outcomes:
        async for outcome in outcomes:
            yield outcome
