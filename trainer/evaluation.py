"""How good is the policy on tasks that it does not train on? Through the same services, several attempts and a greedy one.

    eval/{environment}/avg@k    the mean reward of k sampled attempts at each task
    eval/{environment}/pass@j   the chance that one of j attempts gets the whole reward, 1; j = 1, 2, 4 ... k (unbiased)
    eval/{environment}/greedy   the mean reward without sampling
    val/accuracy                the mean of avg@k over the environments

Each with /low and /high, the 95 % interval with the tasks as its independent units, and /count, /failed and /unscored:
attempts with a reward, and those without one. They count in no mean: "could not be scored" is not a 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ngym.collect import FailedAttempt, Limits, Outcome, collect
from ngym.metrics import Interval, Rewards
from ngym.schema import Json

from .rl import EvaluationOptions, HeldOutOptions, RolloutOptions
from .services import Services
from .taskfile import TaskFile, for_agent, task_problem

SOLVED = 1.0  # the whole reward


@dataclass
class Tally:
    """The attempts at the tasks of one environment, made in one way. attempts: at each task."""

    environment: str
    greedy: bool
    attempts: int
    rewards: Rewards = field(default_factory=Rewards)
    solved: Rewards = field(default_factory=Rewards)
    failed: int = 0
    unscored: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a rollout, or one that was given up."""
        if isinstance(outcome, FailedAttempt):
            self.failed += 1
        elif outcome.row["reward"] is None:
            self.unscored += 1
        else:
            task, reward = outcome.key.task_index, outcome.row["reward"]
            self.rewards.add(task, reward)
            self.solved.add(task, float(reward >= SOLVED))

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
            parts = [f"{self.name} {self.rewards.mean:.3f}{_shown(self.rewards.interval)}"]
        best = values.get(f"eval/{self.environment}/pass@{self.attempts}")
        if best is not None and self.attempts > 1:
            parts.append(f"pass@{self.attempts} {best:.3f}")
        parts += [f"{count} {what}" for count, what in ((self.failed, "failed"), (self.unscored, "unscored")) if count]
        return ", ".join(parts)


class HeldOut(NamedTuple):
    """A held-out file. params: of every attempt."""

    options: HeldOutOptions
    tasks: TaskFile
    params: dict[str, Any]


class Evaluation:
    """Of a live run, on the rank that has the services.

    Args:
        temperature: of the sampled attempts.
        note: told the step, the metrics, and a line for the screen.

    Raises:
        UsageError: held-out rows that are no tasks of their agent.
    """

    def __init__(
        self,
        options: EvaluationOptions,
        rollouts: RolloutOptions,
        temperature: float,
        services: Services,
        note: Callable[[int, dict[str, float], str], None],
    ) -> None:
        self._options = options
        self._temperature = temperature
        self._services = services
        self._note = note
        self._limits = Limits(concurrency=rollouts.concurrency, timeout_s=rollouts.timeout_s)
        self._held_out = read_held_out(options, rollouts)

    def after(self, step: int, last: bool) -> None:
        """Evaluate, if it is time after this many steps."""
        if step % self._options.every and not last:
            return
        began = time.monotonic()
        tallies = self._services.call(self._attempted())
        values: dict[str, float] = {"time/eval": time.monotonic() - began}
        for tally in tallies:
            values |= tally.metrics()
        means = [tally.rewards.mean for tally in tallies if not tally.greedy]
        known = [mean for mean in means if mean is not None]
        if known:
            values["val/accuracy"] = fmean(known)
        lines = [
            f"held-out after {step} steps: {held_out.options.key} "
            + "; ".join(str(tally) for tally in tallies if tally.environment == held_out.options.key)
            + f" ({len(held_out.tasks):,} tasks)"
            for held_out in self._held_out
        ]
        self._note(step, values, "\n".join(lines))

    async def _attempted(self) -> list[Tally]:
        """All attempts, of all environments and in all ways at once: what is slow keeps nothing else waiting."""
        tallies: list[Tally] = []
        owners: list[Tally] = []  # of each number that a task goes by here
        rows = self._rows(tallies, owners)
        async with aclosing(collect(rows, peers=self._services.reached.peers, limits=self._limits)) as outcomes:
            async for outcome in outcomes:
                if not isinstance(outcome, FailedAttempt) or outcome.final:
                    owners[outcome.key.task_index].add(outcome)
        return tallies

    def _rows(self, tallies: list[Tally], owners: list[Tally]) -> Iterator[Json]:
        ways = [(False, self._options.attempts, self._temperature), (True, 1, 0.0)]
        for options, tasks, params in self._held_out:
            for greedy, attempts, temperature in ways[: 1 + self._options.greedy]:
                tally = Tally(options.key, greedy, attempts)
                tallies.append(tally)
                for row in tasks.rows(range(len(tasks))):
                    number = {"_ng_task_index": len(owners)}
                    owners.append(tally)
                    asked = for_agent(row, options.agent, {**params, "temperature": temperature})
                    yield from repeat({**asked, **number}, attempts)


def read_held_out(options: EvaluationOptions, rollouts: RolloutOptions) -> list[HeldOut]:
    """
    Raises:
        UsageError: rows that are no tasks of their agent.
    """
    return [_read(each, rollouts, options.limit) for each in options.held_out(rollouts)]


def _read(options: HeldOutOptions, rollouts: RolloutOptions, limit: int | None) -> HeldOut:
    longest = options.max_output_tokens or rollouts.max_output_tokens
    params = {} if longest is None else {"max_output_tokens": longest}
    return HeldOut(options, TaskFile(Path(options.tasks), partial(task_problem, agent=options.agent), limit), params)


def _with_interval(key: str, mean: float, interval: Interval | None) -> dict[str, float]:
    bounds = {} if interval is None else {f"{key}/low": interval.low, f"{key}/high": interval.high}
    return {key: mean, **bounds}


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
