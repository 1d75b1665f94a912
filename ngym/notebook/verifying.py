"""`ngym.verify`: the rewards and components of rows or answers, from the gym server that scores them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import orjson

from ngym.collect.collection_session import ConnectedServices
from ngym.did_you_mean import did_you_mean
from ngym.errors import ServiceError, UsageError
from ngym.files.task_rows import assistant_message
from ngym.grading import reverify
from ngym.grading.group_rewards import try_verify_group
from ngym.notebook.arguments import as_arguments, at_least_one, row_as_json
from ngym.notebook.collecting import rows_of
from ngym.notebook.progress import CallDisplay
from ngym.notebook.rollouts import NO_TASK
from ngym.notebook.services import Files, RunningServices, ServiceTarget
from ngym.peers import Peers
from ngym.runtime.event_loop import run_unless_failed
from ngym.schema import Json, agent_name, is_pending, row_problem, trace_of
from ngym.stats import parts_of
from ngym.validation import config_for_scoring

REMEDY = "start it with models=True"
ASKED = ("responses_create_params", "response", "ng", "agent_ref", "reward", "reward_components")


@dataclass(frozen=True)
class VerifyResult:
    """reward: None with a `failure`, or if the verifier gives none. details: other fields of row and verifier."""

    reward: float | None
    components: dict[str, float]
    details: Json
    failure: str | None = None


@overload
def verify(
    rows: Mapping[str, Any],
    *,
    answer: str | None = None,
    server: str | None = None,
    config: Files | None = None,
    overrides: Sequence[str] = (),
    head: str | RunningServices | None = None,
    models: bool = False,
    concurrency: int = 64,
    progress: bool = True,
) -> VerifyResult: ...
@overload
def verify(
    rows: Any,
    *,
    answer: str | None = None,
    server: str | None = None,
    config: Files | None = None,
    overrides: Sequence[str] = (),
    head: str | RunningServices | None = None,
    models: bool = False,
    concurrency: int = 64,
    progress: bool = True,
) -> list[VerifyResult]: ...
def verify(
    rows: Any,
    *,
    answer: str | None = None,
    server: str | None = None,
    config: Files | None = None,
    overrides: Sequence[str] = (),
    head: str | RunningServices | None = None,
    models: bool = False,
    concurrency: int = 64,
    progress: bool = True,
) -> VerifyResult | list[VerifyResult]:
    """Score a rollout, or each of several, without a model. The tool calls of rollouts are repeated.

        ngym.verify(rollouts.worst(5), config="global_config.yaml")
        ngym.verify(task, answer="The answer is 4.", server="math", head=services).components

    Comparative rewards need several rollouts of the same task among the rows.

    Args:
        rows: the row of a rollout, or several: Rollouts, a list, a data frame or dataset with all fields (`full=True`).
        answer: the model's answer, for rows that are tasks without a response.
        server: the gym server that scores; None: the one of the row's agent.
        config, overrides, head: the services, as for `ngym.collect_rollouts`. models: also start the models of the
            config that the gym server asks, such as a judge.
        concurrency: verifications at once.

    Raises:
        UsageError: a row has no response or a newer format, its gym server is unknown, or rows to compare name no task.
    """
    at_least_one(concurrency=concurrency)
    with as_arguments():
        call = _Call(_rows(rows, answer), ServiceTarget(config, overrides, head), server, models, concurrency)
    verdicts = call.target.run(call.run(), call.display, progress)
    return verdicts[0] if isinstance(rows, Mapping) else verdicts


async def verify_async(
    rows: Any,
    *,
    answer: str | None = None,
    server: str | None = None,
    config: Files | None = None,
    overrides: Sequence[str] = (),
    head: str | RunningServices | None = None,
    models: bool = False,
    concurrency: int = 64,
    progress: bool = True,
) -> list[VerifyResult]:
    """`verify` for a coroutine; always a list."""
    at_least_one(concurrency=concurrency)
    with as_arguments():
        call = _Call(_rows(rows, answer), ServiceTarget(config, overrides, head), server, models, concurrency)
    return await call.target.run_async(call.run(), call.display, progress)


class _Call:
    """One verification of some rows."""

    def __init__(
        self, rows: list[Json], target: ServiceTarget, server: str | None, models: bool, concurrency: int
    ) -> None:
        self.display = CallDisplay()
        self.target = target
        self._rows = rows
        self._server = server
        self._models = models
        self._slots = asyncio.Semaphore(concurrency)

    async def run(self) -> list[VerifyResult]:
        known = await self.target.discover()
        config = self.target.config
        gyms = [self._gym(row, known.stanzas, known.urls or known.stanzas) for row in self._rows]
        services = config_for_scoring(config, set(gyms), self._models, REMEDY) if config is not None else None
        async with self.target.connect(known, services, self.display) as reached:
            return await run_unless_failed(reached.failure(), self._verify_all(gyms, reached))

    async def _verify_all(self, gyms: Sequence[str], reached: ConnectedServices) -> list[VerifyResult]:
        requests = [self._verify_row(row, gym, reached.peers) for row, gym in zip(self._rows, gyms, strict=True)]
        scored: list[Json | str] = await asyncio.gather(*requests)
        waiting: dict[tuple[Any, ...], dict[int, Json]] = {}
        for index, row in enumerate(scored):
            if isinstance(row, dict) and is_pending(row):
                waiting.setdefault((gyms[index], *_task(row)), {})[index] = row
        for (gym, *task), group in waiting.items():
            if task == [None, None] and len(group) > 1:
                raise UsageError(NO_TASK)
            together = await try_verify_group(reached.peers[gym].post, list(group.values()))
            for index, row in zip(group, together, strict=True):
                scored[index] = row
        return list(map(_verdict, scored))

    async def _verify_row(self, row: Json, gym: str, peers: Peers) -> Json | str:
        """The answer of /verify, or the message of its error."""
        async with self._slots:
            try:
                return await reverify.verify_row(row, peers[gym])
            except ServiceError as error:
                return error.detail

    def _gym(self, row: Json, stanzas: Json, known: Mapping[str, Any]) -> str:
        """The gym server that scores this row."""
        if self._server is not None:
            gyms = [name for name in known if name not in stanzas or stanzas[name].get("kind") == "gym_server"]
            if self._server not in gyms:
                raise UsageError(f"server={self._server!r}: no such gym server{did_you_mean(self._server, gyms)}")
            return self._server
        agent = agent_name(row)
        if agent is None:
            raise UsageError("a row names no agent (agent_ref), so its gym server is unknown; name it with server=")
        gym = (stanzas.get(agent) or {}).get("gym")
        if not isinstance(gym, str):
            raise UsageError(f"the gym server that scores the rollouts of {agent!r} is unknown; name it with server=")
        return gym


def _rows(source: Any, answer: str | None) -> list[Json]:
    if isinstance(source, str | Path):
        raise UsageError(f"{source}: verify takes rows; load them with ngym.load_rollouts")
    rows = []
    for number, each in enumerate(rows_of(source, "a rollout's row or a task")):
        row: Json = orjson.loads(row_as_json(each, number))
        if answer is not None:
            row["response"] = {"status": "completed", "output": [assistant_message(answer)]}
        if not isinstance(row.get("response"), dict):
            raise UsageError(f"row {number} has no response; pass the row of a rollout, or answer=")
        if problem := row_problem(row):
            raise UsageError(f"row {number}: {problem}")
        rows.append(row)
    return rows


def _task(row: Json) -> tuple[Any, Any]:
    return trace_of(row).get("task_id"), row.get("_ng_task_index")


def _verdict(scored: Json | str) -> VerifyResult:
    if isinstance(scored, str):
        return VerifyResult(None, {}, {}, scored)
    fields = {name: value for name, value in scored.items() if name not in ASKED and not name.startswith("_ng_")}
    components = {name.removeprefix("reward_components/"): value for name, value in parts_of({**scored, "ng": {}})}
    return VerifyResult(scored.get("reward"), components, fields)
