"""Live rollouts as batches: push what was learned, evaluate now and then, collect tasks x group, train, again.

    push -> collect -> prepare -> updates (the loop trains them) -> push -> ...

Synchronous: what a step trains was sampled by the weights that it starts from (lag 0). A rollout that an older version had
a part in, because a server died and came back with its first weights, is left out and counted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ngym import jsonl
from ngym.collect import FailedAttempt, Limits, Recipe, collect
from ngym.errors import UsageError
from ngym.schema import Json

from .algorithms import Algorithm
from .engine import Engine
from .publish import Publisher
from .rl import RolloutOptions
from .rollouts import Read, bent_sampling, described, problem, take, within
from .samples import Batch, Sample
from .services import Services

if TYPE_CHECKING:
    from .evaluation import Evaluation


class Tasks:
    """The tasks of a file in a new order each epoch; only their places in the file are kept in memory.

    Raises:
        UsageError: rows that are no tasks, or set what training rollouts must not.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._seed = seed
        self._places = [(line.start, line.end) for line in jsonl.checked(path, _task_problem)]
        if not self._places:
            raise UsageError(f"{path}: no tasks in it; each line is one")

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Json]:
        """Without end."""
        epoch = 0
        while True:
            order = random.Random(f"{self._seed} tasks {epoch}").sample(self._places, len(self._places))
            with self._path.open("rb") as file:
                for start, end in order:
                    file.seek(start)
                    yield orjson.loads(file.read(end - start))
            epoch += 1


def _task_problem(row: Json) -> str | None:
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        return 'no task: it needs {"responses_create_params": {"input": ...}}'
    return bent_sampling({**params, "temperature": 1.0}, 1.0)  # the recipe's temperature overrides the row's


class Live:
    """Batches of live rollouts, without end where the loop does not stop. Every rank iterates; rank 0 collects.

    Args:
        services: on rank 0; None elsewhere.
    """

    def __init__(
        self,
        options: RolloutOptions,
        temperature: float,
        seed: int,
        budget: int,
        algorithm: Algorithm,
        engine: Engine,
        publisher: Publisher,
        services: Services | None,
        evaluation: Evaluation | None,
    ) -> None:
        self._options = options
        self._temperature = temperature
        self._seed = seed
        self._budget = budget
        self._algorithm = algorithm
        self._engine = engine
        self._publisher = publisher
        self._services = services
        self._evaluation = evaluation

    def batches(self, steps: int) -> Iterator[Batch]:
        """One for each step; what the last one taught is pushed, too."""
        tasks = iter(Tasks(Path(self._options.tasks), self._seed))
        for step in range(steps):
            sync_s = self._publish(step)
            began = time.monotonic()
            rows = list(islice(tasks, self._options.tasks_per_step)) if self._services else []
            read = self._engine.share(self._collected(step, rows) if self._services else Read())
            collected = time.monotonic()
            samples = self._algorithm.prepare(read.rollouts, self._engine, self._budget)
            times = {
                "time/weight_sync": sync_s,
                "time/generation": collected - began,
                "time/logprob": time.monotonic() - collected,
            }
            values = {**described(read, self._publisher.version), **times, "policy_version": self._publisher.version}
            yield Batch(self._split(samples, step), values)
        self._publish(steps, last=True)

    def _publish(self, step: int, last: bool = False) -> float:
        """Have the services serve what is trained, and evaluate it when it is time; the seconds that the push took."""
        began = time.monotonic()
        self._publisher.publish()
        seconds = time.monotonic() - began
        if self._evaluation is not None:
            self._evaluation.after(step, last)
        return seconds

    def _collected(self, step: int, rows: Sequence[Json]) -> Read:
        assert self._services is not None
        options, first = self._options, step * self._options.tasks_per_step
        numbered = [{**row, "_ng_task_index": first + place} for place, row in enumerate(rows)]
        params: dict[str, Any] = {"temperature": self._temperature}
        if options.max_output_tokens is not None:
            params["max_output_tokens"] = options.max_output_tokens
        recipe = Recipe(options.agent, options.group_size, params=params)
        found = self._services.call(rows_of(self._services, numbered, recipe, options))
        read = Read()
        # in the order of the tasks, not of their completion: the same rollouts are the same batch
        for row in sorted(found, key=lambda row: (row["_ng_task_index"], row["_ng_rollout_index"])):
            if wrong := problem(row, self._temperature):
                raise UsageError(f"{options.agent} returned a rollout that cannot be trained: {wrong}")
            take(row, read)
        current = within(read.rollouts, self._publisher.version)
        read.stale = len(read.rollouts) - len(current)
        read.rollouts = current
        return read

    def _split(self, samples: Sequence[Sample], step: int) -> list[list[Sample]]:
        """The samples in random order, in as many parts of about the same size as there are updates."""
        order = random.Random(f"{self._seed} step {step}").sample(samples, len(samples))
        count = min(self._options.updates_per_step, len(order))
        return [order[part::count] for part in range(count)]


async def rows_of(services: Services, tasks: Sequence[Json], recipe: Recipe, options: RolloutOptions) -> list[Json]:
    """The output rows of these rollouts, and the rows of those that were given up."""
    limits = Limits(concurrency=options.concurrency, timeout_s=options.timeout_s)
    outcomes = collect(tasks, peers=services.reached.peers, recipe=recipe, limits=limits)
    return [outcome.row async for outcome in outcomes if not isinstance(outcome, FailedAttempt) or outcome.final]
