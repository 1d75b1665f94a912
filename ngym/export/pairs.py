"""Which rollouts of a group are paired? A strategy takes the group, best first, and says pairs, those it wants most first.

best-worst   the best with the worst, the second best with the second worst ...: nobody is in two pairs
best-rest    the best with every other, the worst first
adjacent     down the ladder of rewards: the best with the next one under it, that one with the next ...
all          every two, the largest margin first
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ngym.export.candidate import Candidate, Pair
from ngym.export.options import Strategy

TOLERANCE = 1e-9  # 0.7 - 0.2 is a margin of 0.5


@dataclass(frozen=True)
class Fit:
    """May these two be a pair? margin: the least difference of their rewards; 0: any difference."""

    margin: float

    def __call__(self, chosen: Candidate, rejected: Candidate) -> bool:
        difference = chosen.reward - rejected.reward
        apart = difference > TOLERANCE and difference >= self.margin - TOLERANCE
        # the same words with another reward: chance or a flaky verifier, and nothing that the policy could do
        return apart and chosen.exemplary and chosen.words != rejected.words


Pairing = Callable[[Sequence[Candidate], Fit], Iterator[Pair]]


def pairing(strategy: Strategy) -> Pairing:
    pairings: dict[Strategy, Pairing] = {
        "best-worst": _best_worst,
        "best-rest": _best_rest,
        "adjacent": _adjacent,
        "all": _all,
    }
    return pairings[strategy]


def ranked(group: Sequence[Candidate], rng: random.Random) -> list[Candidate]:
    """Best first; equals in random order, because a file's order favours what was finished first."""
    shuffled = rng.sample(group, len(group))
    return sorted(shuffled, key=lambda candidate: -candidate.reward)


def _best_worst(group: Sequence[Candidate], fits: Fit) -> Iterator[Pair]:
    free = list(group)
    while free:
        chosen = free.pop(0)
        rejected = next((other for other in reversed(free) if fits(chosen, other)), None)
        if rejected is not None:
            free.remove(rejected)
            yield Pair(chosen, rejected)


def _best_rest(group: Sequence[Candidate], fits: Fit) -> Iterator[Pair]:
    best = next((candidate for candidate in group if candidate.exemplary), None)
    if best is not None:
        yield from (Pair(best, other) for other in reversed(group) if fits(best, other))


def _adjacent(group: Sequence[Candidate], fits: Fit) -> Iterator[Pair]:
    at = 0
    while at < len(group):
        below = next((other for other in range(at + 1, len(group)) if fits(group[at], group[other])), None)
        if below is not None:
            yield Pair(group[at], group[below])
        at = at + 1 if below is None else below


def _all(group: Sequence[Candidate], fits: Fit) -> Iterator[Pair]:
    pairs = [Pair(chosen, other) for other in reversed(group) for chosen in group if fits(chosen, other)]
    yield from sorted(pairs, key=lambda pair: -pair.margin)
