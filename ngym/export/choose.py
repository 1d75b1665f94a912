"""Chooses the rollouts of each task: demonstrations, and preference pairs.

best-worst   the best with the worst, the second best with the second worst ...: no rollout is in two pairs
best-rest    the best with every other, the worst first
adjacent     by descending reward: the best with the next lower one, that one with the next ...
all          every pair, the largest margin first
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ngym.export.options import Options, Strategy
from ngym.export.tally import Candidate, Pair, Reason, Row, Single, Tally, used

TOLERANCE = 1e-9  # 0.7 - 0.2 is a margin of 0.5


@dataclass(frozen=True)
class Fit:
    """Whether two candidates may be a pair. margin: the least difference of their rewards; 0: any difference."""

    margin: float

    def __call__(self, chosen: Candidate, rejected: Candidate) -> bool:
        difference = chosen.reward - rejected.reward
        apart = difference > TOLERANCE and difference >= self.margin - TOLERANCE
        # equal texts with different rewards come from chance or a flaky verifier, not from the policy
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
    """Best first; ties in random order, because the order of a file favours rollouts that finished first."""
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


def choose(candidates: Sequence[Candidate], options: Options, tally: Tally) -> list[Row]:
    """The rows to write, in the order of the candidates. Every candidate is counted as kept or dropped."""
    rng = random.Random(options.seed)
    rows = (_pairs if options.format == "preferences" else _singles)(candidates, options, tally, rng)
    rows = _limited(rows, options.limit, tally, rng)
    tally.count(rows)
    return rows


def _singles(candidates: Sequence[Candidate], options: Options, tally: Tally, rng: random.Random) -> list[Row]:
    kept = set(candidates)
    if options.best is not None:
        kept = {best for group in _groups(candidates) for best in ranked(group, rng)[: options.best]}
    tally.drop(Reason.NOT_BEST, len(candidates) - len(kept))
    return [Single(candidate, candidate.exemplary) for candidate in candidates if candidate in kept]


def _pairs(candidates: Sequence[Candidate], options: Options, tally: Tally, rng: random.Random) -> list[Row]:
    fits, pair_up = Fit(options.margin or 0.0), pairing(options.strategy)
    rows: list[Row] = []
    for group in _groups(candidates):
        best_first = ranked(group, rng)
        pairs = list(islice(pair_up(best_first, fits), options.pairs_per_task))
        paired = used(pairs)
        for candidate in group:
            if candidate not in paired:
                tally.drop(_why_unpaired(candidate, group, fits))
        rows += pairs
    return rows


def _why_unpaired(candidate: Candidate, group: Sequence[Candidate], fits: Fit) -> Reason:
    if len(group) == 1:
        return Reason.ALONE
    if any(fits(candidate, other) or fits(other, candidate) for other in group):
        return Reason.SPARE
    return Reason.NO_PARTNER


def _limited(rows: list[Row], limit: int | None, tally: Tally, rng: random.Random) -> list[Row]:
    """A random choice of rows, in their order."""
    if limit is None or len(rows) <= limit:
        return rows
    kept = [rows[index] for index in sorted(rng.sample(range(len(rows)), limit))]
    tally.drop(Reason.LIMIT, len(used(rows)) - len(used(kept)))
    return kept


def _groups(candidates: Iterable[Candidate]) -> Iterable[list[Candidate]]:
    groups: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.task, []).append(candidate)
    return groups.values()
