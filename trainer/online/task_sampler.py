"""Tasks of a live run: their files, the mix of environments, and the order of draws.

    environments --weights--> whose turn --an epoch's order, or the curriculum--> which task --> its row

The next draw depends on the seed, the state and the learned rewards. Which rewards are known at a draw depends on
timing, so draws are recorded (`RolloutFiles` in rollout_stream.py), and a resumed run repeats the recorded ones (`replay`).

A curriculum draws tasks that are always or never solved less often. For each task, m is the running mean of its groups' mean rewards x in [0, 1], and w its weight in the draw:

    m = 1/2 at first, then m <- decay m + (1 - decay) x
    w = floor + (1 - floor) 4 m (1 - m)

4 m (1 - m) is the variance of a 0/1 reward, and so the size of a group's advantages, relative to its maximum. An
unseen task has weight 1. A task that is always or never solved approaches `floor` and stays in the draw.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from ngym.collect.plan import AGENT_TYPE
from ngym.errors import UsageError
from ngym.files import jsonl
from ngym.files.atomic import file_digest
from ngym.schema import Json

from ..data.images import Images, task_media_problem
from ..data.samples import distorted_sampling, missing_field
from ..recipe.rollout_options import CurriculumOptions, EnvironmentOptions, RolloutOptions
from ..seeds import seeded_random

PRIOR = 0.5
WEIGHT_SCALE = 1 << 20  # weights are integers, so that their sum does not depend on the order of updates
ALWAYS_SOLVED = 0.95  # a running mean of at least this counts as "always"


class TaskDifficulty(Enum):
    UNSEEN = "unseen"
    UNSOLVED = "unsolved"
    MIXED = "mixed"
    SOLVED = "solved"


class Curriculum:
    """Draws tasks by weight, each at most once per draw as long as others are left.

    Args:
        seed: the same seed, rewards and draw sizes give the same draws.
        count: how many tasks there are.
    """

    kind = "curriculum"

    def __init__(self, options: CurriculumOptions, seed: str, count: int) -> None:
        self._options = options
        self._seed = seed
        self._draws = 0
        self._means = array("d", [PRIOR]) * count
        self._visits = array("L", [0]) * count
        self._weigh_all()

    def draw(self, count: int) -> list[int]:
        """Indices of tasks."""
        indices: list[int] = []
        for _ in range(count):
            if not self._lottery.total:  # each is in this draw already
                self._restore_weights(indices)
            ticket = seeded_random(self._seed, "draw", self._draws).randrange(self._lottery.total)
            indices.append(self._lottery.owner(ticket))
            self._lottery.set(indices[-1], 0)
            self._draws += 1
        self._restore_weights(indices)
        return indices

    def replay_draw(self, index: int) -> None:
        """Count a draw of this index from before a resumption; later draws then continue as in the original run."""
        self._draws += 1

    def learn(self, index: int, mean_reward: float) -> None:
        """Record the mean reward of a group of attempts at this task, clamped to [0, 1]."""
        decay, difficulty = self._options.decay, self._difficulty(index)
        self._means[index] = decay * self._means[index] + (1 - decay) * min(max(mean_reward, 0.0), 1.0)
        self._visits[index] += 1
        self._lottery.set(index, self._weight(index))
        self._census[difficulty] -= 1
        self._census[self._difficulty(index)] += 1

    def metrics(self) -> dict[str, float]:
        """Shares of the tasks, and the effective number of tasks in a draw (Kish 1965)."""
        count = len(self._means)
        shares = {difficulty.value: self._census[difficulty] / count for difficulty in TaskDifficulty}
        return {**shares, "effective": self._lottery.total**2 / self._lottery.squares}

    def state(self) -> Json:
        visited = [index for index, visits in enumerate(self._visits) if visits]
        return {
            "draws": self._draws,
            "seen": visited,
            "means": [self._means[index] for index in visited],
            "visits": [self._visits[index] for index in visited],
        }

    def restore(self, state: Json) -> None:
        self._draws = state["draws"]
        for index, mean, visits in zip(state["seen"], state["means"], state["visits"], strict=True):
            self._means[index], self._visits[index] = mean, visits
        self._weigh_all()

    def _weigh_all(self) -> None:
        indices = range(len(self._means))
        self._lottery = WeightedSampler([self._weight(index) for index in indices])
        self._census = dict.fromkeys(TaskDifficulty, 0)
        for index in indices:
            self._census[self._difficulty(index)] += 1

    def _weight(self, index: int) -> int:
        mean, floor = self._means[index], self._options.floor
        return max(1, round(WEIGHT_SCALE * (floor + (1 - floor) * 4 * mean * (1 - mean))))

    def _difficulty(self, index: int) -> TaskDifficulty:
        if not self._visits[index]:
            return TaskDifficulty.UNSEEN
        prior = self._options.decay ** self._visits[index]  # weight of the initial 1/2 in the mean
        rate = (self._means[index] - PRIOR * prior) / (1 - prior)
        if rate >= ALWAYS_SOLVED:
            return TaskDifficulty.SOLVED
        return TaskDifficulty.UNSOLVED if rate <= 1 - ALWAYS_SOLVED else TaskDifficulty.MIXED

    def _restore_weights(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._lottery.set(index, self._weight(index))


class WeightedSampler:
    """Weighted sampling: each owner has as many tickets as its weight; finding an owner and changing a weight take log
    n steps.

    A Fenwick tree (10.1002/spe.4380240306): node i, from 1, holds the sum over the last i & -i weights up to i.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = array("q", weights)
        self._nodes = array("q", [0, *weights])
        for node in range(1, len(self._nodes)):
            parent = node + (node & -node)
            if parent < len(self._nodes):
                self._nodes[parent] += self._nodes[node]
        self.total = sum(weights)
        self.squares = sum(weight * weight for weight in weights)

    def set(self, owner: int, weight: int) -> None:
        change = weight - self._weights[owner]
        self.squares += weight * weight - self._weights[owner] ** 2
        self.total += change
        self._weights[owner] = weight
        node = owner + 1
        while node < len(self._nodes):
            self._nodes[node] += change
            node += node & -node

    def owner(self, ticket: int) -> int:
        """The owner of a ticket. ticket: in [0, total)."""
        node, step = 0, 1 << (len(self._weights)).bit_length()
        while step:
            further = node + step
            if further < len(self._nodes) and self._nodes[further] <= ticket:
                ticket -= self._nodes[further]
                node = further
            step >>= 1
        return node


