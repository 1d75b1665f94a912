"""Which tasks does a step train on? Those of each environment in its share; in memory are only their places in the files.

    environments --weights--> whose turn --an epoch's order, or the curriculum--> which task --> its row, ready to collect

What comes next depends on the seed, the state and the rewards that are learned. Which rewards are known at a draw may depend
on the clock; what was drawn is therefore recorded (rollout_spool.py), and a resumed run takes the recorded tasks (`repeat`).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

from ngym.errors import UsageError
from ngym.schema import Json

from ..data.rollout_samples import bent_sampling
from ..recipe.rl import EnvironmentOptions, RolloutOptions
from .curriculum import Curriculum
from .environment_mix import Turns
from .task_file import TaskFile, for_agent, task_problem


@dataclass(frozen=True, slots=True)
class Task:
    """One turn of one task.

    index: its place among the tasks of its environment. number: how many were taken before it in this run; the row's
    `_ng_task_index`. row: names its agent and has its environment's parameters.
    """

    environment: str
    index: int
    number: int
    row: Json

    @property
    def key(self) -> str:
        """The same at each of its turns."""
        return f"{self.environment}/{self.index}"


class Drawn(NamedTuple):
    """Which task a number is."""

    environment: str
    index: int  # type: ignore[assignment]  # a tuple has a method of this name


class TaskSource:
    """The tasks of all environments of a run.

    Raises:
        UsageError: rows that are no tasks, name another agent, or set what training rollouts must not.
    """

    def __init__(self, options: RolloutOptions, seed: int) -> None:
        self._seed = seed
        self._taken = 0
        self._drawn: Mapping[int, Drawn] = {}
        self._environments = {each.key: _Environment(each, options, seed) for each in options.sources}
        self._turns = Turns([each.weight for each in options.sources])

    def take(self, count: int) -> list[Task]:
        """The next tasks: first those that an earlier life of the run drew, then newly drawn ones."""
        numbers = range(self._taken, self._taken + count)
        again = [self._drawn_again(number) for number in takewhile(self._drawn.__contains__, numbers)]
        self._taken += count
        return again + self._draw(numbers[len(again) :])

    def repeat(self, drawn: Mapping[int, Drawn]) -> None:
        """Give these numbers to these tasks, whatever was learned meanwhile: an earlier life of the run drew them."""
        self._drawn = drawn

    def _drawn_again(self, number: int) -> Task:
        name, index = self._drawn[number]
        if name not in self._environments:
            raise UsageError(
                f"task {number} was drawn from {name!r} before, and there is no such environment now; set "
                "rollouts.environments back, or begin a new run"
            )
        self._turns.taken[list(self._environments).index(name)] += 1
        self._environments[name].draw_again(index)
        return self.again(name, index, number)

    def _draw(self, numbers: Sequence[int]) -> list[Task]:
        names = list(self._environments)
        turns = [names[self._turns.next()] for _ in numbers]
        drawn = {name: iter(self._environments[name].draw(turns.count(name))) for name in names}
        tasks = []
        for number, name in zip(numbers, turns, strict=True):
            index, row = next(drawn[name])
            tasks.append(_task(name, index, number, row))
        return tasks

    def again(self, environment: str, index: int, number: int) -> Task:
        """A task that was taken before, as it was then."""
        return _task(environment, index, number, self._environments[environment].row(index))

    def learned(self, key: str, rewards: Sequence[float]) -> None:
        """A group of attempts at this task got these rewards; those of null are left out."""
        if rewards:
            name, index = key.rsplit("/", 1)
            self._environments[name].learn(int(index), fmean(rewards))

    def metrics(self) -> dict[str, float]:
        """How far each environment is; of several, the mean reward of the groups that were learned since the last call."""
        values: dict[str, float] = {}
        for name, environment in self._environments.items():
            values |= {f"tasks/{name}/{metric}": value for metric, value in environment.metrics().items()}
            rewards = environment.told()
            if rewards and len(self._environments) > 1:
                values[f"reward/{name}/mean"] = fmean(rewards)
        return values

    def state(self) -> Json:
        """What `restore` needs to go on from here, as JSON."""
        turns = self._turns.taken
        return {
            "seed": self._seed,
            "taken": self._taken,
            "environments": {
                name: {**environment.state(), "turns": turns[place]}
                for place, (name, environment) in enumerate(self._environments.items())
            },
        }

    def restore(self, state: Json) -> None:
        """Go on where `state` was.

        Raises:
            UsageError: it was of other tasks, or of another order of them; nothing was changed.
        """
        if state["seed"] != self._seed:
            raise UsageError(f"seed: {state['seed']} when the tasks were drawn before, {self._seed} now; set it back")
        theirs = state["environments"]
        if set(theirs) != set(self._environments):
            raise UsageError(
                f"rollouts.environments: {', '.join(theirs)} when the tasks were drawn before, "
                f"{', '.join(self._environments)} now; set them back, or begin a new run"
            )
        for name, environment in self._environments.items():
            environment.expect(theirs[name])
        for name, environment in self._environments.items():
            environment.restore(theirs[name])
        self._taken = state["taken"]
        if all(theirs[name]["weight"] == each.weight for name, each in self._environments.items()):
            self._turns.taken = [theirs[name]["turns"] for name in self._environments]


def _task(environment: str, index: int, number: int, row: Json) -> Task:
    return Task(environment, index, number, {**row, "_ng_task_index": number})


class _Environment:
    """The tasks of one file for one agent."""

    def __init__(self, options: EnvironmentOptions, rollouts: RolloutOptions, seed: int) -> None:
        self.weight = options.weight
        self._options = options
        self._file = TaskFile(Path(options.tasks), self._problem)
        self._digest = self._file.digest()
        longest = options.max_output_tokens or rollouts.max_output_tokens
        self._params = {} if longest is None else {"max_output_tokens": longest}
        self._told: list[float] = []
        own, count = f"{seed} {options.key}", len(self._file)
        self._sampler: Sampler = Epochs(own, count)
        if rollouts.curriculum is not None:
            self._sampler = Curriculum(rollouts.curriculum, own, count)

    def draw(self, count: int) -> list[tuple[int, Json]]:
        """Tasks with their index, ready to collect."""
        indices = self._sampler.draw(count)
        return list(zip(indices, self._rows(indices), strict=True))

    def draw_again(self, index: int) -> None:
        """Count a draw of an earlier life of the run.

        Raises:
            UsageError: there is no such task in the file.
        """
        if index >= len(self._file):
            raise UsageError(
                f"{self._options.tasks}: task {index} was drawn before, and there are {len(self._file):,} tasks in it; "
                "restore the file, or begin a new run"
            )
        self._sampler.draw_again(index)

    def row(self, index: int) -> Json:
        return next(self._rows([index]))

    def _rows(self, indices: Sequence[int]) -> Iterator[Json]:
        return (for_agent(row, self._options.agent, self._params) for row in self._file.rows(indices))

    def learn(self, index: int, mean_reward: float) -> None:
        self._told.append(mean_reward)
        self._sampler.learn(index, mean_reward)

    def told(self) -> list[float]:
        """What was learned since the last call."""
        told, self._told = self._told, []
        return told

    def metrics(self) -> dict[str, float]:
        return self._sampler.metrics()

    def state(self) -> Json:
        kind, tasks = self._sampler.kind, len(self._file)
        return {
            "kind": kind,
            "tasks": tasks,
            "digest": self._digest,
            "weight": self.weight,
            "drawn": self._sampler.state(),
        }

    def expect(self, state: Json) -> None:
        """UsageError if that is the state of another file, or of another way to draw."""
        path = self._options.tasks
        if (state["tasks"], state["digest"]) != (len(self._file), self._digest):
            raise UsageError(
                f"{path}: changed since its tasks were drawn before: {state['tasks']:,} tasks, sha256 {state['digest'][:12]} "
                f"then, {len(self._file):,}, {self._digest[:12]} now; restore the file, or begin a new run"
            )
        if state["kind"] != self._sampler.kind:
            raise UsageError(
                f"rollouts.curriculum: tasks were drawn by {state['kind']} before, by {self._sampler.kind} now; set it back, "
                "or begin a new run"
            )

    def restore(self, state: Json) -> None:
        self._sampler.restore(state["drawn"])

    def _problem(self, row: Json) -> str | None:
        if wrong := task_problem(row, self._options.agent):
            return wrong
        # the recipe's temperature overrides the row's
        return bent_sampling({**row["responses_create_params"], "temperature": 1.0}, 1.0)


class Sampler(Protocol):
    """Indices of tasks, in an order that the seed, and what it was told, decide."""

    kind: str

    def draw(self, count: int) -> list[int]: ...

    def draw_again(self, index: int) -> None:
        """Count a draw that gave this index in an earlier life of the run."""

    def learn(self, index: int, mean_reward: float) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def state(self) -> Json: ...

    def restore(self, state: Json) -> None: ...


class Epochs:
    """Each task once, then each again in a new order; a Sampler."""

    kind = "epochs"

    def __init__(self, seed: str, count: int) -> None:
        self._seed = seed
        self._count = count
        self._begin(0)

    def _begin(self, epoch: int, position: int = 0) -> None:
        self._epoch, self._position = epoch, position
        draw = random.Random(f"{self._seed} epoch {epoch}")
        self._order = array("L", draw.sample(range(self._count), self._count))

    def draw(self, count: int) -> list[int]:
        drawn = []
        for _ in range(count):
            if self._position == self._count:
                self._begin(self._epoch + 1)
            drawn.append(self._order[self._position])
            self._position += 1
        return drawn

    def draw_again(self, index: int) -> None:
        """The order of an epoch depends on nothing else: it is the next one."""
        self.draw(1)

    def learn(self, index: int, mean_reward: float) -> None:
        """Changes nothing: each has its turn."""

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._epoch + self._position / self._count}

    def state(self) -> Json:
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: Json) -> None:
        self._begin(state["epoch"], state["position"])
