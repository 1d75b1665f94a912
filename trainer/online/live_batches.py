"""Live rollouts as batches: push the new weights, evaluate if due, take groups of rollouts from the stream, train.

    push -> stream -> prepare -> updates (the loop trains them) -> push -> ...

Every rank iterates; rank 0 has the services and the stream, and shares their results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import orjson

from ngym.errors import UsageError
from ngym.files.row_log import LossyRowLog
from ngym.runtime.event_loop import run_endlessly
from ngym.schema import Json

from ..algorithms import Algorithm
from ..data.file_batches import TOO_LONG
from ..data.samples import (
    Batch,
    ReadRollouts,
    RolloutSample,
    Sample,
    add_row,
    check_model_calls,
    problem,
    rollout_metrics,
)
from ..engine.engine import Engine
from ..losses.advantages import informative, informative_components
from ..recipe.algorithms import PolicyGradientOptions
from ..recipe.recipe import Recipe
from ..recipe.rollout_options import ADVANTAGES, SPOOL, SPOOL_FAILURES
from ..seeds import seeded_random
from ..weights.weight_sync import WeightSync
from .rollout_stream import RolloutStream, StepRollouts
from .services import Services
from .task_sampler import TaskSource

if TYPE_CHECKING:
    from ..evaluation.live_eval import Evaluation

Result = TypeVar("Result")


class AdvantageLog:
    """The mean advantage of each trained rollout, for the viewer: a line for each step. An algorithm of the user's may
    compute none. A resumed run repeats steps, and the last line of a step counts.
    """

    def __init__(self, file: Path) -> None:
        self._exit = ExitStack()
        self._rows = self._exit.enter_context(LossyRowLog(file))

    def append(self, step: int, samples: Sequence[Sample]) -> str | None:
        """Append a step; returns a message when lines are lost, once."""
        rollouts = [rollout for rollout in samples if isinstance(rollout, RolloutSample)]
        advantages = {
            rollout.id: list(chain.from_iterable(segment.advantages or () for segment in rollout.segments))
            for rollout in rollouts
        }
        means = {name: round(fmean(values), 6) for name, values in advantages.items() if values}
        return self._rows.append(orjson.dumps({"step": step, "advantages": means}) + b"\n")

    def close(self) -> None:
        self._exit.close()


class LiveBatches:
    """The batches of a live run.

    Args:
        recipe: with live rollouts.
        services: on rank 0; None elsewhere.
        say: called with what the collection waits for.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        engine: Engine,
        weight_sync: WeightSync,
        services: Services | None,
        say: Callable[[str], None],
    ) -> None:
        assert recipe.live is not None and recipe.max_steps is not None
        assert isinstance(recipe.algorithm, PolicyGradientOptions)
        self._recipe = recipe
        self._options = recipe.live
        self._steps = recipe.max_steps
        self._temperature = recipe.algorithm.temperature
        self._fields = recipe.algorithm.task_fields
        self._by_component = recipe.algorithm.advantage.components != "sum"
        self._algorithm = algorithm
        self._engine = engine
        self._weight_sync = weight_sync
        self._services = services
        self._say = say
        self._evaluation: Evaluation | None = None
        self._tasks = TaskSource(recipe.live, recipe.seed, self._fields, engine.policy.images) if services else None
        self._stream: RolloutStream | None = None
        self._membership_watch: asyncio.Task[None] | None = None
        self._advantages: AdvantageLog | None = None
        self._recorded_count = 0

    def check(self, state: Json | None) -> None:
        """Raise UsageError if a `state()` belongs to tasks that have changed since."""
        if self._tasks is not None and state is not None and state["stream"] is not None:
            self._tasks.check(state["stream"]["tasks"])

    def open(self, state: Json | None) -> int:
        """Begin, or continue from a `state()`; returns how many earlier rollouts need not be collected again."""
        if self._services is not None:
            self._advantages = AdvantageLog(self._recipe.output / ADVANTAGES)
            self._recorded_count = self._services.call(self._open(self._services, state))
        if state is not None:
            self._weight_sync.version = state["version"]
        return self._recorded_count

    def state(self) -> Json:
        """The state from which `open` continues after the last trained batch; less on ranks without services."""
        stream = self._services.call(_run_on_loop(self._stream.state)) if self._services and self._stream else None
        return {"version": self._weight_sync.version, "stream": stream}

    def close(self) -> None:
        """Close the stream; everything it collected is then on the disk."""
        if self._advantages is not None:
            self._advantages.close()
        if self._services is not None and self._stream is not None:
            self._services.call(self._close_stream(self._stream))

    def batches(self, done: int, evaluation: Evaluation | None, say: Callable[[str], None]) -> Iterator[Batch]:
        """One batch for each step after the first `done`; the weights after the last one are pushed too.

        say: receives the first failure of a rollout.
        """
        self._evaluation = evaluation
        failed = too_long = False
        for step in range(done, self._steps):
            sync_s = self._publish(step)
            began = time.monotonic()
            result, values = self._collect(step)
            collected_at = time.monotonic()
            if result.failed and not failed:
                failed = True
                total = len(result.rollouts) + result.unscored + result.failed
                say(
                    f"step {step + 1}: {result.failed:,} of {total:,} rollouts failed, the first: "
                    f"{result.first_failure}; all failures of the run are in {self._recipe.output / SPOOL_FAILURES}"
                )
            if step == done:
                check_model_calls(result.rollouts)
            self._weight_sync.train()
            samples = self._algorithm.prepare(result.rollouts, self._engine, self._recipe.micro_batch_tokens)
            if (unfit := self._count_too_long(result, samples)) and not too_long:
                too_long = True
                say(
                    f"step {step + 1}: {unfit:,} rollouts {TOO_LONG}: they train nothing (teacher_too_long in the metrics)"
                )
            if self._advantages is not None and (lost := self._advantages.append(step + 1, samples)):
                say(lost)
            times = {
                "time/weight_sync": sync_s,
                "time/generation": collected_at - began,
                "time/logprob": time.monotonic() - collected_at,
            }
            values |= {} if unfit is None else {"teacher_too_long": unfit}
            push = {"policy_version": self._weight_sync.version, "weight_sync/bytes": self._weight_sync.pushed_bytes}
            values = {**rollout_metrics(result), **values, **times, **push}
            yield Batch(self._split_rollouts(samples, step), values)
        self._publish(self._steps, last=True)
        self._weight_sync.train()

    def _count_too_long(self, result: ReadRollouts, samples: Sequence[Sample]) -> int | None:
        """The number of rollouts that a teacher left out; None without a teacher."""
        options = self._recipe.algorithm
        assert isinstance(options, PolicyGradientOptions)
        if options.teacher is None:  # with one, no rollout is left out for its reward
            return None
        drops = options.shaping.drop_truncated
        trainable = sum(rollout.trained > 0 and not (drops and rollout.truncated) for rollout in result.rollouts)
        return trainable - len(samples)

    async def _open(self, services: Services, state: Json | None) -> int:
        assert self._tasks is not None
        stream = RolloutStream(
            services.ready.peers,
            self._tasks,
            self._options,
            self._temperature,
            self._recipe.seed,
            self._steps,
            self._recipe.output / SPOOL,
            lambda group: (
                informative_components(group.components) if self._by_component else informative(group.rewards)
            ),
            self._say,
        )
        at_hand = await stream.open(state["stream"] if state else None)
        self._stream = stream
        if (membership := self._weight_sync.membership) is not None:
            what = "replicas that join"
            watching = run_endlessly(partial(membership.watch, stream.record_waiting_replica), what)
            self._membership_watch = asyncio.create_task(watching, name=what)
        return at_hand

    async def _close_stream(self, stream: RolloutStream) -> None:
        if self._membership_watch is not None:
            self._membership_watch.cancel()
        await stream.close()

    def _publish(self, step: int, last: bool = False) -> float:
        """Push the current weights and evaluate if due; returns the seconds of the push."""
        began = time.monotonic()
        self._push(step)
        seconds = time.monotonic() - began
        if not last:
            self._call_stream(RolloutStream.record_version, step)
        if self._evaluation is not None:
            self._evaluation.after(step, last)
        return seconds

    def _push(self, step: int) -> None:
        self._weight_sync.publish(lambda version: self._call_stream(RolloutStream.announce_version, step))

    def _call_stream(self, tell: Callable[[RolloutStream, int, int], None], step: int) -> None:
        """Call the stream, on its event loop, with the current version."""
        if self._services is not None and self._stream is not None:
            self._services.call(_run_on_loop(partial(tell, self._stream, self._weight_sync.version, step)))

    def _collect(self, step: int) -> tuple[ReadRollouts, dict[str, float]]:
        """The rollouts of this step, on every rank."""
        while True:
            step_rollouts = self._services.call(self._stream.take()) if self._services and self._stream else None
            result = self._engine.broadcast(self._parse_step(step_rollouts) if step_rollouts else None)
            if result is not None:
                return result
            self._push(step)  # a server restarted with other weights, or joins
            self._call_stream(RolloutStream.record_version, step)

    def _parse_step(self, step_rollouts: StepRollouts) -> tuple[ReadRollouts, dict[str, float]]:
        """The rollouts, and metrics that only the rows contain. Raises UsageError: a row cannot be trained."""
        images, routers = self._engine.policy.images, self._engine.policy.routers
        result = ReadRollouts(fields=self._fields)
        for row in step_rollouts.rows:
            if wrong := problem(row, self._temperature, self._fields, images, routers):
                raise UsageError(f"{row['agent_ref']['name']} returned a rollout that cannot be trained: {wrong}")
            add_row(row, result, images, routers)
        values: dict[str, float] = {
            "stale_dropped": step_rollouts.stale,
            "num_equal_groups": step_rollouts.equal,
            **step_rollouts.metrics,
        }
        if step_rollouts.lags:
            values |= {"lag": max(step_rollouts.lags), "lag/mean": fmean(step_rollouts.lags)}
        return result, values

    def _split_rollouts(self, samples: Sequence[Sample], step: int) -> list[list[Sample]]:
        """The samples in random order, in one part per update, of about equal size."""
        order = seeded_random(self._recipe.seed, "step", step).sample(samples, len(samples))
        count = min(self._options.updates_per_step, len(order))
        return [order[part::count] for part in range(count)]


async def _run_on_loop(call: Callable[[], Result]) -> Result:
    return call()
