"""The stream of finished groups of rollouts.

    tasks -> admitted -> attempts in flight -> complete -> taken by a step

After `step` trained and published batches, at most (max_lag + step + 1) x tasks_per_step tasks have been admitted. A
step takes complete groups in the order of their admission, and waits for those that would be too old for later steps,
so that no group is discarded for its age. With max_lag 0, a step's tasks are admitted when its weights are served, and
the step waits for all of them.

A rollout that was partly sampled with weights older than the recipe allows (a server restarted with its initial
weights) is collected again after the weights are pushed again.

    rollouts_tasks.jsonl       the task of each number, in the order of the draws
    rollouts.jsonl             finished rollouts, in order of completion (reference/rows.md)
    rollouts_failures.jsonl    failed rollouts

`_ng_train` in each row has the task's number and the number of batches behind the oldest weights in it. The draws of a
curriculum depend on which groups finish first, so their order is recorded instead of derived. A task's number is
written before its rows, so that a number means the same task after a resumption.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from ngym.collect import CollectionLimits, CollectionPlan, FailedAttempt, Outcome
from ngym.collect.plan import PlannedRollout, plan_rollouts, sampling_seed
from ngym.collect.rollout_scheduler import Gate, RolloutScheduler
from ngym.errors import UsageError
from ngym.files.row_log import RowLog
from ngym.peers import Peers
from ngym.schema import Json, is_failed_attempt, is_pending

from ..data.samples import sampled_nothing
from ..recipe.rollout_options import RolloutOptions
from .task_sampler import DrawnTask, Task, TaskSource

TRAINER_FIELD = "_ng_train"
NEVER_PUSHED = -(1 << 30)  # stands for weights that were never pushed: older than any allowed lag
MAX_STALE = 5  # limit of repeated collections of a whole group
SILENCE_S = 120.0  # without the end of a rollout, until the stream says so; then twice as long


class RowPosition(NamedTuple):
    """The position of a row."""

    path: Path
    start: int
    end: int


class RolloutFiles:
    """The three files of a run, open for writing; on an event loop.

    Args:
        file: rollouts.jsonl; the others are next to it.
        is_due: whether the task with this number, and its rows, may be requested.

    Raises:
        FileLocked: another trainer writes them. UsageError: a line is invalid.
    """

    def __init__(self, file: Path, is_due: Callable[[int], bool]) -> None:
        self._finished = RowLog(file, _identity)
        self._failed = RowLog(file.with_name(f"{file.stem}_failures{file.suffix}"), _identity)
        self._order = RowLog(file.with_name(f"{file.stem}_tasks{file.suffix}"), _number)
        self._positions: dict[tuple[int, int], tuple[str, RowPosition]] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._recording: dict[int, asyncio.Task[None]] = {}
        self.drawn_tasks: dict[int, DrawnTask] = {
            line.row["number"]: DrawnTask(line.row["environment"], line.row["index"])
            for line in self._order.rows()
            if is_due(line.row["number"])
        }
        for log in (self._finished, self._failed):
            for line in log.rows():
                record = line.row[TRAINER_FIELD]
                number, index = line.row["_ng_task_index"], line.row["_ng_rollout_index"]
                if is_due(number):
                    start = log.start_of(line)
                    place = RowPosition(log.path, start, start + line.end - line.start)
                    self._positions[number, index] = (record["task"], place)

    def __len__(self) -> int:
        return len(self._positions)

    def rows(self, number: int, task: str) -> Iterator[Json]:
        """The rows that were collected for this task and number before a resumption, in order; each is returned only
        once.
        """
        for key in sorted(key for key in self._positions if key[0] == number):
            owner, place = self._positions.pop(key)
            if owner == task:
                with place.path.open("rb") as file:
                    file.seek(place.start)
                    yield orjson.loads(file.read(place.end - place.start))

    def record(self, task: Task) -> None:
        """Write the number of a newly drawn task, before any of its rows."""
        if task.number in self.drawn_tasks:
            return
        row = orjson.dumps({"number": task.number, "environment": task.environment, "index": task.index})
        self._recording[task.number] = self._write(self._order.append(row))
        self._recording[task.number].add_done_callback(lambda _: self._recording.pop(task.number))

    def keep(self, row: Json) -> None:
        """Write a row in the background; `check` raises if that failed. The row may be used before it is on the disk."""
        self._write(self._append(row))

    async def _append(self, row: Json) -> None:
        if (recording := self._recording.get(row["_ng_task_index"])) is not None:
            await asyncio.shield(recording)
        log = self._failed if is_failed_attempt(row) else self._finished
        await log.append(orjson.dumps(row))

    def _write(self, writes: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        writing = asyncio.create_task(writes, name="rollout files")
        self._writing.add(writing)
        writing.add_done_callback(self._on_written)
        return writing

    def _on_written(self, writing: asyncio.Task[None]) -> None:
        if writing.cancelled() or writing.exception() is None:
            self._writing.discard(writing)  # a failed one stays, for `check`

    def check(self) -> None:
        """
        Raises:
            DiskFull, WriteFailed: a row could not be written.
        """
        for writing in self._writing:
            if writing.done():
                writing.result()

    async def close(self) -> None:
        """Returns when everything is on the disk. Raises DiskFull, WriteFailed: some rows could not be written."""
        logs = (self._order, self._finished, self._failed)
        try:
            await asyncio.gather(*self._writing)
            for log in logs:
                await log.flush()
        finally:
            for writing in self._writing:
                writing.cancel()
            await asyncio.gather(*self._writing, return_exceptions=True)
            for log in logs:
                log.close()


def _number(row: Json) -> int:
    number, _, _ = row["number"], row["environment"], row["index"]
    return int(number)


def _identity(row: Json) -> str:
    identity: str = row["ng"]["rollout_id"]
    return identity if TRAINER_FIELD in row else ""


@dataclass
class Group:
    """The attempts at one task. step: trained batches at its admission. requested: the next attempt's index."""

    task: Task
    step: int
    requested: int = 0
    running: int = 0
    stale: int = 0
    rows: list[Json] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.running == 0

    @property
    def rewards(self) -> list[float]:
        """The rewards so far."""
        return [row["reward"] for row in self._scored]

    @property
    def components(self) -> list[dict[str, float]]:
        """The components of each of the rewards."""
        return [row["ng"].get("reward_components") or {} for row in self._scored]

    @property
    def _scored(self) -> list[Json]:
        return [row for row in self.rows if row.get("reward") is not None]


