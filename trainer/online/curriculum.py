"""A curriculum that draws tasks by difficulty: those that are always or never solved come less often.

For each task, m is the running mean of its groups' mean rewards x in [0, 1], and w its weight in the draw:

    m = 1/2 at first, then m <- decay m + (1 - decay) x
    w = floor + (1 - floor) 4 m (1 - m)

4 m (1 - m) is the variance of a 0/1 reward, and thus the size of a group's advantages, relative to its maximum. An
unseen task has weight 1. A task that is always or never solved approaches `floor` and stays in the draw.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from enum import Enum

from ngym.schema import Json

from ..recipe.rl import CurriculumOptions

PRIOR = 0.5
FULL = 1 << 20  # weights are integers, so that their sum does not depend on the order of updates
NEARLY = 0.95  # a running mean of at least this counts as "always"


class Known(Enum):
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
        drawn: list[int] = []
        for _ in range(count):
            if not self._lottery.total:  # each is in this draw already
                self._put_back(drawn)
            ticket = random.Random(f"{self._seed} draw {self._draws}").randrange(self._lottery.total)
            drawn.append(self._lottery.owner(ticket))
            self._lottery.set(drawn[-1], 0)
            self._draws += 1
        self._put_back(drawn)
        return drawn

    def draw_again(self, index: int) -> None:
        """Count a draw of this index from before a resumption; later draws then continue as in the original run."""
        self._draws += 1

    def learn(self, index: int, mean_reward: float) -> None:
        """Record the mean reward of a group of attempts at this task, clamped to [0, 1]."""
        decay, known = self._options.decay, self._known(index)
        self._means[index] = decay * self._means[index] + (1 - decay) * min(max(mean_reward, 0.0), 1.0)
        self._visits[index] += 1
        self._lottery.set(index, self._weight(index))
        self._census[known] -= 1
        self._census[self._known(index)] += 1

    def metrics(self) -> dict[str, float]:
        """Shares of the tasks, and the effective number of tasks in a draw (Kish 1965)."""
        count = len(self._means)
        shares = {known.value: self._census[known] / count for known in Known}
        return {**shares, "effective": self._lottery.total**2 / self._lottery.squares}

    def state(self) -> Json:
        seen = [index for index, visits in enumerate(self._visits) if visits]
        return {
            "draws": self._draws,
            "seen": seen,
            "means": [self._means[index] for index in seen],
            "visits": [self._visits[index] for index in seen],
        }

    def restore(self, state: Json) -> None:
        self._draws = state["draws"]
        for index, mean, visits in zip(state["seen"], state["means"], state["visits"], strict=True):
            self._means[index], self._visits[index] = mean, visits
        self._weigh_all()

    def _weigh_all(self) -> None:
        indices = range(len(self._means))
        self._lottery = Lottery([self._weight(index) for index in indices])
        self._census = dict.fromkeys(Known, 0)
        for index in indices:
            self._census[self._known(index)] += 1

    def _weight(self, index: int) -> int:
        mean, floor = self._means[index], self._options.floor
        return max(1, round(FULL * (floor + (1 - floor) * 4 * mean * (1 - mean))))

    def _known(self, index: int) -> Known:
        if not self._visits[index]:
            return Known.UNSEEN
        prior = self._options.decay ** self._visits[index]  # weight of the initial 1/2 in the mean
        rate = (self._means[index] - PRIOR * prior) / (1 - prior)
        if rate >= NEARLY:
            return Known.SOLVED
        return Known.UNSOLVED if rate <= 1 - NEARLY else Known.MIXED

    def _put_back(self, drawn: Sequence[int]) -> None:
        for index in drawn:
            self._lottery.set(index, self._weight(index))


class Lottery:
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