class TaskFile:
    """Random access to the rows of a JSONL file, without keeping them in memory.

    Args:
        check: returns what is wrong with a row, or None.
        limit: the first rows only.

    Raises:
        UsageError: a row does not pass the check, or there are no rows.
    """

    def __init__(self, path: Path, check: Callable[[Json], str | None], limit: int | None = None) -> None:
        self._path = path
        self._starts, self._ends = array("Q"), array("Q")
        for line in jsonl.check_lines(path, check, limit):
            self._starts.append(line.start)
            self._ends.append(line.end)
        if not self._starts:
            raise UsageError(f"{path}: no tasks in it; each line must be a task")

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, indices: Iterable[int]) -> Iterator[Json]:
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(self._starts[index])
                text = file.read(self._ends[index] - self._starts[index])
                try:
                    yield orjson.loads(text.removeprefix(jsonl.BOM))
                except orjson.JSONDecodeError:
                    raise UsageError(f"{self._path}: changed while this run reads it; leave it as it was") from None


def task_problem(row: Json, agent: str) -> str | None:
    """The reason why a row is not a task for this agent, or None."""
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        return 'not a task: it needs {"responses_create_params": {"input": ...}}'
    reference = row.get("agent_ref")
    if reference is None:
        return None
    name = reference.get("name") if isinstance(reference, dict) else reference
    if name != agent:
        return f"agent_ref names {name!r}, and these tasks are for {agent!r}; move it to a separate environment"
    return None


def for_agent(row: Json, agent: str, params: Mapping[str, Any]) -> Json:
    """The row with this agent, and with these parameters overriding its own."""
    return {
        "agent_ref": {"type": AGENT_TYPE, "name": agent},
        **row,
        "responses_create_params": {**row["responses_create_params"], **params},
    }


