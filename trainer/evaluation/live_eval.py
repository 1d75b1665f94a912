"""Evaluation on held-out tasks through the services: several sampled attempts and a greedy one per task.

    eval/{environment}/avg@k    the mean reward of k sampled attempts at each task
    eval/{environment}/pass@j   the unbiased estimate that one of j attempts gets the whole reward, 1; j = 1, 2, 4 ... k
    eval/{environment}/greedy   the mean reward without sampling
    val/accuracy                the mean of avg@k over the environments

Each has /low and /high, the 95 % interval with the tasks as its independent units, and /count, /failed and /unscored:
attempts with a reward, failed attempts, and attempts with a null reward. The last two count in no mean: "could not be
scored" is not a 0.

Each sampled attempt has a separate seed, derived from the run's seed, the step, the task and the attempt. Every rollout
is kept in the run's folder:

    eval_rollouts.jsonl             finished ones; `_ng_train.oldest` is the step, `evaluation` the way: `sums/avg@4`
    eval_rollouts_failures.jsonl    failed ones
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from ngym.collect import CollectionLimits, CollectionPlan, FailedAttempt, Outcome
from ngym.collect.plan import PlannedRollout, plan_rollouts, sampling_seed
from ngym.collect.rollout_scheduler import RolloutScheduler
from ngym.files.row_log import RowLog
from ngym.schema import Json, is_failed_attempt
from ngym.stats import Interval, Rewards, reaches

from ..online.rollout_stream import TRAINER_FIELD, reporting_gate
from ..online.services import Services
from ..online.task_sampler import TaskFile, for_agent, task_problem
from ..recipe.rollout_options import EvaluationOptions, HeldOutOptions, RolloutOptions

EVAL_ROLLOUTS = "eval_rollouts.jsonl"
SOLVED = 1.0  # the whole reward


@dataclass
class AttemptTally:
    """The attempts of one kind at the tasks of one environment. attempts: at each task."""

    environment: str
    greedy: bool
    attempts: int
    rewards: Rewards = field(default_factory=Rewards)
    solved: Rewards = field(default_factory=Rewards)
    failed: int = 0
    unscored: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a finished or failed rollout."""
        if isinstance(outcome, FailedAttempt):
            self.failed += 1
        elif outcome.row["reward"] is None:
            self.unscored += 1
        else:
            task, reward = outcome.key.task_index, outcome.row["reward"]
            self.rewards.add(task, reward)
            self.solved.add(task, float(reaches(reward, SOLVED)))

    @property
    def name(self) -> str:
        return "greedy" if self.greedy else f"avg@{self.attempts}"

    def metrics(self) -> dict[str, float]:
        prefix = f"eval/{self.environment}"
        key = f"{prefix}/{self.name}"
        counts = {"count": self.rewards.count, "failed": self.failed, "unscored": self.unscored}
        values: dict[str, float] = {f"{key}/{name}": count for name, count in counts.items()}
        if self.rewards.mean is not None:
            values |= _with_interval(key, self.rewards.mean, self.rewards.interval)
        if not self.greedy:
            for best in self.solved.best_of():
                values |= _with_interval(f"{prefix}/pass@{best.k}", best.mean, best.interval)
        return values

    def __str__(self) -> str:
        """`avg@4 0.531 [0.480, 0.582], pass@4 0.820, 2 failed`."""
        values = self.metrics()
        parts = [f"{self.name} has no reward"]
        if self.rewards.mean is not None:
            parts = [f"{self.name} {self.rewards.mean:.3f}{_interval_text(self.rewards.interval)}"]
        best = values.get(f"eval/{self.environment}/pass@{self.attempts}")
        if best is not None and self.attempts > 1:
            parts.append(f"pass@{self.attempts} {best:.3f}")
        parts += [f"{self.failed} failed"] if self.failed else []
        if self.unscored:
            share = self.unscored / (self.unscored + self.rewards.count)
            parts.append(f"{self.unscored} unscored ({share:.1%})")
        return ", ".join(parts)


class HeldOutFile(NamedTuple):
    """A held-out file. params: of every attempt."""

    options: HeldOutOptions
    tasks: TaskFile
    params: dict[str, Any]