@dataclass(frozen=True)
class StepRollouts:
    """The input of a step. rows: of all attempts, including failed ones, in the order of the tasks.

    lags: for each row, how many batches its oldest weights are behind the trainer. stale: rollouts that were collected
    again. equal: groups left out because they have no learning signal. metrics: of the tasks.
    """

    rows: list[Json]
    lags: list[int]
    stale: int
    equal: int
    metrics: dict[str, float]


def reporting_gate(limits: CollectionLimits, say: Callable[[str], None]) -> Gate:
    """A gate that says what a collection waits for."""
    return Gate(on_hold=lambda reason: say(f"{reason}; waiting for it, {limits.give_up_s:.0f} s at the most"))


def next_batch(groups: Iterable[Group], size: int, step: int, max_lag: int) -> list[Group]:
    """The first `size` complete groups; empty if the remaining ones could then not all be trained in time.

    A group must be trained after at most group.step + max_lag batches. The remaining groups are trained in order,
    `size` per batch, so it is not enough to look at the groups that are due with this batch.

    Args:
        groups: all that wait for a batch, complete or not.
        step: number of trained batches.
    """
    waiting = sorted(groups, key=lambda group: group.task.number)
    chosen = [group for group in waiting if group.complete][:size]
    numbers = {group.task.number for group in chosen}
    staying = [group for group in waiting if group.task.number not in numbers]
    in_time = all(step + 1 + place // size <= group.step + max_lag for place, group in enumerate(staying))
    return chosen if len(chosen) == size and in_time else []


class RolloutStream:
    """Runs on the event loop of the services. Call `open`, then `announce_version`, `record_version` and `take` in turn; always
    `close`.

    Args:
        temperature: of all attempts.
        steps: number of batches in all; nothing is collected for later ones.
        file: of the rollouts.
        has_learning_signal: whether a group has a learning signal, for dynamic sampling.
        say: called with the reason when the collection begins to wait for a service, and when no rollout ends for long.
    """

    def __init__(
        self,
        peers: Peers,
        tasks: TaskSource,
        options: RolloutOptions,
        temperature: float,
        seed: int,
        steps: int,
        file: Path,
        has_learning_signal: Callable[[Group], bool],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._judging: set[asyncio.Task[None]] = set()
        self._has_learning_signal = has_learning_signal
        self._say = say
        self._tasks = tasks
        self._options = options
        self._temperature = temperature
        self._seed = seed
        self._steps = steps
        self._file = file
        limits = CollectionLimits(concurrency=options.concurrency, timeout_s=options.timeout_s)
        self._run = RolloutScheduler(
            peers,
            limits,
            gate=reporting_gate(limits, say),
            run_id=f"train-{secrets.token_hex(4)}",
            keep=self._store,
        )
        self._step = 0
        self._admitted = 0
        self._excluded = 0  # total number of groups
        self._equal = 0  # groups that were left out since the last `take`
        self._stale = 0
        self._groups: dict[int, Group] = {}
        self._retries: deque[Group] = deque()  # groups that need one more attempt after the next push
        self._batches_of_version: dict[int, int] = {}  # policy version -> number of trained batches
        self._planned: asyncio.Queue[PlannedRollout] = asyncio.Queue()
        self._joining = False
        self._changed = asyncio.Event()
        self._served = asyncio.Event()

    async def open(self, state: Json | None) -> int:
        """Begin, or continue from a state; returns how many earlier rollouts are available.

        Raises:
            UsageError, FileLocked: the files cannot be used.
        """
        groups = []
        if state is not None:
            self._tasks.restore(state["tasks"])
            self._step, self._admitted, self._excluded = state["step"], state["admitted"], state["left_out"]
            groups = [
                Group(self._tasks.restore_task(*group_state["task"]), group_state["step"])
                for group_state in state["groups"]
            ]
        numbers = {group.task.number for group in groups}
        self._files = RolloutFiles(self._file, lambda number: number in numbers or number >= self._admitted)
        self._tasks.replay(self._files.drawn_tasks)
        at_hand = len(self._files)
        for group in groups:
            self._begin(group)
        self._collecting = asyncio.create_task(self._collect(), name="collect for training")
        return at_hand

    def state(self) -> Json:
        """The state from which `open` continues after the batches that were taken so far, as JSON."""
        groups = self._groups.values()
        return {
            "step": self._step,
            "admitted": self._admitted,
            "left_out": self._excluded,
            "tasks": self._tasks.state(),
            "groups": [
                {"task": [group.task.environment, group.task.index, group.task.number], "step": group.step}
                for group in groups
            ],
        }

    def announce_version(self, version: int, step: int) -> None:
        """This version, after `step` batches, is about to be pushed: rollouts with it may arrive before the push ends."""
        self._batches_of_version[version] = step

    def record_version(self, version: int, step: int) -> None:
        """The services serve this version."""
        self._batches_of_version[version] = self._step = step
        self._joining = False
        while self._retries:
            group = self._retries.popleft()
            group.running -= 1  # was counted for the next attempt
            self._request_another(group)
        self._admit()
        self._served.set()

    def record_waiting_replica(self) -> None:
        """A replica waits for the weights."""
        self._joining = True
        self._changed.set()

    async def take(self) -> StepRollouts | None:
        """The groups of the next batch; None if a service serves other weights, which must be pushed again first, or
        waits for them.

        Raises:
            UsageError, ServiceGone, DiskFull, WriteFailed: the collection cannot continue.
        """
        while not (self._retries or self._joining):
            self._files.check()
            for judging in self._judging:
                if judging.done():
                    judging.result()
            options, waiting = self._options, self._groups.values()
            if chosen := next_batch(waiting, options.tasks_per_step, self._step, options.max_lag):
                return self._hand_over(chosen)
            await self._next_outcome()
            if self._collecting.done():
                self._collecting.result()
        return None

    async def _next_outcome(self) -> None:
        """Wait until a rollout or the collection has ended, or a replica waits. Says that none has ended for a long time."""
        self._changed.clear()
        change, began, patience_s = asyncio.create_task(self._changed.wait()), time.monotonic(), SILENCE_S
        waiting = [change, self._collecting]
        try:
            while not (await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                running = sorted({group.task.environment for group in self._groups.values() if group.running})
                self._say(
                    f"no rollout has ended for {time.monotonic() - began:.0f} s; {self._run.in_flight:,} are in flight "
                    f"({', '.join(running)}), each for at most {self._options.timeout_s:.0f} s (rollouts.timeout_s)"
                )
                patience_s *= 2
        finally:
            change.cancel()

    async def close(self) -> None:
        """Cancel what is in flight; returns when everything that was collected is on the disk."""
        self._collecting.cancel()
        with suppress(asyncio.CancelledError, Exception):  # `take` has raised it
            await self._collecting
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)
        await self._files.close()

    def _admit(self) -> None:
        options = self._options
        horizon = min(options.max_lag + self._step + 1, self._steps)
        count = horizon * options.tasks_per_step + self._excluded - self._admitted
        self._admitted += max(0, count)
        for task in self._tasks.take(max(0, count)):
            self._files.record(task)
            self._begin(Group(task, self._step))

    def _begin(self, group: Group) -> None:
        """Request the group's attempts, except those collected before a resumption."""
        self._groups[group.task.number] = group
        size = self._options.group_size
        rows = list(self._files.rows(group.task.number, group.task.key))
        indices = {row["_ng_rollout_index"] for row in rows}
        group.rows = [row for row in rows if self._lag(row) <= self._options.max_lag][:size]
        group.requested = max([size, *(index + 1 for index in indices)])
        for index in [index for index in range(size) if index not in indices][: size - len(group.rows)]:
            self._request(group, index)
        while len(group.rows) + group.running < size:
            self._request_another(group)
        if group.complete:
            self._finish(group)

    def _request_another(self, group: Group) -> None:
        self._request(group, group.requested)
        group.requested += 1

    def _request(self, group: Group, index: int) -> None:
        group.running += 1
        for plan in plan_rollouts([group.task.row], CollectionPlan(params={"temperature": self._temperature})):
            key, row = plan.key._replace(rollout_index=index), {**plan.row, "_ng_rollout_index": index}
            rollout = PlannedRollout(key, plan.agent, row)  # _judge compares the group once it is complete
            if self._options.seeded:  # with the same seed, the same weights give the same rollout
                rollout = rollout.with_seed(sampling_seed(self._seed, group.task.number, index))
            self._planned.put_nowait(rollout)

    async def _collect(self) -> None:
        async with aclosing(self._run.outcomes(self._plan())) as outcomes:
            async for outcome in outcomes:
                if not isinstance(outcome, FailedAttempt) or outcome.final:
                    self._add_outcome(outcome)

    async def _plan(self) -> AsyncIterator[PlannedRollout]:
        await self._served.wait()
        while True:
            yield await self._planned.get()

    async def _store(self, outcome: Outcome) -> None:
        group = self._groups[outcome.key.task_index]
        versions = outcome.row["ng"].get("policy_version") or [NEVER_PUSHED]
        oldest = (
            self._step
            if is_failed_attempt(outcome.row) or sampled_nothing(outcome.row)
            else min(self._batches_of_version.get(version, NEVER_PUSHED) for version in versions)
        )
        outcome.row[TRAINER_FIELD] = {"task": group.task.key, "oldest": oldest}
        for name in self._tasks.fields:  # an agent need not return the fields of its task
            outcome.row.setdefault(name, group.task.row[name])
        if is_pending(outcome.row):
            return  # _judge stores it with its reward; after a crash before that, the group is collected again
        if not isinstance(outcome, FailedAttempt) or outcome.final:
            self._files.keep(outcome.row)

    def _add_outcome(self, outcome: Outcome) -> None:
        group = self._groups[outcome.key.task_index]
        group.running -= 1
        if self._lag(outcome.row) > self._options.max_lag:
            self._note_stale(group, outcome.row)
            self._retries.append(group)
            group.running += 1  # for the next attempt
        else:
            group.rows.append(outcome.row)
            if group.complete and any(map(is_pending, group.rows)):
                group.running += 1
                judging = asyncio.create_task(self._judge(group), name="judge a group")
                self._judging.add(judging)
                judging.add_done_callback(self._on_judged)
            elif group.complete:
                self._finish(group)
        self._changed.set()

    async def _judge(self, group: Group) -> None:
        """Give rewards to rows that are compared within their group; without a judge they stay unscored."""
        pending = sorted(filter(is_pending, group.rows), key=lambda row: row["_ng_rollout_index"])
        scored_rows = await self._run.verify_group(pending[0]["agent_ref"]["name"], pending)
        for row in scored_rows:
            self._files.keep(row)
        group.rows = [row for row in group.rows if not is_pending(row)] + scored_rows
        group.running -= 1
        self._finish(group)

    def _on_judged(self, judging: asyncio.Task[None]) -> None:
        if judging.cancelled() or judging.exception() is None:
            self._judging.discard(judging)  # a failed one stays, for `take`
        self._changed.set()

    def _note_stale(self, group: Group, row: Json) -> None:
        self._stale += 1
        group.stale += 1
        if group.stale > MAX_STALE * self._options.group_size:
            raise UsageError(
                f"{group.task.environment}: its rollouts say that policy versions {row['ng'].get('policy_version')} sampled "
                f"them, again and again, but {max(self._batches_of_version)} was pushed: does the agent keep the "
                "token data of the model that is trained, and does that model stay up?"
            )

    def _finish(self, group: Group) -> None:
        """Finish a group with all attempts. With dynamic sampling, one without a learning signal is replaced."""
        room = (self._options.dynamic_sampling - 1) * self._options.tasks_per_step
        if self._equal < room and not self._has_learning_signal(group):
            self._tasks.learn(group.task.key, group.rewards)
            del self._groups[group.task.number]
            self._equal += 1
            self._excluded += 1
            self._admit()
        self._changed.set()

    def _hand_over(self, chosen: Sequence[Group]) -> StepRollouts:
        rows: list[Json] = []
        rewards: dict[str, list[float]] = {}
        for group in sorted(chosen, key=lambda group: group.task.number):
            del self._groups[group.task.number]
            self._tasks.learn(group.task.key, group.rewards)
            rewards.setdefault(group.task.environment, []).extend(group.rewards)
            rows += sorted(group.rows, key=lambda row: row["_ng_rollout_index"])
        metrics = self._tasks.metrics()
        if self._tasks.is_several:
            metrics |= {f"reward/{name}/mean": fmean(values) for name, values in rewards.items() if values}
        result = StepRollouts(rows, [self._lag(row) for row in rows], self._stale, self._equal, metrics)
        self._stale = self._equal = 0
        return result

    def _lag(self, row: Json) -> int:
        """The lag of a row; 0 if it was collected before a resumption with weights that are newer than the current
        ones.
        """
        oldest: int = row[TRAINER_FIELD]["oldest"]
        return max(0, self._step - oldest)