class RoundRobin:
    """Weighted round robin: after any number of turns n, each has had n times its share, rounded up or down.

    counts: the turns so far of each. A turn goes to the one with the earliest deadline among those that are allowed it:
    turn number j of one with share s belongs in floor(j / s) to ceil((j + 1) / s) - 1. Earliest deadline first keeps
    all deadlines, because a schedule that keeps them exists (Tijdeman, 10.1016/0012-365X(80)90269-1).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        self._periods = [sum(exact) / weight for weight in exact]
        self.counts = [0] * len(weights)

    def next(self) -> int:
        turn = sum(self.counts)
        places = [
            (math.ceil((count + 1) * period), place)
            for place, (count, period) in enumerate(zip(self.counts, self._periods, strict=True))
            if math.floor(count * period) <= turn
        ]
        _, place = min(places)
        self.counts[place] += 1
        return place


@dataclass(frozen=True, slots=True)
class Task:
    """One turn of one task.

    index: in its environment. number: how many tasks this run took before it; the row's `_ng_task_index`. row: has its
    agent and its environment's parameters.
    """

    environment: str
    index: int
    number: int
    row: Json

    @property
    def key(self) -> str:
        """The same for each turn of a task."""
        return f"{self.environment}/{self.index}"


class DrawnTask(NamedTuple):
    """The task of a number."""

    environment: str
    index: int  # type: ignore[assignment]  # hides tuple.index


class TaskSource:
    """The tasks of all environments of a run.

    fields: that every task must have. images: how the model reads images, or the reason why it does not; None if that
    is not known yet.

    Raises:
        UsageError: rows that are not tasks, name another agent, or set parameters that training rollouts must not set.
    """

    def __init__(
        self,
        options: RolloutOptions,
        seed: int,
        fields: frozenset[str] = frozenset(),
        images: Images | None = None,
    ) -> None:
        self.fields = {name.partition(".")[0] for name in fields}  # of rows
        self._seed = seed
        self._next_number = 0
        self._recorded: Mapping[int, DrawnTask] = {}
        self._environments = {
            environment.key: _Environment(environment, options, seed, fields, images) for environment in options.sources
        }
        self._turns = RoundRobin([environment.weight for environment in options.sources])

    def take(self, count: int) -> list[Task]:
        """The next tasks: first those drawn before a resumption, then new ones."""
        numbers = range(self._next_number, self._next_number + count)
        redrawn = [self._redraw(number) for number in takewhile(self._recorded.__contains__, numbers)]
        self._next_number += count
        return redrawn + self._draw(numbers[len(redrawn) :])

    def replay(self, drawn: Mapping[int, DrawnTask]) -> None:
        """Assign these numbers to the tasks that were drawn before a resumption, independent of later rewards."""
        self._recorded = drawn

    def _redraw(self, number: int) -> Task:
        name, index = self._recorded[number]
        if name not in self._environments:
            raise UsageError(
                f"task {number} was drawn from {name!r}, which is no longer an environment; set "
                "rollouts.environments back, or begin a new run"
            )
        self._turns.counts[list(self._environments).index(name)] += 1
        self._environments[name].replay_draw(index)
        return self.restore_task(name, index, number)

    def _draw(self, numbers: Sequence[int]) -> list[Task]:
        names = list(self._environments)
        turns = [names[self._turns.next()] for _ in numbers]
        draws = {name: iter(self._environments[name].draw(turns.count(name))) for name in names}
        tasks = []
        for number, name in zip(numbers, turns, strict=True):
            index, row = next(draws[name])
            tasks.append(_task(name, index, number, row))
        return tasks

    def restore_task(self, environment: str, index: int, number: int) -> Task:
        """A task that was taken before, unchanged."""
        return _task(environment, index, number, self._environments[environment].row(index))

    def learn(self, key: str, rewards: Sequence[float]) -> None:
        """Record the rewards of a group of attempts at this task, without null ones."""
        if rewards:
            name, index = key.rsplit("/", 1)
            self._environments[name].learn(int(index), fmean(rewards))

    @property
    def is_several(self) -> bool:
        """Whether there are several environments."""
        return len(self._environments) > 1

    def metrics(self) -> dict[str, float]:
        """Progress of each environment."""
        values: dict[str, float] = {}
        for name, environment in self._environments.items():
            values |= {f"tasks/{name}/{metric}": value for metric, value in environment.metrics().items()}
        return values

    def state(self) -> Json:
        """The state from which `restore` continues, as JSON."""
        turns = self._turns.counts
        return {
            "seed": self._seed,
            "taken": self._next_number,
            "environments": {
                name: {**environment.state(), "turns": turns[place]}
                for place, (name, environment) in enumerate(self._environments.items())
            },
        }

    def check(self, state: Json) -> None:
        """Raise UsageError if `state` belongs to other tasks or another order."""
        if state["seed"] != self._seed:
            raise UsageError(f"seed: {state['seed']} when the tasks were drawn before, {self._seed} now; set it back")
        environments = state["environments"]
        if set(environments) != set(self._environments):
            raise UsageError(
                f"rollouts.environments: {', '.join(environments)} when the tasks were drawn before, "
                f"{', '.join(self._environments)} now; set them back, or begin a new run"
            )
        for name, environment in self._environments.items():
            environment.check(environments[name])

    def restore(self, state: Json) -> None:
        """Continue from `state`. Raises UsageError, before anything is changed: see `check`."""
        self.check(state)
        environments = state["environments"]
        for name, environment in self._environments.items():
            environment.restore(environments[name])
        self._next_number = state["taken"]
        if all(environments[name]["weight"] == source.weight for name, source in self._environments.items()):
            self._turns.counts = [environments[name]["turns"] for name in self._environments]


def _task(environment: str, index: int, number: int, row: Json) -> Task:
    return Task(environment, index, number, {**row, "_ng_task_index": number})


class _Environment:
    """The tasks of one file for one agent."""

    def __init__(
        self,
        options: EnvironmentOptions,
        rollouts: RolloutOptions,
        seed: int,
        fields: frozenset[str],
        images: Images | None,
    ) -> None:
        self.weight = options.weight
        self._images = images
        self._options = options
        self._fields = fields
        self._difficulties: array[float] | None = array("d") if rollouts.easy_first else None
        self._file = TaskFile(Path(options.tasks), self._problem)
        self._digest = file_digest(Path(options.tasks))
        longest = options.max_output_tokens or rollouts.max_output_tokens
        self._params = {} if longest is None else {"max_output_tokens": longest}
        seed_text, count = f"{seed} {options.key}", len(self._file)
        self._sampler: Epochs | Curriculum = Epochs(seed_text, count, self._difficulties)
        if rollouts.curriculum is not None:
            self._sampler = Curriculum(rollouts.curriculum, seed_text, count)

    def draw(self, count: int) -> list[tuple[int, Json]]:
        """Tasks with their index, ready to collect."""
        indices = self._sampler.draw(count)
        return list(zip(indices, self._rows(indices), strict=True))

    def replay_draw(self, index: int) -> None:
        """Count a draw from before a resumption. Raises UsageError: there is no such task in the file."""
        if index >= len(self._file):
            raise UsageError(
                f"{self._options.tasks}: task {index} was drawn before, and there are {len(self._file):,} tasks in it; "
                "restore the file, or begin a new run"
            )
        self._sampler.replay_draw(index)

    def row(self, index: int) -> Json:
        return next(self._rows([index]))

    def _rows(self, indices: Sequence[int]) -> Iterator[Json]:
        return (for_agent(row, self._options.agent, self._params) for row in self._file.rows(indices))

    def learn(self, index: int, mean_reward: float) -> None:
        self._sampler.learn(index, mean_reward)

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

    def check(self, state: Json) -> None:
        """Raise UsageError if the state belongs to another file or another sampler."""
        path = self._options.tasks
        if (state["tasks"], state["digest"]) != (len(self._file), self._digest):
            raise UsageError(
                f"{path}: changed since its tasks were drawn before: {state['tasks']:,} tasks, sha256 {state['digest'][:12]} "
                f"then, {len(self._file):,}, {self._digest[:12]} now; restore the file, or begin a new run"
            )
        if state["kind"] != self._sampler.kind:
            raise UsageError(
                f"rollouts.curriculum, easy_first: tasks were drawn by {state['kind']} before, by {self._sampler.kind} now; set it back, "
                "or begin a new run"
            )

    def restore(self, state: Json) -> None:
        self._sampler.restore(state["drawn"])

    def _problem(self, row: Json) -> str | None:
        if self._difficulties is not None:
            difficulty = row.get("difficulty")
            if isinstance(difficulty, bool) or not isinstance(difficulty, int | float):
                return f"rollouts.easy_first needs a number as `difficulty`, not {difficulty!r:.60}"
            self._difficulties.append(difficulty)
        if wrong := task_problem(row, self._options.agent):
            return wrong
        # the recipe's temperature overrides the row's
        bent = distorted_sampling({**row["responses_create_params"], "temperature": 1.0}, 1.0)
        if wrong := bent or missing_field(row, self._fields):
            return wrong
        return None if self._images is None else task_media_problem(row, self._images)


class Epochs:
    """Takes each task once per epoch, in a new order each time; with the methods of Curriculum.

    difficulties: of the tasks; the first epoch is in their order.
    """

    def __init__(self, seed: str, count: int, difficulties: Sequence[float] | None = None) -> None:
        self.kind = "epochs" if difficulties is None else "epochs, easy first"
        self._seed = seed
        self._count = count
        self._difficulties = difficulties
        self._begin(0)

    def _begin(self, epoch: int, position: int = 0) -> None:
        self._epoch, self._position = epoch, position
        draw = seeded_random(self._seed, "epoch", epoch)
        order = draw.sample(range(self._count), self._count)
        if self._difficulties is not None and epoch == 0:
            order.sort(key=self._difficulties.__getitem__)
        self._order = array("L", order)

    def draw(self, count: int) -> list[int]:
        indices = []
        for _ in range(count):
            if self._position == self._count:
                self._begin(self._epoch + 1)
            indices.append(self._order[self._position])
            self._position += 1
        return indices

    def replay_draw(self, index: int) -> None:
        """The order of an epoch depends only on the seed: the index is the next one."""
        self.draw(1)

    def learn(self, index: int, mean_reward: float) -> None:
        """Does nothing: rewards do not change the order."""

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._epoch + self._position / self._count}

    def state(self) -> Json:
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: Json) -> None:
        self._begin(state["epoch"], state["position"])