class Evaluation:
    """The evaluation of a live run, on the rank that has the services.

    Args:
        temperature: for the sampled attempts.
        note: called with the step, the metrics, and a line for the screen.
        seed: of the run. file: where rollouts are kept. done: number of trained steps; stored rollouts of these weights
        and of later ones are dropped, because they are attempted again. say: called with what an evaluation waits for.

    Raises:
        UsageError: held-out rows that are not tasks of their agent; the file cannot be used. FileLocked: another run
            writes it.
    """

    def __init__(
        self,
        options: EvaluationOptions,
        rollouts: RolloutOptions,
        temperature: float,
        services: Services,
        note: Callable[[int, dict[str, float], str], None],
        seed: int,
        file: Path,
        done: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._options = options
        self._say = say
        self._seed = seed
        self._temperature = temperature
        self._services = services
        self._note = note
        self._limits = CollectionLimits(concurrency=rollouts.concurrency, timeout_s=rollouts.timeout_s)
        self._held_out = read_held_out(options, rollouts)
        self._rollouts = HeldOutRollouts(file, done)

    def close(self) -> None:
        """End evaluation; everything that was collected is then on the disk."""
        self._services.call(self._rollouts.close())

    def after(self, step: int, last: bool) -> None:
        """Evaluate, if an evaluation is due after this step."""
        if step % self._options.every and not last:
            return
        began = time.monotonic()
        tallies = self._services.call(self._run_attempts(step))
        values: dict[str, float] = {"time/eval": time.monotonic() - began}
        for tally in tallies:
            values |= tally.metrics()
        means = [tally.rewards.mean for tally in tallies if not tally.greedy]
        scores = [mean for mean in means if mean is not None]
        if scores:
            values["val/accuracy"] = fmean(scores)
        lines = [
            f"held-out after {step} steps: {held_out.options.key} "
            + "; ".join(str(tally) for tally in tallies if tally.environment == held_out.options.key)
            + f" ({len(held_out.tasks):,} tasks)"
            for held_out in self._held_out
        ]
        self._note(step, values, "\n".join(lines))

    async def _run_attempts(self, step: int) -> list[AttemptTally]:
        """All attempts, of all environments and kinds, concurrently: a slow one does not delay the others."""
        tallies: list[AttemptTally] = []
        owners: dict[int, AttemptTally] = {}  # by task number
        keys: dict[int, str] = {}

        async def keep(outcome: Outcome) -> None:
            if not isinstance(outcome, FailedAttempt) or outcome.final:
                number = outcome.key.task_index
                outcome.row["evaluation"] = f"{owners[number].environment}/{owners[number].name}"
                outcome.row[TRAINER_FIELD] = {"task": keys[number], "oldest": step}
                await self._rollouts.append(outcome.row)

        run = RolloutScheduler(
            self._services.ready.peers,
            self._limits,
            run_id=f"eval-{step}-{secrets.token_hex(4)}",
            keep=keep,
            gate=reporting_gate(self._limits, self._say),
        )
        async with aclosing(run.outcomes(self._plan(step, tallies, owners, keys))) as outcomes:
            async for outcome in outcomes:
                if not isinstance(outcome, FailedAttempt) or outcome.final:
                    owners[outcome.key.task_index].add(outcome)
        return tallies

    def _plan(
        self, step: int, tallies: list[AttemptTally], owners: dict[int, AttemptTally], keys: dict[int, str]
    ) -> Iterator[PlannedRollout]:
        """The tasks, with numbers that no other evaluation of the run uses, so that groups stay separate."""
        ways = [(False, self._options.attempts, self._temperature), (True, 1, 0.0)][: 1 + self._options.greedy]
        first = step * len(ways) * sum(len(held_out.tasks) for held_out in self._held_out)
        for options, tasks, params in self._held_out:
            for greedy, attempts, temperature in ways:
                tally = AttemptTally(options.key, greedy, attempts)
                tallies.append(tally)
                for index, row in enumerate(tasks.rows(range(len(tasks)))):
                    number = first + len(owners)
                    owners[number], keys[number] = tally, f"{options.key}/{index}"
                    seed = None if greedy else sampling_seed(self._seed, "evaluation", step, keys[number])
                    request = for_agent(row, options.agent, params)
                    recipe = CollectionPlan(repeats=attempts, params={"temperature": temperature})
                    for rollout in plan_rollouts([{**request, "_ng_task_index": number}], recipe):
                        yield rollout if seed is None else rollout.with_seed(seed + rollout.key.rollout_index)


class HeldOutRollouts:
    """The two files of held-out rollouts, in the order of their steps. Used on an event loop, except at the beginning.

    Args:
        done: rows of weights after this many batches or more are dropped.

    Raises:
        FileLocked: another trainer writes them. UsageError: a line is invalid.
    """

    def __init__(self, file: Path, done: int) -> None:
        self._finished = RowLog(file, _identity)
        self._failed = RowLog(file.with_name(f"{file.stem}_failures{file.suffix}"), _identity)
        for log in (self._finished, self._failed):
            starts = [log.start_of(line) for line in log.rows() if line.row[TRAINER_FIELD]["oldest"] >= done]
            if starts:
                log.cut(starts[0])

    async def append(self, row: Json) -> None:
        """Returns when the row is on the disk. Raises DiskFull, WriteFailed: it could not be written."""
        await (self._failed if is_failed_attempt(row) else self._finished).append(orjson.dumps(row))

    async def close(self) -> None:
        """
        Raises:
            DiskFull, WriteFailed: some rows could not be written.
        """
        try:
            await self._finished.flush()
            await self._failed.flush()
        finally:
            self._finished.close()
            self._failed.close()


def read_held_out(options: EvaluationOptions, rollouts: RolloutOptions) -> list[HeldOutFile]:
    """
    Raises:
        UsageError: rows that are not tasks of their agent.
    """
    files = []
    for options_of_file in options.held_out(rollouts):
        longest = options_of_file.max_output_tokens or rollouts.max_output_tokens
        params = {} if longest is None else {"max_output_tokens": longest}
        tasks = TaskFile(Path(options_of_file.tasks), partial(task_problem, agent=options_of_file.agent), options.limit)
        files.append(HeldOutFile(options_of_file, tasks, params))
    return files


def _with_interval(key: str, mean: float, interval: Interval | None) -> dict[str, float]:
    bounds = {} if interval is None else {f"{key}/low": interval.low, f"{key}/high": interval.high}
    return {key: mean, **bounds}


def _interval_text(interval: Interval | None) -> str:
    return "" if interval is None else f" [{interval.low:.3f}, {interval.high:.3f}]"


def _identity(row: Json) -> tuple[int, str]:
    return int(row[TRAINER_FIELD]["oldest"]), row["ng"]["rollout_id"]
