"""The environment's rewards for a finished rollout, in a worker process that is killed at a deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from ngym.schema import Json
from ngym.workers import WorkerPool

from .environment import Source, load

pool = WorkerPool(Path(__file__), "score", memory_mib=8192)


class NotScored(Exception):
    """There is no reward; the text says why.

    outcome: `verify_error` (the environment raised), `too_heavy` (too much time or memory), `ungradable` (the process
    died) or `infra_error`.
    """

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def score(source: Json, record: Json, state: Json) -> Json:
    """Runs in a worker: the trace's rewards, metrics and info after the task's own hooks, or `problem`."""
    environment = load(Source.model_validate(source))
    trace = environment.trace_from(record, state)
    task = environment.task(trace.task.data.model_dump(mode="json"))

    async def run() -> None:
        await environment.hook(task, "finalize", trace)
        await task.score(trace)

    try:
        asyncio.run(run())
    except Exception as error:  # noqa: BLE001 - code of the environment's author: an exception is not a verdict
        return {"problem": f"{type(error).__name__}: {error}"}
    scored: Json = trace.model_dump(mode="json", include={"rewards", "metrics", "info"})
    return scored


async def score_trace(source: Source, trace: vf.Trace[Any, Any, Any], deadline_s: float) -> None:
    """Put the task's rewards, metrics and info into the trace. Raises NotScored."""
    state = trace.state.model_dump(mode="json")
    outcome = await pool.run(source.model_dump(), trace.to_record(), state, deadline_s=deadline_s)
    if outcome.kind != "ok":
        failure = outcome.failure()
        raise NotScored(failure["outcome"], failure["reason"])
    if "problem" in outcome.value:
        raise NotScored("verify_error", outcome.value["problem"])
    trace.rewards = {n: r and vf.Reward.model_validate(r) for n, r in outcome.value["rewards"].items()}
    trace.metrics, trace.info = outcome.value["metrics"], outcome.value["info"]
